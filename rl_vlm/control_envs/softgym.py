"""SoftGym and other simulators of the old gym interface as control environments, without importing them."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box

from rl_vlm.control_envs.base import ControlEnv, StepResult, as_vector, from_unit_box, unit_box
from rl_vlm.control_envs.gymnasium_env import picture_of
from rl_vlm.types import UserInputError


class SoftGymControlEnv(ControlEnv):
    """Wraps an environment of the old gym interface; `done` at the horizon is a truncation, before it a termination.

    Args:
        env: the simulator's environment: `reset()` returns an observation, `step(action)` observation, reward, done and
            info, `render(mode, **kwargs)` a picture uint8 [H, W, 3].
        horizon: steps of an episode; by default the environment's own `horizon`.
        success_key, success_above: a moment is a success where `info[success_key]` exceeds `success_above`: rope
            `normalized_length` 0.95, cloth `normalized_performance` 0.9, pass-water `reward` -0.36.
        image_size: pictures are resized to this.
        render_kwargs: passed to `render`, such as `hide_picker=True`.

    A package makes it known by an entry point:

        [project.entry-points."rl_vlm.control_envs"]
        "softgym/RopeFlattenEasy" = "my_package:make_rope"

    where `make_rope(**kwargs)` returns `SoftGymControlEnv(...)` around its own environment.
    """

    def __init__(
        self,
        env: Any,
        *,
        horizon: int | None = None,
        success_key: str = "normalized_performance",
        success_above: float = 0.9,
        image_size: int = 360,
        render_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.horizon = int(horizon or getattr(env, "horizon", None) or 0)
        if not self.horizon:
            raise UserInputError(f"{type(env).__name__} has no horizon of its own: set env.kwargs.horizon.")
        self.simulator, self.image_size = env, image_size
        self._success_key, self._success_above, self._render_kwargs = success_key, success_above, render_kwargs or {}
        self._low, self._high = (np.asarray(bound) for bound in (env.action_space.low, env.action_space.high))
        self.action_space = unit_box(self._low.size)
        self.observation_space = Box(-np.inf, np.inf, (int(np.prod(env.observation_space.shape)),), np.float32)
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode. These simulators draw from numpy's global generator, so the seed goes there."""
        super().reset(seed=seed)
        if seed is not None:
            np.random.seed(seed % 2**32)
        self._steps = 0
        return as_vector(self.simulator.reset()), {}

    def step(self, action: np.ndarray) -> StepResult:
        native = from_unit_box(action, self._low.reshape(-1), self._high.reshape(-1)).reshape(self._low.shape)
        observation, reward, done, info = self.simulator.step(native.astype(np.float32))
        self._steps += 1
        truncated = self._steps >= self.horizon
        measured = {"reward": reward, **info}.get(self._success_key, -np.inf)
        info = {**info, "success": float(measured) > self._success_above}
        return as_vector(observation), float(reward), bool(done) and not truncated, truncated, info

    def frame(self) -> np.ndarray:
        return picture_of(lambda: self.simulator.render(mode="rgb_array", **self._render_kwargs), self.image_size)

    def close(self) -> None:
        getattr(self.simulator, "close", lambda: None)()
