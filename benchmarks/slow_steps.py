"""Shapes with one to five turns of 20 ms to 2 s each (log-normal); the item fixes both."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from rl_vlm.envs.base import Info, StepResult
from rl_vlm.types import Observation
from rl_vlm.zoo.shapes.environment import ShapesEnv

MEDIAN_S, SIGMA, SHORTEST_S, LONGEST_S, MOST_TURNS = 0.15, 1.0, 0.02, 2.0, 5


class SlowSteps(ShapesEnv):
    """Asks the same question several times; the reward is that of the last answer."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """Open an item."""
        opened = super().reset(seed=seed, options=options)
        rng = np.random.default_rng([self.item(options, self.num_items("train"))[1], 17])
        turns = int(rng.integers(1, MOST_TURNS + 1))
        self._seconds = np.clip(rng.lognormal(np.log(MEDIAN_S), SIGMA, turns), SHORTEST_S, LONGEST_S).tolist()
        return opened

    def step(self, action: str) -> StepResult:
        """Take as long as the item says; only the last turn is judged."""
        time.sleep(self._seconds.pop(0))
        if self._seconds:
            return Observation.user("Look again: how many shapes are there?"), 0.0, False, False, {}
        observation, reward, _, _, info = super().step(action)
        return observation, reward, True, False, info
