"""The tiny model in SmolVLM's form: pictures in tiles, plain positions, a Llama, and another tokenizer and template.

A picture of 64x64 is four tiles and the whole, one token each.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_vlm.zoo.tiny.tokenizer import train_bpe

TILE, TILES_PER_SIDE = 32, 2  # pixels
_TILES = [f"<row_{row + 1}_col_{column + 1}>" for row in range(TILES_PER_SIDE) for column in range(TILES_PER_SIDE)]
SMOL_TOKENS = [
    "<|im_start|>", "<|im_end|>", "<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>", *_TILES,
]  # fmt: skip
# Our own template, which renders texts and images as SmolVLM's does.
CHAT_TEMPLATE = Path(__file__).with_name("smol.jinja").read_text(encoding="utf-8")


def build_processor(max_length: int, corpus: Sequence[str] = ()) -> Any:
    from transformers import SmolVLMImageProcessor, SmolVLMProcessor, SmolVLMVideoProcessor

    return SmolVLMProcessor(
        image_processor=SmolVLMImageProcessor(
            size={"longest_edge": TILES_PER_SIDE * TILE}, max_image_size={"longest_edge": TILE}
        ),
        tokenizer=_build_tokenizer(max_length, corpus),
        video_processor=SmolVLMVideoProcessor(),
        image_seq_len=1,
        chat_template=CHAT_TEMPLATE,
    )


def _build_tokenizer(max_length: int, corpus: Sequence[str]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    split = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)])
    # Often, so that the words of the template become single tokens. A reply follows a colon and a blank.
    vocabulary, merges = train_bpe([*corpus, *["User:\nAssistant: <answer>yes</answer> Is shape"] * 5], split)
    tokenizer = Tokenizer(BPE(vocabulary, merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = split, decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SMOL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<end_of_utterance>",
        pad_token="<|im_end|>",
        extra_special_tokens={"image_token": "<image>"},
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def build_config(tokenizer: Any, max_length: int) -> Any:
    from transformers import SmolVLMConfig

    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    return SmolVLMConfig(
        text_config={
            "model_type": "llama", "vocab_size": len(tokenizer), "hidden_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 192,
            "max_position_embeddings": max_length, "initializer_range": 0.08, "tie_word_embeddings": True,
            "bos_token_id": tokenizer.convert_tokens_to_ids("<|im_start|>"), "eos_token_id": end, "pad_token_id": pad,
        },
        vision_config={
            "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
            "image_size": TILE, "patch_size": 8, "initializer_range": 0.08,
        },
        scale_factor=TILE // 8, image_token_id=tokenizer.convert_tokens_to_ids("<image>"), pad_token_id=pad,
        tie_word_embeddings=True, dtype="float32",
    )  # fmt: skip
