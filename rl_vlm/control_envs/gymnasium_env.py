"""Gymnasium environments as control environments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from PIL import Image

from rl_vlm.control_envs.base import ControlEnv, StepResult, as_vector, from_unit_box, unit_box
from rl_vlm.envs.loading import load_object
from rl_vlm.safe_text import one_line
from rl_vlm.types import UserInputError

Render = Callable[[gymnasium.Env[Any, Any]], np.ndarray]


class GymnasiumControlEnv(ControlEnv):
    """Wraps a gymnasium environment with a vector observation and Box actions, which are rescaled to [-1, 1].

    Args:
        env: the environment, or its id.
        horizon: steps after which an episode is truncated; by default what the id was registered with.
        image_size: pictures are resized to this.
        render: `module:function` or `file.py:function` that takes the unwrapped environment and returns uint8 [H, W,
            3]; by default the environment's own `render()`.
        success: info key that says whether the task is done; by default `success` or `is_success`.
        **kwargs: passed to `gymnasium.make`, such as a camera's name.
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any] | str,
        *,
        horizon: int | None = None,
        image_size: int = 200,
        render: str | Render | None = None,
        success: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.image_size = image_size
        self._render: Render | None = load_object(render) if isinstance(render, str) else render
        self._success_key = success
        if isinstance(env, str):
            ours: dict[str, Any] = {} if self._render is not None else {"render_mode": "rgb_array"}
            if horizon is not None:
                ours["max_episode_steps"] = horizon  # gymnasium ends episodes at the limit of the id otherwise
            env = make_gymnasium(env, {**ours, **kwargs})
        name = env.spec.id if env.spec is not None else type(env.unwrapped).__name__
        limit = env.spec.max_episode_steps if env.spec is not None else None
        if horizon is None and limit is None:
            raise UserInputError(f"{name} has no limit of steps: set env.kwargs.horizon.")
        if horizon is not None and limit is not None and horizon > limit:
            raise UserInputError(f"env.kwargs.horizon is {horizon}: episodes of {name} have at most {limit} steps.")
        # Not TimeLimit: the wrapper's count and ours would have to agree.
        self.horizon = min(filter(None, (horizon, limit)))
        actions = env.action_space
        if not isinstance(actions, Box) or not actions.is_bounded():
            raise UserInputError(f"{name} takes {actions}: the agent needs a bounded Box of real-valued actions.")
        if not isinstance(env.observation_space, Box):
            try:
                env = gymnasium.wrappers.FlattenObservation(env)
            except (NotImplementedError, TypeError) as error:  # flattening is abstract for unknown spaces
                raise UserInputError(f"The observations of {name} cannot be made a vector ({error}).") from error
        observations = env.observation_space
        assert isinstance(observations, Box)
        if observations.dtype == np.uint8:
            raise UserInputError(f"{name} observes pictures: the agent needs a vector of numbers.")
        self.env = env
        self.action_space = unit_box(int(np.prod(actions.shape)))
        self._low, self._high = actions.low.reshape(-1), actions.high.reshape(-1)
        self._action_shape = actions.shape
        low, high = (np.asarray(bound, np.float32).reshape(-1) for bound in (observations.low, observations.high))
        self.observation_space = Box(low, high, dtype=np.float32)
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        observation, info = self.env.reset(seed=seed, options=options)
        self._steps = 0
        return as_vector(observation), info

    def step(self, action: np.ndarray) -> StepResult:
        native = from_unit_box(action, self._low, self._high).reshape(self._action_shape)
        observation, reward, terminated, truncated, info = self.env.step(native.astype(self.env.action_space.dtype))
        self._steps += 1
        truncated = bool(truncated) or self._steps >= self.horizon
        return as_vector(observation), float(reward), bool(terminated), truncated, info

    def frame(self) -> np.ndarray:
        render, env = self._render, self.env
        return picture_of(env.render if render is None else lambda: render(env.unwrapped), self.image_size)

    def success(self, info: Any) -> float:
        return super().success(info) if self._success_key is None else float(bool(info.get(self._success_key, False)))

    def close(self) -> None:
        self.env.close()


def picture_of(render: Callable[[], Any], size: int | None) -> np.ndarray:
    """uint8 [size, size, 3], by area averaging, of a function that draws. Raises UserInputError where it cannot."""
    try:
        picture = np.asarray(render())
    except gymnasium.error.DependencyNotInstalled as error:
        raise UserInputError(f"This environment cannot draw itself here: {error}.") from error
    if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
        raise UserInputError(
            f"The picture is {picture.dtype} {list(picture.shape)}: what draws must return uint8 [height, width, 3]."
        )
    if size is None or picture.shape[:2] == (size, size):
        return picture
    return np.asarray(Image.fromarray(picture).resize((size, size), Image.Resampling.BOX))


def make_gymnasium(env_id: str, kwargs: dict[str, Any]) -> gymnasium.Env[Any, Any]:
    """An environment by its gymnasium id. Raises UserInputError."""
    try:
        return gymnasium.make(env_id, **kwargs)
    except ModuleNotFoundError as error:
        raise UserInputError(f"{env_id} needs a package ({error}): run `pip install {error.name}`.") from error
    except (gymnasium.error.Error, TypeError, ImportError) as error:
        raise UserInputError(f"gymnasium cannot make {env_id} ({one_line(error)}): correct env.kwargs.") from error
