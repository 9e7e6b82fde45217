"""Environments written to other frameworks' interfaces, unchanged: how each interface is recognised, and which
adapter runs it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple


class Interface(NamedTuple):
    """One foreign interface.

    `name`: for error messages. `function`: the function of a module that makes environments, by name; "" if there is
    none. `fits`: whether a class or function speaks it. `adapter`: "module:Class" of the VisionEnv that wraps it.
    """

    name: str
    function: str
    fits: Callable[[Any], bool]
    adapter: str


def _is_slime(found: Any) -> bool:
    """`build_env(sample, args)`, also under another name."""
    return _is_function(found, "build_env") or (_is_function(found) and _parameters(found) >= {"sample", "args"})


def _is_vlm_gym(found: Any) -> bool:
    """`create_env(name, tokenizer, ...)`, or a class with `reset(idx)` and `step(state, action_tokens)`."""
    if not isinstance(found, type):
        return _is_function(found, "create_env")
    step, reset = getattr(found, "step", None), getattr(found, "reset", None)
    if not callable(step) or not callable(reset):
        return False
    return "action_tokens" in _parameters(step) or hasattr(found, "tokens_per_action")


def _is_vagen(found: Any) -> bool:
    """A class like GymImageEnv, with the coroutines `system_prompt()`, `reset(seed)` and `step(text)`."""
    names = ("system_prompt", "reset", "step")
    return isinstance(found, type) and all(inspect.iscoroutinefunction(getattr(found, name, None)) for name in names)


def _is_verifiers(found: Any) -> bool:
    """`load_environment(...)`, or a class or an instance of the package, which has been imported then."""
    base = getattr(sys.modules.get("verifiers"), "Environment", None)
    if base is not None and (isinstance(found, base) or (isinstance(found, type) and issubclass(found, base))):
        return True
    return _is_function(found, "load_environment")


INTERFACES = (
    Interface("slime", "build_env", _is_slime, "rl_vlm.envs.foreign.slime:SlimeEnv"),
    Interface("vlm-gym", "create_env", _is_vlm_gym, "rl_vlm.envs.foreign.vlm_gym:VlmGymEnv"),
    Interface("verifiers", "load_environment", _is_verifiers, "rl_vlm.envs.foreign.verifiers:VerifiersEnv"),
    Interface("VAGEN", "", _is_vagen, "rl_vlm.envs.foreign.vagen:VagenEnv"),
)

# Ids that name an environment by a scheme: what stands after the colon is the adapter's first argument.
SCHEMES = {
    "verifiers": "rl_vlm.envs.foreign.verifiers:VerifiersEnv",
    "openenv": "rl_vlm.envs.foreign.openenv:OpenEnv",
    **dict.fromkeys(("remote", "http", "https"), "rl_vlm.envs.remote:RemoteEnv"),
}


def interface_of(found: Any) -> Interface | None:
    """The foreign interface that a class, a function or an instance speaks."""
    return next((one for one in INTERFACES if one.fits(found)), None)


def split_scheme(env_id: str) -> tuple[str, str] | None:
    """("openenv", "http://localhost:8000") of "openenv:http://localhost:8000"; None for ids without a known scheme."""
    scheme, colon, rest = env_id.partition(":")
    if not colon or scheme not in SCHEMES:
        return None
    return scheme, env_id if scheme in ("http", "https") else rest


def _is_function(found: Any, name: str | None = None) -> bool:
    """Whether `found` can be called and is no class; with `name`, whether it is called so."""
    return callable(found) and not isinstance(found, type) and name in (None, getattr(found, "__name__", ""))


def _parameters(function: Any) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some built-in callables have no signature
        return set()
