"""Wraps SoftGym and other simulators of the old gym interface as ControlEnv, without importing them."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box

from rl_vlm.control_envs.gymnasium_env import GymnasiumControlEnv
from rl_vlm.types import UserInputError


class SoftGymControlEnv(GymnasiumControlEnv):
    """Wraps an environment of the old gym interface.

    Args:
        env: the simulator's environment: `reset()` returns an observation, `step(action)` observation, reward, done and
            info, `render(mode, **kwargs)` a picture uint8 [H, W, 3].
        horizon: steps of an episode; by default the environment's own `horizon`.
        success_key, success_above: a moment is a success where `info[success_key]` exceeds `success_above`: rope
            `normalized_length` .95, cloth `normalized_performance` .9, pass-water `reward` -.36.
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
        steps = horizon or getattr(env, "horizon", None)
        if not steps:
            raise UserInputError(f"{type(env).__name__} has no horizon of its own: set env.kwargs.horizon.")
        inner = _OldGym(env, int(steps), success_key, success_above)
        super().__init__(
            inner, horizon=int(steps), image_size=image_size, render=lambda _: inner.picture(render_kwargs)
        )


class _OldGym(gymnasium.Env[np.ndarray, np.ndarray]):
    """The simulator in gymnasium's interface; `done` at the horizon is a truncation, before it a termination."""

    def __init__(self, simulator: Any, horizon: int, success_key: str, success_above: float) -> None:
        self.simulator = simulator
        self._horizon, self._success_key, self._success_above = horizon, success_key, success_above
        low, high = (
            np.asarray(bound, np.float32) for bound in (simulator.action_space.low, simulator.action_space.high)
        )
        self.action_space = Box(low, high, dtype=np.float32)
        self.observation_space = Box(-np.inf, np.inf, simulator.observation_space.shape, np.float32)
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode. These simulators draw from numpy's global generator, so the seed goes there."""
        if seed is not None:
            np.random.seed(seed % 2**32)
        self._steps = 0
        return self.simulator.reset(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """One step."""
        observation, reward, done, info = self.simulator.step(action)
        self._steps += 1
        truncated = self._steps >= self._horizon
        measured = {"reward": float(reward), **info}.get(self._success_key)
        success = measured is not None and float(measured) > self._success_above
        return observation, float(reward), bool(done) and not truncated, truncated, {**info, "success": success}

    def picture(self, kwargs: dict[str, Any] | None) -> np.ndarray:
        """uint8 [H, W, 3]."""
        return np.asarray(self.simulator.render(mode="rgb_array", **(kwargs or {})))

    def close(self) -> None:
        """Close the simulator."""
        close = getattr(self.simulator, "close", None)
        if callable(close):
            close()
