"""GRPO with a vision-language model in one process. Read this page first.

    python examples/one_process.py [section.key=value ...]

The tiny model learns to count shapes in pictures, in minutes on a CPU, without a network. `rl-vlm train` runs the same
pieces, but in many processes: replicas hold the engine, env runners play the episodes, learners make the updates.
"""

import asyncio
import sys
from pathlib import Path

import numpy as np
import torch

from rl_vlm.config import PolicyConfig, load_config
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.envs.registry import make
from rl_vlm.learning.optimizer import lr_factor, make_optimizer, scale_lr
from rl_vlm.learning.plan import UpdateStats, divide, estimate_advantages, make_experience, update_batches
from rl_vlm.learning.policy_model import PolicyModel
from rl_vlm.learning.strategies import Strategy
from rl_vlm.learning.update import PolicyUpdater
from rl_vlm.models.loading import resolve_model
from rl_vlm.rollout.env_pool import EnvPool
from rl_vlm.rollout.episodes import run_group
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.seeding import derive_seed
from rl_vlm.types import Completion, GenerationRequest, Split, TrajectoryGroup


class EngineClient:
    """The engine as the client that episodes ask: requests of one moment run in one batch."""

    def __init__(self, engine: TransformersEngine) -> None:
        self._engine = engine

    async def generate(self, request: GenerationRequest) -> Completion:
        return (await self._engine.generate([request]))[0]


class OneProcess:
    """An engine that samples, a policy that learns, and the environment between them."""

    def __init__(self, run: PolicyConfig, num_threads: int = 1) -> None:
        torch.set_num_threads(num_threads)
        folder = resolve_model(run.model.path)
        # The model is loaded twice. The engine adds the adapter to its weights, which makes sampling fast. The policy
        # keeps the adapter apart, because it trains nothing else.
        self.engine = TransformersEngine(folder, max_context=run.serving.max_context, num_threads=num_threads)
        self.policy = PolicyModel(folder, run)
        self.updater, self.optimizer = PolicyUpdater(self.policy, run), make_optimizer(self.policy, run)
        # A strategy sums gradients over learners. Here is only one.
        self.strategy = Strategy(self.policy, self.optimizer)
        self.pool = EnvPool(lambda: make(run.env.id, **run.env.make_kwargs()), run.env.step_timeout_s)
        num_items = make(run.env.id, **run.env.make_kwargs()).num_items("train")
        self.num_items = num_items or 4096  # where it has no end
        self.run, self.version, self.rng = run, 0, np.random.default_rng(run.seed)
        self.event_loop = asyncio.Runner()

    def draw_items(self) -> list[int]:
        """Choose the training items of one iteration."""
        return self.rng.integers(0, self.num_items, self.run.rollout.prompts_per_iteration).tolist()

    def sample(self, split: Split, items: list[int], size: int, temperature: float) -> list[TrajectoryGroup]:
        """Play each item `size` times."""
        client, rollout, room = EngineClient(self.engine), self.run.rollout, self.run.serving.max_context

        async def play(k: int, item: int) -> TrajectoryGroup:
            seed = derive_seed(self.run.seed, self.version, k)
            # The last argument is the oldest version of the weights that may answer: the newest, so this is on-policy.
            task = RolloutTask(f"{self.version}:{k}", item, split, item, seed, size, temperature, self.version)
            return await run_group(task, self.pool, client, self.policy.text, rollout, room)

        async def play_all() -> list[TrajectoryGroup]:
            # All groups are played at once, so that the engine decodes them in one batch.
            return await asyncio.gather(*(play(k, item) for k, item in enumerate(items)))

        return self.event_loop.run(play_all())

    def learn(self, groups: list[TrajectoryGroup]) -> dict[str, float]:
        """Make the optimiser steps of one iteration; returns their metrics."""
        run = self.run
        # GRPO has no critic: an answer's advantage is its reward less the mean reward of its group.
        experience = make_experience(groups, run, self.rng)
        estimate = estimate_advantages(experience, run.algorithm)
        # `divide` leaves out answers without an advantage, because they have no gradient.
        minibatches = divide(groups, run, self.rng, estimate)
        (batch,) = update_batches(minibatches, estimate)
        scale_lr(self.optimizer, lr_factor(run.learner, self.version, run.algorithm.iterations - 1))
        stats = UpdateStats()
        # `pack` also computes the log-probabilities before the first step: the loss clips how far later steps go.
        packed = self.updater.pack(batch)
        for _ in range(run.algorithm.epochs):
            for micro_batches, active in zip(packed, batch.active, strict=True):
                if active:
                    self.updater.step(self.strategy, micro_batches, run.learner.max_grad_norm, stats)
        return stats.metrics()

    def publish(self) -> None:
        """Hand the trained adapter to the engine, as the next version."""
        self.version += 1
        self.event_loop.run(self.engine.load_adapter(self.policy.payload(self.version)))

    def accuracy(self) -> float:
        """Mean reward of greedy answers to held-out items."""
        return mean_reward(self.sample("test", list(range(self.run.evaluation.num_items)), 1, 0.0))


def mean_reward(groups: list[TrajectoryGroup]) -> float:
    return float(np.mean([group.rewards.mean() for group in groups]))


if __name__ == "__main__":
    run = load_config(Path(__file__).parents[1] / "configs/quickstart.yaml", sys.argv[1:])
    trained = OneProcess(run)
    print(f"held-out accuracy before training: {trained.accuracy():.3f} (chance is 0.25)", flush=True)
    for iteration in range(run.algorithm.iterations):
        groups = trained.sample("train", trained.draw_items(), run.rollout.group_size, run.rollout.temperature)
        trained.learn(groups)
        trained.publish()
        if iteration % 10 == 9:
            print(f"iteration {iteration + 1}: mean reward {mean_reward(groups):.3f}", flush=True)
    print(f"held-out accuracy after training: {trained.accuracy():.3f}")
