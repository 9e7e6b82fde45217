"""One contender of `sac.py`: each line holds a number of updates, and the answer is their CPU seconds."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

from turns import serve

ENVIRONMENT = "Pendulum-v1"
ROWS = 5000  # in every replay buffer


class Ours:
    """Replay buffer and RLlib learner of the system, in one process."""

    def __init__(self, hidden: int, depth: int, batch: int, compiled: bool) -> None:
        import numpy as np

        from rl_vlm.algorithms.preference_sac import PreferenceSAC
        from rl_vlm.config import parse_config
        from rl_vlm.control_envs.registry import make_control_env
        from rl_vlm.preference.collector import Collector
        from rl_vlm.preference.replay import ReplayBuffer

        # What Stable-Baselines3 and SBX do: targets move at every update.
        sac = {"hidden": hidden, "depth": depth, "batch_size": batch, "target_update_every": 1}
        settings = {"reward": "gt_task_reward", "sac": {**sac, "compile": "on" if compiled else "off"}}
        run = parse_config(
            {"algorithm": {"name": "preference_sac"}, "env": {"id": ENVIRONMENT}, "preference": settings}
        )
        config = PreferenceSAC.from_run_config(run)
        config.prepare()
        self._learner = config.build_learner()
        self._learner.build()
        self._batch, self._rng = batch, np.random.default_rng(0)
        self._replay = ReplayBuffer(ROWS, config.observation_space.shape[0], config.action_space.shape[0])
        collector = Collector(lambda: make_control_env(ENVIRONMENT), seed=0, frames=False)
        steps = collector.collect(None, ROWS)
        self._replay.add(steps, steps.true_rewards)

    def update(self, count: int) -> None:
        from ray.rllib.core.learner.training_data import TrainingData

        from rl_vlm.preference.sac import Batch
        from rl_vlm.preference.sac_learner import SACUpdateBatch

        replay = self._replay
        for _ in range(count):
            rows = replay.sample_rows(self._batch, self._rng)[None]
            batch = SACUpdateBatch(tuple(getattr(replay, name)[rows] for name in Batch._fields))
            self._learner.update(TrainingData(episodes=[batch]))


class Peer:
    """Stable-Baselines3's SAC, or SBX's."""

    def __init__(self, kind: str, hidden: int, depth: int, batch: int) -> None:
        if kind == "sb3":
            from stable_baselines3 import SAC
        else:
            from sbx import SAC
        self._batch = batch
        self._model: Any = SAC(
            "MlpPolicy", ENVIRONMENT, policy_kwargs={"net_arch": [hidden] * depth}, batch_size=batch, buffer_size=ROWS,
            learning_starts=ROWS + 1, seed=0, **({"device": "cpu"} if kind == "sb3" else {}),
        )  # fmt: skip
        self._model.learn(ROWS)

    def update(self, count: int) -> None:
        self._model.train(gradient_steps=count, batch_size=self._batch)


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("eager", "compiled", "sb3", "sbx"))
    parser.add_argument("hidden", type=int)
    parser.add_argument("depth", type=int)
    parser.add_argument("batch", type=int)
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # before any library counts the cores

    def prepare() -> Callable[[str], float]:
        size = (args.hidden, args.depth, args.batch)
        agent = Peer(args.kind, *size) if args.kind in ("sb3", "sbx") else Ours(*size, args.kind == "compiled")

        def update(count: str) -> float:
            started = time.process_time()
            agent.update(int(count))
            return time.process_time() - started

        return update

    serve(prepare)


if __name__ == "__main__":
    main()
