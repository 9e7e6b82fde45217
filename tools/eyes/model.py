"""The model's tokenizer, shape and first weights: a real Qwen3-VL of 2.9 million weights."""

from __future__ import annotations

from random import Random
from typing import Any

from tools.eyes.kinds import KINDS
from tools.eyes.lessons import OWN_CORPUS
from tools.eyes.scenes import described, questions, scene

from rl_vlm.zoo.tiny.copying import begin_with_copying
from rl_vlm.zoo.tiny.model import MAX_LENGTH, qwen_processor, random_model
from rl_vlm.zoo.tiny.tokenizer import build_tokenizer
from rl_vlm.zoo.words import lesson as forms

VOCABULARY = 4096
HIDDEN, LAYERS, FEED_FORWARD = 128, 4, 384
TOWER, DEPTH = 128, 4
MOST_PIXELS = 224 * 224
GRID = 14  # patches per side of the largest square


def corpus() -> tuple[str, ...]:
    """What the tokenizer learns its words from."""
    rng, texts = Random("corpus"), []
    for draw in KINDS.values():
        for _ in range(150):
            asked = draw(rng)
            texts += [asked.question, f" {asked.answer}", *(f" {other}" for other in asked.others)]
    for _ in range(1500):
        things = scene(rng)[1]
        texts += [part for pair in (*questions(rng, things), described(rng, things)) for part in pair]
    return (*forms.CORPUS, *OWN_CORPUS, *texts)


def build_processor() -> Any:
    return qwen_processor(build_tokenizer(MAX_LENGTH, corpus(), VOCABULARY), MOST_PIXELS)


def build_model(tokenizer: Any) -> Any:
    from transformers import Qwen3VLConfig

    token_id = tokenizer.convert_tokens_to_ids
    end, pad = token_id("<|im_end|>"), token_id("<|endoftext|>")
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,  # the least that vLLM's kernels support
            "intermediate_size": FEED_FORWARD, "max_position_embeddings": MAX_LENGTH, "initializer_range": 0.05,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 4, 4], "mrope_interleaved": True,
            },
            "tie_word_embeddings": True, "bos_token_id": pad, "eos_token_id": end, "pad_token_id": pad,
        },
        vision_config={
            "depth": DEPTH, "hidden_size": TOWER, "num_heads": 4, "intermediate_size": 3 * TOWER, "patch_size": 16,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": HIDDEN,
            "num_position_embeddings": GRID**2, "deepstack_visual_indexes": [1], "initializer_range": 0.05,
        },
        image_token_id=token_id("<|image_pad|>"), video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"), vision_end_token_id=token_id("<|vision_end|>"),
        tie_word_embeddings=True, dtype="float32",
    )  # fmt: skip
    model = random_model(config, seed=0)
    begin_with_copying(model, tokenizer.get_vocab())
    return model
