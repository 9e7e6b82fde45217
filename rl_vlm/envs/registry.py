"""Environments by id, module or file: `register("Shapes-v0", ...)`, `make("Shapes-v0", turns=2)`, `make("my/env.py")`.

Packages, this one included, register ids through the entry-point group `rl_vlm.envs`; what speaks another framework's
interface is run by its adapter (see `envs/foreign`), and so is an id such as `openenv:http://localhost:8000`.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rl_vlm.envs.arguments import check_arguments
from rl_vlm.envs.base import VisionEnv
from rl_vlm.envs.foreign import ADAPTERS, FUNCTIONS, SCHEMES, interface_of, split_scheme
from rl_vlm.envs.loading import absolute_spec, is_spec, load_object
from rl_vlm.registry import provided
from rl_vlm.types import RLVLMError, Split, UserInputError

if TYPE_CHECKING:
    from rl_vlm.config import EnvPart, EnvSection

EnvFactory = Callable[..., VisionEnv]
ENTRY_POINT_GROUP = "rl_vlm.envs"

# Factories that this process registered, by id; a string names "module:attribute" and is imported on first use.
_REGISTRY: dict[str, EnvFactory | str] = {}


def register(env_id: str, factory: EnvFactory | str | None = None) -> Any:
    """Make `factory` known as `env_id`; without a factory, a decorator for one: `@register("Mine-v0")`.

    It is a VisionEnv class, a function that makes one, a class or function of a foreign interface, or a string that
    names one of these as `make` would. Other processes know an id if the factory is a string, or if they register it
    too (see `plugins` of the configuration).
    """
    if factory is None:
        return functools.partial(register, env_id)
    _REGISTRY[env_id] = factory
    return factory


def registered() -> tuple[str, ...]:
    """All known ids, sorted."""
    return tuple(sorted({*_REGISTRY, *provided(ENTRY_POINT_GROUP)}))


def make(env_id: str, **kwargs: Any) -> VisionEnv:
    """Make an environment by registry id, "package.module[:Class]", "path/to/env.py[:Class]" or an id with a scheme.

    A module or file without a name after the colon holds one VisionEnv subclass, or one environment of a foreign
    interface. Naming a file runs it: it is the user's own code.
    """
    factory = resolve(env_id)
    check_arguments(env_id, factory, kwargs)
    env = factory(**kwargs)
    if not isinstance(env, VisionEnv):
        raise UserInputError(f"{env_id} made a {type(env).__name__}, which is not a VisionEnv.")
    return env


def resolve(env_id: str) -> EnvFactory:
    """The factory behind an id, module, file or scheme. Raises UserInputError."""
    scheme = split_scheme(env_id) if env_id not in _REGISTRY else None
    if scheme is not None:
        name, address = scheme
        return functools.partial(load_object(SCHEMES[name]), address)
    found = find(env_id)
    if isinstance(found, type) and issubclass(found, VisionEnv):
        return found
    interface = interface_of(found)
    if interface is not None:
        return functools.partial(load_object(ADAPTERS[interface]), found)
    if not callable(found):
        raise UserInputError(f"{env_id} names a {type(found).__name__}, which cannot make an environment.")
    return found  # type: ignore[no-any-return]


def is_agent(env_id: str) -> bool:
    """Whether it is an agent of the user's own, which asks the policy itself."""
    return not split_scheme(env_id) and interface_of(find(env_id)) == "agent"


_OF_VLM_GYM = {"truefalse": "NLVR2-v0", "vision": "Caption-v0", "vision_caption": "Caption-v0"}  # its names of ours


def nearest(env_id: str) -> str:
    """The registered environment that a name is likely to mean; "" if there is none."""
    by_name = {name.lower().removesuffix("-v0"): name for name in registered()} | _OF_VLM_GYM
    found = difflib.get_close_matches(env_id.lower(), by_name, n=1, cutoff=0.4)
    return by_name[found[0]] if found else ""


def find(env_id: str) -> Any:
    """The class or function that an id, module or file names; of a module, its environment."""
    known = _REGISTRY.get(env_id, env_id if is_spec(env_id) else None)
    if known is None:  # not before: the metadata of every installed package are read for it
        point = provided(ENTRY_POINT_GROUP).get(env_id)
        known = point.value if point is not None else None
    if known is None:
        hint = f" Did you mean {meant}?" if (meant := nearest(env_id)) else ""
        raise UserInputError(
            f"Unknown environment {env_id!r}.{hint} Known: {', '.join(registered())}; "
            "or name one as package.module:Class or path/to/env.py, verifiers:NAME, openenv:URL or remote:URL."
        )
    found = load_object(known) if isinstance(known, str) else known
    return pick(found) if isinstance(found, ModuleType) else found


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
    """The environment of a module: its only VisionEnv subclass, or its only function or class of another interface."""
    classes = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__ and not inspect.isabstract(value)
    ]
    ours = [one for one in classes if issubclass(one, VisionEnv)]
    if len(ours) == 1:
        return ours[0]
    functions = [getattr(module, name) for name in FUNCTIONS if callable(getattr(module, name, None))]
    if functions and not ours:
        return functions[0]
    known = [] if ours else [one for one in classes if interface_of(one)]
    # A base class in the same file is not the environment.
    foreign = [one for one in known if not any(other is not one and issubclass(other, one) for other in known)]
    if len(foreign) == 1:
        return foreign[0]
    names = ", ".join(cls.__name__ for cls in ours or foreign)
    where = getattr(module, "__file__", None) or module.__name__
    if names:
        raise UserInputError(f"{where} holds several environments: name one of {names} after a colon.")
    raise UserInputError(
        f"{where} holds neither a VisionEnv subclass nor a build_env(sample, args), nor an environment of another "
        f"interface ({', '.join(list(ADAPTERS)[1:])})."
    )


def list_environments() -> list[dict[str, Any]]:
    """Per id: `id`, the first paragraph of its docstring and, if it can be made without arguments, `num_items` by split
    and `max_turns`."""
    return [_describe(env_id) for env_id in registered()]


def _describe(env_id: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"id": env_id, "description": "", "num_items": None, "max_turns": None}
    try:
        factory = resolve(env_id)
        entry["description"] = " ".join((inspect.getdoc(factory) or "").split("\n\n")[0].split())
        env = make(env_id)
    except RLVLMError as error:
        return {**entry, "description": entry["description"] or f"cannot be used: {error}"}
    counts = {split: env.num_items(split) for split in ("train", "test")}  # type: ignore[arg-type]
    env.close()
    sizes = None if None in counts.values() else counts
    return {**entry, "num_items": sizes, "max_turns": getattr(env, "max_turns", None)}


def make_part(env: EnvSection, name: str = "", changes: Mapping[str, Any] | None = None) -> VisionEnv:
    """One environment of `env.parts`, with changed arguments, in this process."""
    part = env.parts[name]
    return make(part.id, **part.make_kwargs(changes))


@dataclass(frozen=True, slots=True)
class Survey:
    """The number of items by split and environment (None without end), and `VisionEnv.metrics` by environment."""

    sizes: dict[Split, dict[str, int | None]]
    metrics: dict[str, Mapping[str, tuple[float, ...]]]


def survey(env: EnvSection, *splits: Split) -> Survey:
    """Open each environment once, and note what is asked of it in these splits."""
    found = Survey({split: {} for split in splits}, {})
    for name, part in env.parts.items():
        one = make_part(env, name)
        for split in splits:
            found.sizes[split][name] = part_size(part, one, split)
        found.metrics[name] = one.metrics
        one.close()
    return found


def part_size(part: EnvPart, env: VisionEnv, split: Split) -> int | None:
    """The number of items in a split; for training at most `num_items`, which may also bound an endless one."""
    size = env.num_items(split)
    return train_size(part, size) if split == "train" else size


def train_size(part: EnvPart, size: int | None) -> int | None:
    """The number of training items of an environment that has `size` of them, or endless ones (None)."""
    return min((count for count in (part.num_items, size) if count is not None), default=None)
