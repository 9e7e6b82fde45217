"""The gate of NeMo-RL's CI for either engine: the median over steps of `token_mult_prob_error` stays below 1.05."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from core_support import run_config
from policy_loop import Loop

from rl_vlm.engines.base import Engine
from rl_vlm.learning.batching import MicroBatch
from rl_vlm.learning.sight_check import PositionChange
from rl_vlm.learning.update import PolicyUpdater
from rl_vlm.models.modules import HeadDType
from rl_vlm.types import Trajectory

GATE = 1.05
TEMPERATURE = 1.0


def error(updater: PolicyUpdater, found: Sequence[Trajectory], change: PositionChange | None = None) -> float:
    """Mean of exp |log p(engine) - log p(learner)| over the sampled tokens."""
    learner = np.concatenate(updater.recompute(found, change))
    engine = np.concatenate([one.logprobs[one.loss_mask] for one in found])
    return float(np.exp(np.abs(learner - engine)).mean())


def one_further(micro: MicroBatch) -> np.ndarray:
    """Positions of a learner that counts what follows the prompt from one place too late."""
    return micro.position_ids + (micro.segments > 0)


def stretched(micro: MicroBatch) -> np.ndarray:
    """Positions of a learner with another scale of rotary positions."""
    return 2 * micro.position_ids


def check_gate(folder: Path, engine: Engine, head: HeadDType = "model", steps: int = 5) -> None:
    """Learn for some steps in bfloat16, then let the learner be wrong in three ways. `head`: as the engine's."""
    precision = {"model__dtype": "bfloat16", "model__head_dtype": head}
    loop = Loop(folder, TEMPERATURE, engine, learner__lr=1e-2, **precision)
    hotter = run_config(folder, rollout__temperature=1.5 * TEMPERATURE, **precision)
    other = PolicyUpdater(loop.policy, hotter)
    seen: dict[str, list[float]] = defaultdict(list)
    for _ in range(steps):
        groups = loop.sample()
        found = [one for group in groups for one in group.trajectories]
        seen["agreement"].append(error(loop.updater, found))
        seen["temperature off"].append(error(other, found))
        seen["positions stretched"].append(error(loop.updater, found, stretched))
        seen["one position off"].append(error(loop.updater, found, one_further))
        seen["logged"].append(loop.update(groups).metrics()["mismatch/token_mult_prob_error"])
    medians = {name: statistics.median(values) for name, values in seen.items()}
    print("token_mult_prob_error:", ", ".join(f"{name} {value:.4f}" for name, value in medians.items()))
    assert 1.0 < medians["agreement"] < GATE and 1.0 < medians["logged"] < GATE  # above 1: bfloat16 rounds
    assert medians["temperature off"] > GATE and medians["positions stretched"] > GATE
    # So small a model tells one position by less than the gate, and still by far more than bfloat16 rounds.
    assert medians["one position off"] - 1 > 3 * (medians["agreement"] - 1)
