"""Which runs fit a shared service, and what a sweep makes of `shared`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from core_support import run_config

from rl_vlm.config.sweep import SweepConfig
from rl_vlm.models.reference import hash_model
from rl_vlm.serving.deploy import mismatch
from rl_vlm.types import UserInputError


def config(folder: Path, **dotted: Any) -> Any:
    return run_config(folder, serving__shared="s", **dotted)


@pytest.mark.parametrize(
    ("here", "told"),
    [
        ({}, ""),
        ({"seed": 5, "learner__lr": 1.0, "rollout__group_size": 2, "serving__num_replicas": 7}, ""),
        ({"serving__max_context": 256}, ""),
        ({"model__lora__rank": 64}, ""),  # merged weights have the model's shape
        ({"serving__max_context": 8192}, "serving.max_context is 4096 there and 8192 here"),
        ({"model__dtype": "bfloat16"}, "model.dtype is float32 there and bfloat16 here"),
        ({"model__max_pixels": 4096}, "model.max_pixels is None there and 4096 here"),
        ({"serving__engine": "vllm"}, "serving.engine is transformers there and vllm here"),
    ],
)
def test_a_run_that_asks_for_more_or_other_than_is_there_is_told_what(
    tiny_folder: Path, here: dict[str, Any], told: str
) -> None:
    reason = mismatch("s", config(tiny_folder), "digest", config(tiny_folder, **here), "digest")
    assert told in reason and bool(reason) == bool(told)


def test_vllm_holds_adapters_up_to_a_rank(tiny_folder: Path) -> None:
    def held(**dotted: Any) -> str:
        first = config(tiny_folder, serving__engine="vllm", model__lora__rank=8, **dotted)
        joins = config(tiny_folder, serving__engine="vllm", model__lora__rank=16)
        return mismatch("s", first, "digest", joins, "digest")

    assert "adapters of rank 8 fit there and model.lora.rank is 16 here" in held()
    assert held(serving__sharing__max_lora_rank=16) == ""


def test_a_model_is_known_by_its_weights_wherever_it_lies(tiny_folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_folder, tmp_path / "copy")
    there = config(tiny_folder), hash_model(tiny_folder)
    assert mismatch("s", *there, config(copy), hash_model(copy)) == ""
    weights = next(copy.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    assert "model.path is" in mismatch("s", *there, config(copy), hash_model(copy))


@pytest.mark.parametrize(
    "setting", [{"deterministic": True}, {"rollout__in_flight_updates": "keep", "rollout__max_policy_lag": 1}]
)
def test_what_shared_replicas_do_not_know_is_refused(tiny_folder: Path, setting: dict[str, Any]) -> None:
    with pytest.raises(UserInputError, match="serving.shared"):
        config(tiny_folder, **setting)


def test_a_sweep_makes_its_trials_share(tiny_folder: Path) -> None:
    run = run_config(tiny_folder, name="mine")
    space = {"space": {"model.lora.rank": {"choice": [4, 32]}}}
    assert SweepConfig.model_validate(space).prepared(run) is run
    shared = SweepConfig.model_validate({**space, "shared": True}).prepared(run)
    assert (shared.serving.shared, shared.serving.sharing.max_lora_rank) == ("mine-sweep", 32)
    assert SweepConfig.model_validate({**space, "shared": "ours"}).prepared(run).serving.shared == "ours"
    assert run.serving.shared is None
