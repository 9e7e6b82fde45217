"""Environments by id, module or file: `register("Shapes-v0", ...)`, `make("Shapes-v0", turns=2)`, `make("my/env.py")`."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from rl_vlm.envs.base import VisionEnv
from rl_vlm.envs.loading import absolute_spec, is_spec, load_object
from rl_vlm.types import UserInputError

EnvFactory = Callable[..., VisionEnv]

# Factories by id; a string names "module:attribute" and is imported on first use.
_REGISTRY: dict[str, EnvFactory | str] = {
    "Shapes-v0": "rl_vlm.envs.shapes:ShapesEnv",
    "GridWalk-v0": "rl_vlm.envs.gridwalk:GridWalkEnv",
    "NLVR2-v0": "rl_vlm.envs.nlvr2:NLVR2Env",
    "Caption-v0": "rl_vlm.envs.caption:CaptionEnv",
    "Geo3k-v0": "rl_vlm.envs.geo3k:Geo3kEnv",
}


def register(env_id: str, factory: EnvFactory | str | None = None) -> Any:
    """Make `factory` known as `env_id`; without a factory, a decorator for one: `@register("Mine-v0")`.

    It is a VisionEnv class, a function that makes one, a `build_env(sample, args)` function, or a string that names
    one of these as `make` would. Other processes know an id if they register it too (see `plugins` of the configuration), or
    if the factory is a string.
    """
    if factory is None:
        return functools.partial(register, env_id)
    _REGISTRY[env_id] = factory
    return factory


def registered() -> tuple[str, ...]:
    """All known ids, sorted."""
    return tuple(sorted(_REGISTRY))


def make(env_id: str, **kwargs: Any) -> VisionEnv:
    """Make an environment by registry id, by "package.module[:Class]", or from a file "path/to/env.py[:Class]".

    A module or file without a name after the colon holds one VisionEnv subclass, or a `build_env(sample, args)`, which
    then runs in an `InteractiveEnvAdapter`. Naming a file runs it: it is the user's own code.
    """
    factory = resolve(env_id)
    try:
        inspect.signature(factory).bind(**kwargs)
    except TypeError as error:
        raise UserInputError(
            f"Environment {env_id} does not take these arguments ({error}): correct env.kwargs."
        ) from error
    env = factory(**kwargs)
    if not isinstance(env, VisionEnv):
        raise UserInputError(f"{env_id} made a {type(env).__name__}, which is not a VisionEnv.")
    return env


def resolve(env_id: str) -> EnvFactory:
    """The factory behind an id, module or file; UserInputError if there is none."""
    return _as_factory(lookup(env_id), env_id)


def lookup(env_id: str) -> Any:
    """The class, function or module that an id, module or file names."""
    found = _REGISTRY.get(env_id, env_id if is_spec(env_id) else None)
    if found is None:
        nearest = difflib.get_close_matches(env_id, _REGISTRY, n=1, cutoff=0.4)
        hint = f" Did you mean {nearest[0]}?" if nearest else ""
        raise UserInputError(
            f"Unknown environment {env_id!r}.{hint} Known: {', '.join(registered())}; "
            "or name one as package.module:Class or path/to/env.py."
        )
    return load_object(found) if isinstance(found, str) else found


def portable_id(env_id: str) -> str:
    """A name for the same environment that another process of this machine understands.

    Raises UserInputError if it was registered in this process only, as an object that cannot be imported by name.
    """
    found = _REGISTRY.get(env_id, env_id)
    if not isinstance(found, str):
        module, name = getattr(found, "__module__", ""), getattr(found, "__qualname__", ".")
        if "." in name or not is_spec(f"{module}:{name}") or module == "__main__" or module.startswith("_rl_vlm_user"):
            raise UserInputError(
                f"Environment {env_id} exists in this process only: register it by a string such as "
                '"package.module:Class" to run it in another one.'
            )
        found = f"{module}:{name}"
    return absolute_spec(found)


def is_build_env(found: Any) -> bool:
    """Whether `found` is a function of the interactive interface, `build_env(sample, args)`."""
    if isinstance(found, type) or not callable(found):
        return False
    names = set(inspect.signature(found).parameters)
    return getattr(found, "__name__", "") == "build_env" or names >= {"sample", "args"}


def pick(module: ModuleType) -> Any:
    """The environment of a module: its only VisionEnv subclass, or its `build_env`."""
    classes = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, VisionEnv) and value.__module__ == module.__name__
    ]
    if len(classes) == 1:
        return classes[0]
    if callable(getattr(module, "build_env", None)):
        return module.build_env
    names = ", ".join(cls.__name__ for cls in classes)
    where = getattr(module, "__file__", None) or module.__name__
    if names:
        raise UserInputError(f"{where} holds several environments: name one of {names} after a colon.")
    raise UserInputError(f"{where} holds neither a VisionEnv subclass nor a build_env(sample, args).")


def _as_factory(found: Any, env_id: str) -> EnvFactory:
    if isinstance(found, ModuleType):
        found = pick(found)
    if is_build_env(found):
        from rl_vlm.envs.interactive import InteractiveEnvAdapter  # it imports this module

        return functools.partial(InteractiveEnvAdapter, found)
    if not callable(found):
        raise UserInputError(f"{env_id} names a {type(found).__name__}, which cannot make an environment.")
    return found
