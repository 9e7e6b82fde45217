"""What the tests of rewritten prompts share: an environment of six pictures, and whether engine and learner agree."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
from core_support import adapted_policy, picture, run_config, text_side

from rl_vlm.config import HistorySection, RolloutSection
from rl_vlm.engines.base import Engine
from rl_vlm.envs.base import EpisodeEnv, Item, Reply
from rl_vlm.learning.update import PolicyUpdater
from rl_vlm.rollout.env_pool import EnvPool
from rl_vlm.rollout.episodes import run_group
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.testing import EngineClient
from rl_vlm.types import Observation

PICTURES = [picture(np.random.default_rng(k), 32, 32) for k in range(9)]
TASK = RolloutTask("g", 0, "train", seed=0, sampling_seed=0, size=1, temperature=1.0, min_version=0)


class Walk(EpisodeEnv):
    """Six turns, each with a picture."""

    def open(self, item: Item) -> Observation:
        return Observation.user(PICTURES[0], "go 0")

    def reply(self, text: str) -> Reply:
        return Reply(
            float(self.turn), Observation.user(f"go {self.turn}", PICTURES[self.turn]) if self.turn < 6 else None
        )


def check_segments(engine: Engine, folder: Path, history: dict[str, int]) -> None:
    """A group whose prompts are rewritten is as likely for the learner as for the engine that sampled it."""
    rollout = RolloutSection(max_turns=6, max_new_tokens_per_turn=6, require_end_of_turn=False,
                             history=HistorySection(**history))  # fmt: skip
    task, client = replace(TASK, size=3, sampling_seed=3), EngineClient(engine)
    group = asyncio.run(run_group(task, EnvPool(Walk, 20.0), client, text_side(folder), rollout, 1024))
    assert all(len(one.segments) > 1 for one in group.trajectories)
    policy = adapted_policy(folder, scale=0.0)
    found = PolicyUpdater(policy, run_config(folder)).recompute(group.trajectories)
    for one, logprobs in zip(group.trajectories, found, strict=True):
        np.testing.assert_allclose(logprobs, one.logprobs[one.loss_mask], atol=1e-4)
