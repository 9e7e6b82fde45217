"""What decides the outcomes of an evaluation: names and values by which a resumed one is told from another."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_vlm.config import PolicyConfig
from rl_vlm.evaluation.options import EvaluationOptions
from rl_vlm.evaluation.outcomes import Side
from rl_vlm.models.digest import hash_model
from rl_vlm.models.loading import resolve_model
from rl_vlm.models.trained import tensors_file
from rl_vlm.types import Split


def identity_of(
    config: PolicyConfig,
    options: EvaluationOptions,
    adapters: Mapping[Side, Path | None],
    sizes: Mapping[Split, Mapping[str, int | None]],
) -> dict[str, Any]:
    """Dotted names and values. `adapters` by side, `sizes` by split and environment; numbers of items asked and repetitions do not count."""
    known: dict[str, Any] = {"seed": config.seed, "size of the split": sizes}
    if options.endpoint is None:
        known |= {"model": hash_model(resolve_model(config.model.path)), "engine": config.serving.expected_engine}
        known |= {f"adapter ({side})": _hash_trained(folder) for side, folder in adapters.items()}
        known |= {
            "model.dtype": config.model.dtype,
            "model.head_dtype": config.model.head_dtype,
            "model.min_pixels": config.model.min_pixels,
            "model.max_pixels": config.model.max_pixels,
            "serving.quantization": config.serving.quantization,
            "serving.max_context": config.serving.max_context,
        }
    else:
        known |= {"endpoint": options.endpoint, "endpoint model": options.endpoint_model}
    rollout, evaluation = config.rollout, config.evaluation
    known |= {
        "rollout.temperature": rollout.temperature if evaluation.samples > 1 else None,
        "rollout.max_turns": rollout.max_turns,
        "rollout.max_new_tokens": rollout.max_new_tokens,
        "rollout.max_new_tokens_per_turn": rollout.max_new_tokens_per_turn,
        "rollout.require_end_of_turn": rollout.require_end_of_turn,
        "evaluation.samples": evaluation.samples,
        "evaluation.variants": evaluation.variants,
        "evaluation.category": evaluation.category,
    }
    return known | {f"env.{key}": value for key, value in config.env.model_dump(mode="json").items()}


def _hash_trained(folder: Path | None) -> str:
    if folder is None:
        return "base model"
    with tensors_file(folder).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
