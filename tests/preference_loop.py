"""Small preference runs for tests: CartPole, a scripted teacher, networks that take a moment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rl_vlm.config import PolicyConfig, apply_overrides, parse_config

BASE: dict[str, Any] = {
    "name": "test",
    "algorithm": {"name": "preference_sac"},
    "env": {"id": "ContinuousCartPole-v0", "kwargs": {"horizon": 30}},
    "preference": {
        "total_steps": 300,
        "random_steps": 60,
        "exploration_steps": 60,
        "num_interact": 70,
        "session_pairs": 12,
        "max_feedback": 200,
        "reset_updates": 5,
        "image_size": 32,
        "replay_capacity": 250,
        "frame_capacity": 250,
        "steps_per_iteration": 20,
        "sac": {"hidden": 16, "depth": 2, "batch_size": 32, "compile": "off"},
        "evaluation": {"every": 100, "episodes": 3, "film": 1},
        "labels": {"source": "scripted", "rounds": 2, "teacher": {"eps_mistake": 0.2}},
        "reward_model": {
            "architecture": "cnn",
            "size": 2,
            "epochs": 2,
            "min_gradient_steps": 4,
            "kernels": [5, 3],
            "channels": [4, 8],
            "strides": [3, 2],
        },
    },
    "logging": {"checkpoint_every": 5, "keep_checkpoints": 9},
}


def run_config(**dotted: Any) -> PolicyConfig:
    """The small run; keyword `preference__sac__lr` means `preference.sac.lr`."""
    return parse_config(apply_overrides(BASE, {key.replace("__", "."): value for key, value in dotted.items()}))


def build(run: PolicyConfig, folder: Path) -> Any:
    """The algorithm of a run."""
    from rl_vlm.algorithms.preference_sac import PreferenceSAC

    return PreferenceSAC.from_run_config(run, folder).build_algo()


def train_to(algorithm: Any, step: int) -> None:
    """Iterate until that many environment steps are done."""
    while algorithm.env_steps < step:
        algorithm.train()


def saved(algorithm: Any, folder: Path) -> Path:
    """A checkpoint in `folder`."""
    folder.mkdir(parents=True)
    algorithm.save_checkpoint(str(folder))
    return folder


def content(checkpoint: Path) -> dict[str, Any]:
    """Everything in a checkpoint that an exact resume must bring back: bytes of the arrays, and the state."""
    arrays = {path.name: path.read_bytes() for path in checkpoint.glob("*.safetensors")}
    return {**arrays, "state": json.loads((checkpoint / "state.json").read_text())}
