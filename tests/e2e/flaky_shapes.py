"""Shapes whose step fails every now and then: raises, hangs, or returns nonsense."""

from __future__ import annotations

import time
from typing import Any

from rl_vlm.zoo.shapes.environment import ShapesEnv

_steps = 0


class FlakyShapes(ShapesEnv):
    """`fault`: raise, hang or nonsense; about one in `every` steps of this process."""

    def __init__(self, fault: str, every: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._fault, self._every = fault, every

    def step(self, action: str) -> Any:
        """Answer, or fail."""
        global _steps
        _steps += 1
        if _steps % self._every == 0:
            if self._fault == "raise":
                raise RuntimeError("the simulator exploded")
            if self._fault == "hang":
                time.sleep(3600)
            return "nonsense"
        return super().step(action)
