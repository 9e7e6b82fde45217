"""Control environments by id."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import gymnasium

from rl_vlm.control_envs.base import ControlEnv
from rl_vlm.control_envs.gymnasium_env import GymnasiumControlEnv
from rl_vlm.control_envs.metaworld import MetaWorldEnv, list_tasks, task_name
from rl_vlm.envs.loading import is_spec, load_object
from rl_vlm.registry import provided, suggestion
from rl_vlm.types import UserInputError

ENTRY_POINT_GROUP = "rl_vlm.control_envs"
ControlEnvFactory = Callable[..., Any]

# Arguments of GymnasiumControlEnv itself; the wrapped environment gets all others.
_OF_THE_WRAPPER = ("horizon", "render", "success", "image_size")
_BUILTIN = {"ContinuousCartPole-v0": "rl_vlm.control_envs.cartpole:ContinuousCartPole"}


def make_control_env(env_id: str, *, image_size: int | None = None, **kwargs: Any) -> ControlEnv:
    """Make a control environment whose pictures are `image_size` pixels high and wide (None: as it likes).

    `env_id` is, in this order: the built-in id; "metaworld/TASK"; an id that an installed package provides
    through the entry-point group `rl_vlm.control_envs`; a gymnasium id; "package.module:Class" or
    "path/to/file.py:Class". Raises UserInputError with the nearest known id.
    """
    factory = _find(env_id)
    given = kwargs if image_size is None else {**kwargs, "image_size": image_size}

    def rejected(why: object) -> UserInputError:
        return UserInputError(f"Environment {env_id} does not take these arguments ({why}): correct env.kwargs.")

    try:
        # An argument that the environment's class does not take goes to the wrapper around it.
        wrapper = {name: given[name] for name in _OF_THE_WRAPPER if name in given and not _takes(factory, name)}
        own = {name: value for name, value in given.items() if name not in wrapper}
        inspect.signature(factory).bind(**own)
    except TypeError as error:
        raise rejected(error) from error
    env = factory(**own)
    if isinstance(env, gymnasium.Env) and not isinstance(env, ControlEnv):
        env = GymnasiumControlEnv(env, **wrapper)
    elif wrapper.keys() - {"image_size"}:
        raise rejected(", ".join(wrapper.keys() - {"image_size"}))
    if not isinstance(env, ControlEnv):
        raise UserInputError(
            f"{env_id} made a {type(env).__name__}, which is neither a ControlEnv nor a gymnasium.Env."
        )
    if image_size is not None and env.image_size != image_size:
        raise UserInputError(f"{env_id} draws pictures of {env.image_size} pixels, not of {image_size}: ask for those.")
    return env


def _takes(factory: ControlEnvFactory, name: str) -> bool:
    """Whether the factory takes this argument; a gymnasium class must name it, whatever else it passes on."""
    parameters = inspect.signature(factory).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    passes_on = inspect.isclass(factory) and issubclass(factory, gymnasium.Env) and not issubclass(factory, ControlEnv)
    return name in parameters or (takes_any and not passes_on)


def known_control_envs() -> list[str]:
    """Ids that can be named here and now, gymnasium's own left out; MetaWorld's only where it is installed."""
    try:
        tasks = [f"metaworld/{task}-v3" for task in list_tasks()]
    except UserInputError:
        tasks = []
    return sorted({*_BUILTIN, *provided(ENTRY_POINT_GROUP), *tasks})


def _find(env_id: str) -> ControlEnvFactory:
    if (task := task_name(env_id)) is not None:
        return functools.partial(MetaWorldEnv, task)
    known = _BUILTIN | {name: point.value for name, point in provided(ENTRY_POINT_GROUP).items()}
    if env_id not in known and env_id in gymnasium.registry:
        return functools.partial(GymnasiumControlEnv, env_id)
    if env_id not in known and not is_spec(env_id):
        names = known_control_envs()
        hint = suggestion(env_id, [*names, *gymnasium.registry], 0.5)
        raise UserInputError(
            f"Unknown control environment {env_id!r}.{hint} Known: {', '.join(names[:8])}"
            f"{', ...' if len(names) > 8 else ''}, every gymnasium id with real-valued actions, what installed "
            f"packages provide in the entry-point group {ENTRY_POINT_GROUP} (as for SoftGym), or package.module:Class."
        )
    factory = load_object(known.get(env_id, env_id))
    if not callable(factory):
        raise UserInputError(f"{env_id} names a {type(factory).__name__}, which cannot make an environment.")
    return factory  # type: ignore[no-any-return]
