"""rl_vlm: reinforcement learning with vision-language models on Ray."""

from __future__ import annotations

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_vlm.envs.base import EpisodeEnv, VisionEnv
    from rl_vlm.envs.registry import make, register
    from rl_vlm.monitoring.callbacks import Callback, StopTraining
    from rl_vlm.runs.api import Run, load_run, train
    from rl_vlm.runs.push import push
    from rl_vlm.runs.reward_model import RewardModel
    from rl_vlm.runs.trainer import Trainer, serve

__version__ = "0.1.0"

# Each process of a run imports some 650,000 objects of torch, transformers and RLlib. With CPython's thresholds, an
# eighth of that time goes into 1,700 collections, which free 3 % of them.
gc.set_threshold(20_000, 20, 50)

__all__ = [
    "Callback",
    "EpisodeEnv",
    "RewardModel",
    "Run",
    "StopTraining",
    "Trainer",
    "VisionEnv",
    "__version__",
    "load_run",
    "make",
    "push",
    "register",
    "serve",
    "train",
]

_HOMES = {
    "rl_vlm.envs.base": ("EpisodeEnv", "VisionEnv"),
    "rl_vlm.envs.registry": ("make", "register"),
    "rl_vlm.monitoring.callbacks": ("Callback", "StopTraining"),
    "rl_vlm.runs.api": ("Run", "load_run", "train"),
    "rl_vlm.runs.push": ("push",),
    "rl_vlm.runs.reward_model": ("RewardModel",),
    "rl_vlm.runs.trainer": ("Trainer", "serve"),
}


def __getattr__(name: str) -> Any:
    # On first use: importing environments takes longer than `rl-vlm --help` may.
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
