"""Sampling and learning in one process, for tests of the update with either engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_support import picture, plain_model, plan_update, reference_logprobs, run_config

from rl_vlm.config import RolloutSection
from rl_vlm.config.learner import AlgorithmSection
from rl_vlm.engines.base import Engine
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.envs.base import StepResult, VisionEnv
from rl_vlm.learning.batching import MicroBatch
from rl_vlm.learning.optimizer import make_optimizer
from rl_vlm.learning.plan import UpdateBatch, UpdateStats
from rl_vlm.learning.policy_model import PolicyModel
from rl_vlm.learning.strategies import Strategy
from rl_vlm.learning.update import PolicyUpdater
from rl_vlm.rollout.env_pool import EnvPool
from rl_vlm.rollout.episodes import run_group
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.types import Completion, GenerationRequest, Message, Observation, TrajectoryGroup

MAX_CONTEXT = 512
ROLLOUT = RolloutSection(max_turns=3, max_new_tokens_per_turn=6, max_new_tokens=18, require_end_of_turn=False)


class ThreeTurns(VisionEnv):
    """A picture, an answer, another picture from a tool, an answer, a word, an answer."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        _, index = self.item(options)
        self.rng, self.turn = np.random.default_rng([index, 1]), 0
        return Observation.user(picture(self.rng, 64, 32), f"Picture {index}: what is it?"), {}

    def step(self, action: str) -> StepResult:
        self.turn += 1
        reward = sum(action.encode()) % 7 / 7
        replies = {
            1: Observation((Message.of("tool", "Look closer:", picture(self.rng, 32, 64)),)),
            2: Observation.user("And now?"),
        }
        return replies.get(self.turn, Observation()), reward, self.turn == 3, False, {}


class Loop:
    """Sampling and learning in one process, with the parts that the system has."""

    def __init__(self, folder: Path, temperature: float, engine: Engine | None = None, **dotted: Any) -> None:
        self.folder = folder
        self.run = run_config(folder, rollout__temperature=temperature, learner__micro_batch_tokens=400, **dotted)
        self.engine = engine or TransformersEngine(folder, max_context=MAX_CONTEXT)
        self.policy = PolicyModel(folder, self.run)
        self.updater = PolicyUpdater(self.policy, self.run)
        self.optimizer = make_optimizer(self.policy, self.run)
        self.strategy = Strategy(self.policy, self.optimizer)
        self.pool = EnvPool(ThreeTurns, timeout_s=30.0, inline=True)
        self.version = 0
        if engine is not None:  # it may have served another policy
            self.version = engine.version + 1
            asyncio.run(engine.load_adapter(self.policy.payload(self.version)))

    async def generate(self, request: GenerationRequest) -> Completion:
        return (await self.engine.generate([request]))[0]

    def sample(self, groups: int = 2, size: int = 4) -> list[TrajectoryGroup]:
        rollout = ROLLOUT.model_copy(update={"format": self.run.rollout.format})

        async def gather() -> list[TrajectoryGroup]:
            tasks = [
                RolloutTask(
                    group_id=f"{self.version}:{k}", index=100 * self.version + k, split="train", seed=k,
                    sampling_seed=1000 * self.version + k, size=size, temperature=self.run.rollout.temperature,
                    min_version=self.version,
                )
                for k in range(groups)
            ]  # fmt: skip
            return list(
                await asyncio.gather(
                    *(run_group(task, self.pool, self, self.policy.text, rollout, MAX_CONTEXT) for task in tasks)
                )
            )

        return asyncio.run(gather())

    def step(self, micro_batches: list[MicroBatch], stats: UpdateStats) -> None:
        self.updater.step(self.strategy, micro_batches, self.run.learner.max_grad_norm, stats)

    def batch(self, groups: list[TrajectoryGroup], count: int = 2) -> UpdateBatch:
        # The entropy bonus only keeps samples without an advantage in the plan.
        settings = AlgorithmSection(aggregation="token_mean", minibatches=count, entropy_coef=1.0)
        return plan_update(groups, settings, np.random.default_rng(self.version)).batches[0]

    def update(self, groups: list[TrajectoryGroup], epochs: int = 1) -> UpdateStats:
        stats = UpdateStats()
        packed = self.updater.pack(self.batch(groups))
        for _ in range(epochs):
            for micro_batches in packed:
                self.step(micro_batches, stats)
        self.version += 1
        asyncio.run(self.engine.load_adapter(self.policy.payload(self.version)))
        return stats

    def close(self) -> None:
        asyncio.run(self.engine.close())
        self.pool.close()


def check_agreement(loop: Loop, updates: int) -> None:
    """Learn; then every sampled token of three turns and two images is as likely to the engine as to the learner."""
    for _ in range(updates):
        stats = loop.update(loop.sample(size=3))
        assert (stats["policy/optimizer_steps"], stats["policy/skipped_steps"], stats["policy/first_ratio_error"]) == (
            2,
            0,
            0.0,
        )
        assert stats.metrics()["mismatch/token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)
    folder, temperature = loop.folder, loop.run.rollout.temperature
    groups = loop.sample()
    base = plain_model(folder)
    moved = 0.0
    for group in groups:
        for trajectory in group.trajectories:
            assert len(trajectory.turns) == 3
            assert len(trajectory.images) == 2
            assert {turn.policy_version for turn in trajectory.turns} == {loop.version}
            with torch.no_grad():
                then = reference_logprobs(folder, base, trajectory.token_ids, trajectory.images, temperature)
            sampled = trajectory.loss_mask[1:]
            moved = max(moved, float(np.abs(then.numpy()[sampled] - trajectory.logprobs[1:][sampled]).max()))
    assert moved > 0.5  # the adapter is another policy by now
    for micro_batches in loop.updater.pack(loop.batch(groups)):
        for micro in micro_batches:
            with torch.no_grad():
                learner = loop.updater.logprobs(micro)[0]
            assert np.abs(learner.numpy() - micro.behaviour).max() < 1e-4
