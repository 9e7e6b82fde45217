"""The tokenizer and chat template of the tiny model: Qwen's format with 490 ids, built from code.

The byte-level BPE is trained on the small corpus below with Qwen's split pattern; Qwen's added tokens follow in
Qwen's order. The template renders as the one of Qwen3-VL-Instruct does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_vlm.zoo.shapes.environment import COUNT_QUESTION, TRY_AGAIN, format_answer, format_call

NUM_BPE_IDS = 464  # of most variants

# Qwen's added tokens in the order of their ids, the special ones first.
SPECIAL_TOKENS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip
OTHER_TOKENS = [
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>",
    "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
]  # fmt: skip

# Our own template, which renders texts, images, tools and calls as that of Qwen3-VL-Instruct does.
CHAT_TEMPLATE = Path(__file__).with_name("qwen.jinja").read_text(encoding="utf-8")

# Words that must become single tokens come often; the sentences below fill the vocabulary with common pieces.
_FRAME = (
    "user\nassistant\nsystem\n",
    format_answer("3"),
    format_call("12"),
    COUNT_QUESTION,
    TRY_AGAIN,
    "What colour? Which corner? Which number? Is a shape at top left? bottom right red green blue yellow yes no",
    '<tool_call>{"name": "calc_score", "arguments": {"answer": "x"}}</tool_call> or Answer: \\boxed{x}\n',
    "Answer: \\boxed{12} Call calc_score. Find x. Find the measure of angle ABC. Find the length of AB. degrees",
    "Score: 0. The answer 12 is wrong. Look for the mistake. Score: 1. The answer 12 is right.",
    "Now finish with Answer: \\boxed{...} and no tool call. Your next message is the last one: give your final Answer:",
)
_SENTENCES = (
    "<answer>red</answer> <answer>green</answer> <answer>yellow</answer> <answer>yes</answer> <answer>no</answer>",
    "<answer>top left</answer> <answer>top right</answer> <answer>bottom left</answer> <answer>bottom right</answer>",
    "Find x. Find the measure of the angle in the triangle. Find the area of the circle. Round to the nearest tenth.",
    "In the figure, the length of the side of the parallelogram is given. Use the diagram to solve for y.",
    "$m \\angle A$ $\\overline{AB}$ $\\triangle ABC$ $\\sqrt{2}$ $\\frac{1}{2}$ $\\odot O$ $\\widehat{CD}$ $^\\circ$",
    "The image shows two lines that are parallel. If the radius is five, what is the perimeter of the shaded region?",
    "Choose the better picture: 0 means the first image, 1 the second image, and -1 that there is no difference.",
    "City: Region: Country: Latitude: Longitude: True False the statement about both images is",
)


def train_bpe(
    extra: Sequence[str] = (), split: Any = None, num_ids: int = NUM_BPE_IDS
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The vocabulary (text -> id) and the merges, always the same; the words of `extra` become single tokens.

    split: cuts texts into words and these into bytes, by default as Qwen's tokenizer does.
    """
    import json

    from tokenizers import Tokenizer, trainers
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = split or Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=num_ids, initial_alphabet=sorted(ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator([*list(extra) * 20, *_FRAME * 20, *_SENTENCES * 2], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def build_tokenizer(max_length: int, extra: Sequence[str] = (), num_ids: int = NUM_BPE_IDS) -> Any:
    """A Hugging Face `Qwen2Tokenizer` with the tiny vocabulary and the chat template."""
    from tokenizers import AddedToken
    from transformers import Qwen2Tokenizer

    vocabulary, merges = train_bpe(extra, num_ids=num_ids)
    # The ids of all added tokens are fixed beforehand: the class itself would number the special ones first.
    added = {
        len(vocabulary) + number: AddedToken(text, special=text in SPECIAL_TOKENS, normalized=False)
        for number, text in enumerate(SPECIAL_TOKENS + OTHER_TOKENS)
    }
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=merges,  # type: ignore[arg-type]  # pairs are what a tokenizer.json holds, and are taken
        added_tokens_decoder=added,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token=None,  # type: ignore[arg-type]  # as in Qwen's: bytes leave nothing unknown
        extra_special_tokens=SPECIAL_TOKENS,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
