"""The tiny offline VLM: a real Qwen3-VL of half a million weights, built and warm-started from code.

It has Qwen's architecture, tokenizer format, chat template and processor, needs no network, and learns to count from
pixels by reinforcement learning within minutes on one core. The warm start teaches form and perception, not the task.
"""

from __future__ import annotations

import hashlib
import logging
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_vlm.files import built_once, replace_folder
from rl_vlm.types import UserInputError
from rl_vlm.zoo.tiny import smol
from rl_vlm.zoo.tiny.tokenizer import CHAT_TEMPLATE, build_tokenizer
from rl_vlm.zoo.tiny.variants import VARIANTS, variant_named

# Part of the cache key: raise it whenever the weights would come out differently.
RECIPE_VERSION = 4
ROUNDS = 3  # of lessons at most
MAX_LENGTH = 8192
POSITIONS = ("visual.pos_embed.weight", "position_embedding.weight")  # of the vision tower
MIN_PIXELS, MAX_PIXELS = 32 * 32, 128 * 128  # 1 to 16 image tokens

SHIPPED = Path(__file__).with_name("shipped")  # models of seed 0, as `ship.py` builds them

logger = logging.getLogger(__name__)


def tiny_model_path(seed: int = 0, variant: str = "small") -> Path:
    """The folder of the tiny model. Some of seed 0 come with the package. Others are built on first use (about a
    minute) under `~/.cache/rl_vlm`, or RL_VLM_CACHE.
    """
    known = variant_named(variant)
    if known.shipped and seed == 0:
        return SHIPPED / variant
    lessons = known.version
    version = str(RECIPE_VERSION) if lessons is None else f"{RECIPE_VERSION}.{lessons}"
    key = hashlib.sha256(f"{version}-{variant}-{seed}".encode()).hexdigest()[:12]
    name = f"tiny-{variant}-{seed}-{key}"
    return built_once(name, lambda folder: make_tiny(folder, seed=seed, variant=variant))


def make_tiny(folder: str | Path, seed: int = 0, variant: str = "small", steps: int | None = None) -> Path:
    """Build the tiny model and write it as a Hugging Face folder, which appears complete or not at all.

    `steps` shortens the warm start, for tests of everything but learning.
    """
    known = variant_named(variant)
    folder = Path(folder)
    if folder.exists():
        raise UserInputError(f"{folder} exists already: remove it or choose another folder.")
    # Imported here: the path of a cached model must not need torch and the environments of the warm start.
    import torch

    from rl_vlm.models.families.qwen_fast import fast_vision
    from rl_vlm.models.loading import save_model
    from rl_vlm.models.supervised import DialogueEncoder
    from rl_vlm.zoo.tiny.teach import teach

    steps = known.steps if steps is None else steps
    name = f"tiny model {variant}"
    logger.info("%s: building %s (seed %d, %d steps); this happens once", name, folder, seed, steps)
    started = time.monotonic()
    processor = build_processor(variant)
    model = build_model(seed, processor.tokenizer, variant)
    encoder = DialogueEncoder(processor)
    draw = known.lessons.drawer(seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # faster for a model this small, and the weights do not depend on the machine's cores
    try:
        with nullcontext() if known.smol else fast_vision(model):
            for _ in range(ROUNDS):
                loss = teach(
                    model, encoder, draw, steps=steps, batch=known.batch, rise=known.rise, rate=known.rate,
                    buckets=known.buckets, name=name,
                )  # fmt: skip
                if known.passes(model, encoder):
                    break
    finally:
        torch.set_num_threads(threads)
    logger.info("%s: done in %.0f s, loss %.3f", name, time.monotonic() - started, loss)
    with replace_folder(folder) as draft:
        save_model(model, draft)
        processor.save_pretrained(draft)
        for file in draft.iterdir():
            file.chmod(0o644)  # a cache may be shared
    return folder


def build_processor(variant: str = "small") -> Any:
    known = variant_named(variant)
    if known.smol:
        return smol.build_processor(MAX_LENGTH, known.corpus)
    return qwen_processor(build_tokenizer(MAX_LENGTH, known.corpus, known.vocabulary), MAX_PIXELS)


def qwen_processor(tokenizer: Any, most_pixels: int) -> Any:
    """Qwen's processor for patches of 16 pixels, four of which are a token."""
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    images = {
        "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
        "size": {"shortest_edge": MIN_PIXELS, "longest_edge": most_pixels},
    }  # fmt: skip
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**images),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(**images),
        chat_template=CHAT_TEMPLATE,
    )


def build_config(tokenizer: Any, variant: str = "small") -> Any:
    from transformers import Qwen3VLConfig

    known = variant_named(variant)
    if known.smol:
        return smol.build_config(tokenizer, MAX_LENGTH)
    token_id = tokenizer.convert_tokens_to_ids
    end, pad = token_id("<|im_end|>"), token_id("<|endoftext|>")
    return Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": known.hidden, "num_hidden_layers": known.layers,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32 if known.wide else 16,
            "intermediate_size": 192, "max_position_embeddings": MAX_LENGTH, "initializer_range": 0.08,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e6 if known.copies else 1e4,
                "mrope_section": [8, 4, 4] if known.wide else [4, 2, 2], "mrope_interleaved": True,
            },
            "tie_word_embeddings": True, "bos_token_id": pad, "eos_token_id": end, "pad_token_id": pad,
        },
        vision_config={
            "depth": 2, "hidden_size": 64, "num_heads": 4, "intermediate_size": 128, "patch_size": 16,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": known.hidden,
            "num_position_embeddings": 16, "deepstack_visual_indexes": [0], "initializer_range": 0.08,
        },
        image_token_id=token_id("<|image_pad|>"), video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"), vision_end_token_id=token_id("<|vision_end|>"),
        tie_word_embeddings=True, dtype="float32",
    )  # fmt: skip


def build_model(seed: int, tokenizer: Any, variant: str = "small") -> Any:
    """A model with random weights that depend on the seed alone."""
    from rl_vlm.zoo.tiny.copying import begin_with_copying

    model = random_model(build_config(tokenizer, variant), seed)
    if variant_named(variant).copies:
        begin_with_copying(model, tokenizer.get_vocab())
    return model


def random_model(config: Any, seed: int) -> Any:
    """The model of a configuration, with greedy generation to the end of a turn."""
    import torch
    from transformers import AutoModelForImageTextToText, GenerationConfig

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        # Larger position embeddings than usual: with small ones the model did not learn positions.
        positions = next(weight for name, weight in model.named_parameters() if name.endswith(POSITIONS))
        positions *= 0.5 / positions.std()
    ids = config.text_config
    model.generation_config = GenerationConfig(
        eos_token_id=ids.eos_token_id, pad_token_id=ids.pad_token_id, bos_token_id=ids.bos_token_id, do_sample=False
    )
    return model


@dataclass(frozen=True, slots=True)
class TinyModel:
    """One variant as a built-in model (see `resolve_model` in models/loading.py)."""

    variant: str

    def folder(self, seed: int = 0) -> Path:
        return tiny_model_path(seed, self.variant)

    def config(self) -> dict[str, Any]:
        """The content of its config.json, without building the model."""
        return dict(build_config(build_processor(self.variant).tokenizer, self.variant).to_dict())


MODELS = {"tiny" if name == "small" else f"tiny-{name}": TinyModel(name) for name in VARIANTS}
