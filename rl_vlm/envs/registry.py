"""Environments by id, module or file: `register("Shapes-v0", ...)`, `make("Shapes-v0", turns=2)`, `make("my/env.py")`.

Packages, this one included, register ids through the entry-point group `rl_vlm.envs`; what speaks another framework's interface is run by
its adapter (see `adapters/interfaces.py`), and so is an id such as `openenv:http://localhost:8000`.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from rl_vlm.envs.adapters.interfaces import INTERFACES, SCHEMES, interface_of, split_scheme
from rl_vlm.envs.argument_types import check_arguments
from rl_vlm.envs.base import VisionEnv
from rl_vlm.envs.loading import absolute_spec, is_spec, load_object
from rl_vlm.registry import provided
from rl_vlm.types import UserInputError

EnvFactory = Callable[..., VisionEnv]
ENTRY_POINT_GROUP = "rl_vlm.envs"

# Factories that this process registered, by id; a string names "module:attribute" and is imported on first use.
_REGISTRY: dict[str, EnvFactory | str] = {}


def register(env_id: str, factory: EnvFactory | str | None = None) -> Any:
    """Make `factory` known as `env_id`; without a factory, a decorator for one: `@register("Mine-v0")`.

    It is a VisionEnv class, a function that makes one, a class or function of a foreign interface, or a string that names
    one of these as `make` would. Other processes know an id if they register it too (see `plugins` of the configuration), or
    if the factory is a string.
    """
    if factory is None:
        return functools.partial(register, env_id)
    _REGISTRY[env_id] = factory
    return factory


def registered() -> tuple[str, ...]:
    """All known ids, sorted."""
    return tuple(sorted({*_REGISTRY, *provided(ENTRY_POINT_GROUP)}))


def make(env_id: str, **kwargs: Any) -> VisionEnv:
    """Make an environment by registry id, by "package.module[:Class]", or from a file "path/to/env.py[:Class]".

    Further names: the id of an installed package's entry point, "verifiers:NAME", "openenv:URL", "remote:URL" and a plain
    "http://host:port", which is a `RemoteEnv`. A module or file without a name after the colon holds one VisionEnv
    subclass, or one environment of a foreign interface. Naming a file runs it: it is the user's own code.
    """
    factory = resolve(env_id)
    try:
        inspect.signature(factory).bind(**kwargs)
    except TypeError as error:
        raise UserInputError(
            f"Environment {env_id} does not take these arguments ({error}): correct env.kwargs, or --env-arg."
        ) from error
    if isinstance(factory, type) and factory.__module__.startswith("rl_vlm."):  # others' annotations may be loose
        check_arguments(env_id, factory, kwargs)
    env = factory(**kwargs)
    if not isinstance(env, VisionEnv):
        raise UserInputError(f"{env_id} made a {type(env).__name__}, which is not a VisionEnv.")
    return env


def resolve(env_id: str) -> EnvFactory:
    """The factory behind an id, module, file or scheme; UserInputError if there is none."""
    scheme = split_scheme(env_id) if env_id not in _REGISTRY else None
    if scheme is not None:
        name, address = scheme
        return functools.partial(load_object(SCHEMES[name]), address)
    found = find(env_id)
    if isinstance(found, type) and issubclass(found, VisionEnv):
        return found
    interface = interface_of(found)
    if interface is not None:
        return functools.partial(load_object(interface.adapter), found)
    if not callable(found):
        raise UserInputError(f"{env_id} names a {type(found).__name__}, which cannot make an environment.")
    return found  # type: ignore[no-any-return]


def find(env_id: str) -> Any:
    """The class or function that an id, module or file names; of a module, its environment."""
    found = lookup(env_id)
    return pick(found) if isinstance(found, ModuleType) else found


def lookup(env_id: str) -> Any:
    """The class, function or module that an id, module or file names."""
    known = _REGISTRY.get(env_id, env_id if is_spec(env_id) else None)
    if known is None:  # not before: the metadata of every installed package are read for it
        point = provided(ENTRY_POINT_GROUP).get(env_id)
        known = point.value if point is not None else None
    if known is None:
        nearest = difflib.get_close_matches(env_id, registered(), n=1, cutoff=0.4)
        hint = f" Did you mean {nearest[0]}?" if nearest else ""
        raise UserInputError(
            f"Unknown environment {env_id!r}.{hint} Known: {', '.join(registered())}; "
            "or name one as package.module:Class or path/to/env.py, verifiers:NAME, openenv:URL or remote:URL."
        )
    return load_object(known) if isinstance(known, str) else known


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


def pick(module: ModuleType) -> Any:
    """The environment of a module: its only VisionEnv subclass, a function of a foreign interface, or its only class of one."""
    classes = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__ and not inspect.isabstract(value)
    ]
    ours = [one for one in classes if issubclass(one, VisionEnv)]
    if len(ours) == 1:
        return ours[0]
    for interface in INTERFACES:
        if not ours and interface.function and callable(getattr(module, interface.function, None)):
            return getattr(module, interface.function)
    foreign = [] if ours else _leaves([one for one in classes if interface_of(one)])
    if len(foreign) == 1:
        return foreign[0]
    names = ", ".join(cls.__name__ for cls in ours or foreign)
    where = getattr(module, "__file__", None) or module.__name__
    if names:
        raise UserInputError(f"{where} holds several environments: name one of {names} after a colon.")
    raise UserInputError(
        f"{where} holds neither a VisionEnv subclass nor a build_env(sample, args), nor an environment of another interface "
        f"({', '.join(one.name for one in INTERFACES[1:])})."
    )


def _leaves(classes: list[type]) -> list[type]:
    """The classes that no other of them derives from: a base class in the same file is not the environment."""
    return [one for one in classes if not any(other is not one and issubclass(other, one) for other in classes)]
