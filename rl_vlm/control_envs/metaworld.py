"""MetaWorld's tasks as control environments, with RL-VLM-F's views of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box

from rl_vlm.control_envs.base import ControlEnv, StepResult, unit_box
from rl_vlm.control_envs.metaworld_cameras import SceneRenderer, choose_view, import_mujoco
from rl_vlm.registry import suggestion
from rl_vlm.types import UserInputError

_GREEN = (0.10, 0.65, 0.15, 1.0)
# RL-VLM-F's prompts name a green cube; MetaWorld 3 draws a brown one.
_RECOLOURED = {"sweep-into": ("objGeom", _GREEN)}


class MetaWorldEnv(ControlEnv):
    """One MetaWorld task.

    Args:
        task: such as "drawer-open".
        observe_goal: put the goal's place into the observation, where the original hides it.
        horizon: steps of an episode, at most 500. Success does not end it.
        image_size: pictures are drawn at this size.
        camera: "original" (see `ORIGINAL_VIEWS`; corner2 for tasks that it has none for), or a camera of the model.
        hide_arm: leave the robot out of the pictures, as the original does.
        show_goal: draw the marker at the goal, which the original hides: only it shows where to reach.
    """

    def __init__(
        self,
        task: str,
        *,
        observe_goal: bool = False,
        horizon: int = 500,
        image_size: int = 300,
        camera: str | None = None,
        hide_arm: bool = True,
        show_goal: bool = False,
    ) -> None:
        if not 1 <= horizon <= 500:
            raise UserInputError(f"env.kwargs.horizon is {horizon}: MetaWorld episodes have 1 to 500 steps.")
        self.task, self.horizon, self.image_size = task, horizon, image_size
        self._hide_arm, self._show_goal = hide_arm, show_goal
        self._view = choose_view(task, camera)
        inner = _make_task(task)
        inner._set_task_called = True  # without a benchmark's task object, which would fix the start
        inner._freeze_rand_vec = False
        inner.seeded_rand_vec = True
        inner._partially_observable = not observe_goal
        inner.__dict__.pop("sawyer_observation_space", None)  # it was cached before the line above
        self._inner = inner
        self._renderer: SceneRenderer | None = None
        space = inner.sawyer_observation_space
        self.observation_space = Box(space.low.astype(np.float32), space.high.astype(np.float32), dtype=np.float32)
        self.action_space = unit_box(4)
        self._steps = 0
        if task in _RECOLOURED:
            name, colour = _RECOLOURED[task]
            geom = inner.model.geom(name).id
            inner.model.geom_matid[geom], inner.model.geom_rgba[geom] = -1, colour

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode, with object and goal where the seed says."""
        super().reset(seed=seed)
        # MetaWorld ignores `reset(seed=)`.
        self._inner.np_random = np.random.default_rng(int(self.np_random.integers(2**31)))
        observation, _ = self._inner.reset()
        self._steps = 0
        return observation.astype(np.float32), {}

    def step(self, action: np.ndarray) -> StepResult:
        """One step; `info` holds MetaWorld's own metrics, `success` at this moment among them."""
        clipped = np.clip(action, -1.0, 1.0).astype(np.float32)
        observation, reward, _, truncated, info = self._inner.step(clipped)
        self._steps += 1
        return observation.astype(np.float32), float(reward), False, truncated or self._steps >= self.horizon, info

    def frame(self) -> np.ndarray:
        if self._renderer is None:
            model, arm, goal = self._inner.model, self._hide_arm, self._show_goal
            self._renderer = SceneRenderer(model, self._view, self.image_size, arm, goal)
        return self._renderer.draw(self._inner.data)

    def close(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
        self._inner.close()


def task_name(env_id: str) -> str | None:
    """The task that an id names ("metaworld/drawer-open-v3", "metaworld_drawer-open-v2"), or None for other ids."""
    for prefix in ("metaworld/", "metaworld_"):
        if env_id.startswith(prefix):
            name = env_id.removeprefix(prefix)
            return name[:-3] if name.endswith(("-v2", "-v3")) else name
    return None


def list_tasks() -> list[str]:
    """Every task of the MetaWorld that is installed. Raises UserInputError if there is none."""
    return sorted(name.removesuffix("-v3") for name in _classes())


def _classes() -> dict[str, Any]:
    import_mujoco()
    try:
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS
    except ImportError as error:
        raise UserInputError(f"MetaWorld is not installed ({error}): run `pip install 'rl-vlm[metaworld]'`.") from error
    return dict(ALL_V3_ENVIRONMENTS)


def _make_task(task: str) -> Any:
    classes, name = _classes(), f"{task}-v3"
    if name not in classes:
        known = [f"metaworld/{one}" for one in classes]
        raise UserInputError(f"MetaWorld has no task {task!r}.{suggestion(f'metaworld/{name}', known)}")
    return classes[name]()
