"""Shapes where most training items cannot be answered rightly: their groups have no gradient, whatever the policy says."""

from __future__ import annotations

from typing import Any

from rl_vlm.envs.base import Info, StepResult
from rl_vlm.types import Observation
from rl_vlm.zoo.shapes.environment import ShapesEnv

SETTLED_IN_TEN = 7


class MostlySettled(ShapesEnv):
    """Seven of ten training items pay nothing for any answer; held-out items are ordinary."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """Open an item."""
        opened = super().reset(seed=seed, options=options)
        split, index = self.chosen_item(options)
        # Four items in a row have the four answers, so that each is as frequent among those that pay.
        self._settled = split == "train" and index // 4 % 10 < SETTLED_IN_TEN
        return opened

    def step(self, action: str) -> StepResult:
        """Judge the answer, unless the item is settled."""
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, 0.0 if self._settled else reward, terminated, truncated, info
