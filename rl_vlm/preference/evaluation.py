"""Evaluation episodes of a control agent: whole episodes with the mode of its policy, and their metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl_vlm.config import PreferenceConfig
from rl_vlm.control_envs.base import ControlEnv
from rl_vlm.preference.collector import NumpyActor
from rl_vlm.seeding import derive_seed
from rl_vlm.statistics import wilson_interval


@dataclass(slots=True)
class EpisodeResult:
    seed: int
    true_return: float = 0.0
    length: int = 0
    success_best: float = 0.0
    success_last: float = 0.0
    frames: np.ndarray | None = None  # uint8 [T, S, S, 3], where they were asked for


def evaluation_metrics(results: Sequence[EpisodeResult]) -> dict[str, float]:
    """Success with the 95 % interval of a proportion (Wilson, 1927), and returns by the true reward."""
    best = [result.success_best for result in results]
    returns = [result.true_return for result in results]
    low, high = wilson_interval(round(sum(best)), len(best))
    return {
        "accuracy/success": float(np.mean(best)),
        "accuracy_low/success": low,
        "accuracy_high/success": high,
        "reward/success": float(np.mean(returns)),
        "evaluation/reward_std": float(np.std(returns)),
        "evaluation/success_last": float(np.mean([result.success_last for result in results])),
        "items/success": len(results),
    }


def evaluation_seeds(config: PreferenceConfig) -> list[int]:
    """The starts of the evaluation episodes, the same at every evaluation of a run."""
    return [derive_seed(config.seed, 40, number) % 2**31 for number in range(config.preference.evaluation.episodes)]


def evaluate(
    env: ControlEnv, actor: NumpyActor, seeds: Sequence[int], film: int = 0, end_on_success: bool = False
) -> list[EpisodeResult]:
    """One whole episode per seed with the mode of the policy, the first `film` of them with frames. With
    `end_on_success` one also ends at the first step that succeeds."""
    results = []
    for number, seed in enumerate(seeds):
        observation, _ = env.reset(seed=seed)
        result, frames, over = EpisodeResult(seed), list[np.ndarray](), False
        while not over:
            observation, reward, terminated, truncated, info = env.step(actor.act(observation[None])[0])
            result.true_return += float(reward)
            result.length += 1
            result.success_last = env.success(info)
            result.success_best = max(result.success_best, result.success_last)
            if number < film:
                frames.append(env.frame())
            over = terminated or truncated or (end_on_success and result.success_last > 0)
        result.frames = np.stack(frames) if frames else None
        results.append(result)
    return results
