"""The hyperparameters of the published Qwen3-VL models, as in their configuration files: for plans and measurements without a hub."""

from __future__ import annotations

from typing import Any

_ROPE = {"rope_type": "default", "rope_theta": 5_000_000, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
_TEXT = {
    "vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-6, "rope_parameters": _ROPE, "bos_token_id": 151_643, "eos_token_id": 151_645,
}  # fmt: skip
_TOWER = {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 2304}
_SMALL_TOWER = _TOWER | {
    "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "deepstack_visual_indexes": [5, 11, 17],
}  # fmt: skip
_LARGE_TOWER = _TOWER | {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "deepstack_visual_indexes": [8, 16, 24],
}  # fmt: skip


def _model(tower: dict[str, Any], tied: bool, family: str = "qwen3_vl", **text: Any) -> dict[str, Any]:
    return {
        "model_type": family,
        "tie_word_embeddings": tied,
        "text_config": _TEXT | text,
        "vision_config": tower | {"out_hidden_size": text["hidden_size"]},
        "image_token_id": 151_655,
        "video_token_id": 151_656,
        "vision_start_token_id": 151_652,
        "vision_end_token_id": 151_653,
    }


PUBLISHED: dict[str, dict[str, Any]] = {
    "2b": _model(
        _SMALL_TOWER, True, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16
    ),
    "4b": _model(
        _SMALL_TOWER, True, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32
    ),
    "8b": _model(
        _LARGE_TOWER, False, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36, num_attention_heads=32
    ),
    "32b": _model(
        _LARGE_TOWER, False, hidden_size=5120, intermediate_size=25_600, num_hidden_layers=64, num_attention_heads=64
    ),
    "30b-a3b": _model(
        _LARGE_TOWER, False, "qwen3_vl_moe", hidden_size=2048, intermediate_size=6144, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768, decoder_sparse_step=1, mlp_only_layers=[],
    ),
}  # fmt: skip


def published_config(name: str) -> dict[str, Any] | None:
    """The configuration behind a hub name such as Qwen/Qwen3-VL-4B-Instruct; None for others."""
    owner, _, model = name.lower().partition("/")
    size = model.removeprefix("qwen3-vl-").removesuffix("-instruct").removesuffix("-thinking")
    return PUBLISHED.get(size) if owner == "qwen" and model.startswith("qwen3-vl-") else None
