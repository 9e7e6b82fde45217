"""ControlEnv, the interface of control environments, and helpers that several of them use."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box

StepResult = tuple[np.ndarray, float, bool, bool, dict[str, Any]]


class ControlEnv(gymnasium.Env[np.ndarray, np.ndarray]):
    """A continuous control task.

    The reward of `step` is the task's own: agents that learn from preferences never see it, scripted teachers and
    evaluation do. Episodes that start with the same seed and get the same actions are the same: exact resume replays
    them.
    """

    observation_space: Box  # float32 [O]
    action_space: Box  # float32 [A] from -1 to 1
    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}  # noqa: RUF012  (gymnasium's own declaration)
    render_mode = "rgb_array"
    horizon: int  # steps after which `step` truncates
    image_size: int

    @abstractmethod
    def frame(self) -> np.ndarray:
        """uint8 [image_size, image_size, 3]: the current picture."""

    def success(self, info: Mapping[str, Any]) -> float:
        """1.0 where the `info` of a step says that the task is done at this moment, else 0.0."""
        return float(bool(info.get("success", info.get("is_success", False))))

    def render(self) -> np.ndarray:  # type: ignore[override]
        return self.frame()


def unit_box(size: int) -> Box:
    return Box(-1.0, 1.0, (size,), np.float32)


def from_unit_box(action: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """An action [A] from [-1, 1], clipped, on the bounds low and high [A]; float64, because in float32 one in six pairs
    of bounds is exceeded by a rounding, and environments may reject such an action."""
    share = (np.clip(action, -1.0, 1.0).astype(np.float64) + 1) / 2
    low, high = low.astype(np.float64), high.astype(np.float64)
    return np.clip(low * (1 - share) + high * share, low, high)


def as_vector(observation: Any) -> np.ndarray:
    return np.asarray(observation, np.float32).reshape(-1)
