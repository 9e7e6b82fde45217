"""The floor: GRPO in one process, without Ray. The same engine, packing and update as the system, called in turn."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import torch

from rl_vlm.config import RunConfig
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.envs.registry import make
from rl_vlm.learning.plan import UpdateStats, divide, estimate_advantages, make_experience, update_batches
from rl_vlm.learning.policy_model import PolicyModel
from rl_vlm.learning.strategies import SingleProcess
from rl_vlm.learning.update import linear_schedule, make_optimizer, make_updater, scale_lr
from rl_vlm.numerics import derive_seed
from rl_vlm.rollout.env_pool import EnvPool
from rl_vlm.rollout.episodes import run_group
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.types import Completion, GenerationRequest, TrajectoryGroup


class _DirectPolicy:
    """Hands requests to an engine in this process; all requests of one moment go in one call, like the client's."""

    def __init__(self, engine: TransformersEngine) -> None:
        self._engine = engine
        self._queue: list[tuple[GenerationRequest, asyncio.Future[Completion]]] = []

    async def generate(self, request: GenerationRequest) -> Completion:
        loop = asyncio.get_running_loop()
        if not self._queue:
            loop.call_soon(loop.call_soon, lambda: loop.create_task(self._flush()))
        future: asyncio.Future[Completion] = loop.create_future()
        self._queue.append((request, future))
        return await future

    async def _flush(self) -> None:
        queue, self._queue = self._queue, []
        answers = await self._engine.generate([request for request, _ in queue])
        for (_, future), answer in zip(queue, answers, strict=True):
            future.set_result(answer)


class BareLoop:
    """One process that samples, learns and swaps the adapter, for `benchmarks/loop.py` and the tests."""

    def __init__(self, folder: Path, run: RunConfig, num_threads: int = 1) -> None:
        torch.set_num_threads(num_threads)
        self.run = run
        self.engine = TransformersEngine(folder, max_context=run.serving.max_context, num_threads=num_threads)
        self.policy = PolicyModel(folder, run)
        self._updater = make_updater(self.policy, run)
        self._optimizer = make_optimizer(self.policy, run)
        self._strategy = SingleProcess()
        self._strategy.prepare(self.policy, self._optimizer)
        self._direct = _DirectPolicy(self.engine)
        self._pool = EnvPool(lambda: make(run.env.id, **run.env.make_kwargs()), run.env.step_timeout_s)
        self._loop = asyncio.new_event_loop()
        self._rng = np.random.default_rng(run.seed)
        self._num_items = make(run.env.id, **run.env.make_kwargs()).num_items("train") or 4096
        self.iteration = 0

    def sample(self, indices: list[int], split: str, size: int, temperature: float) -> list[TrajectoryGroup]:
        """Sample one group per index."""

        async def gather() -> list[TrajectoryGroup]:
            tasks = [
                RolloutTask(
                    f"{self.iteration}:{k}", index, split, index,  # type: ignore[arg-type]
                    derive_seed(self.run.seed, self.iteration, k), size, temperature, 0,
                )
                for k, index in enumerate(indices)
            ]  # fmt: skip
            text, rollout, room = self.policy.text, self.run.rollout, self.run.serving.max_context
            return list(
                await asyncio.gather(*(run_group(t, self._pool, self._direct, text, rollout, room) for t in tasks))
            )

        return self._loop.run_until_complete(gather())

    def step(self) -> dict[str, float]:
        """One GRPO step; seconds by activity and the mean reward."""
        run = self.run
        started = time.perf_counter()
        indices = self._rng.integers(0, self._num_items, run.rollout.prompts_per_iteration).tolist()
        groups = self.sample(indices, "train", run.rollout.group_size, run.rollout.temperature)
        sampled = time.perf_counter()
        algorithm = run.algorithm
        limit = run.rollout.max_new_tokens
        experience = make_experience(groups, algorithm, self._rng, max_new_tokens=limit)
        estimate = estimate_advantages(experience, algorithm)
        minibatches = divide(groups, algorithm, self._rng, estimate, max_new_tokens=limit)
        (batch,) = update_batches(minibatches, groups, estimate)
        factor = 1.0
        if run.learner.lr_schedule == "linear":
            factor = linear_schedule(self.iteration, algorithm.iterations - 1, run.learner.lr_final_fraction)
        scale_lr(self._optimizer, factor)
        stats = UpdateStats()
        packed = self._updater.pack(batch)
        for _ in range(algorithm.epochs):
            for micro_batches, active in zip(packed, batch.active, strict=True):
                if active:
                    self._updater.step(self._strategy, micro_batches, run.learner.max_grad_norm, stats)
        learned = time.perf_counter()
        self.iteration += 1
        self._loop.run_until_complete(self.engine.load_adapter(self.policy.payload(self.iteration)))
        swapped = time.perf_counter()
        return {
            "sample": sampled - started,
            "learn": learned - sampled,
            "swap": swapped - learned,
            "total": swapped - started,
            "reward": float(np.mean([group.rewards.mean() for group in groups])),
            **stats.metrics(),
        }

    def accuracy(self, num_items: int = 512) -> float:
        """Greedy reward on held-out items."""
        groups = self.sample(list(range(num_items)), "test", 1, 0.0)
        return float(np.mean([group.rewards[0] for group in groups]))
