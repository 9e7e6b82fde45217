"""Environments written to other frameworks' interfaces: how each interface is recognised, and which adapter runs it."""

from __future__ import annotations

import inspect
import sys
from typing import Any

# By interface, "module:Class" of the VisionEnv that wraps its environments.
ADAPTERS = {
    "slime": "rl_vlm.envs.foreign.slime:SlimeEnv",
    "vlm-gym": "rl_vlm.envs.foreign.vlm_gym:VlmGymEnv",
    "verifiers": "rl_vlm.envs.foreign.verifiers:VerifiersEnv",
    "VAGEN": "rl_vlm.envs.foreign.vagen:VagenEnv",
    "agent": "rl_vlm.envs.foreign.agent:AgentEnv",
}
# The functions that make environments, by the names that they have in a user's module.
FUNCTIONS = {"build_env": "slime", "create_env": "vlm-gym", "load_environment": "verifiers", "agent": "agent"}
# Ids that name an environment by a scheme: what stands after the colon is the adapter's first argument.
SCHEMES = {
    "verifiers": ADAPTERS["verifiers"],
    "openenv": "rl_vlm.envs.foreign.openenv:OpenEnv",
    **dict.fromkeys(("remote", "http", "https"), "rl_vlm.envs.remote:RemoteEnv"),
}


def interface_of(found: Any) -> str | None:
    """The foreign interface of a class, a function or an instance; None if it has none of them.

    A function of slime may have another name if it takes `sample` and `args`.
    """
    base = getattr(sys.modules.get("verifiers"), "Environment", ())
    if issubclass(found if isinstance(found, type) else type(found), base):
        return "verifiers"
    if not isinstance(found, type):
        is_slime = _parameters(found) >= {"sample", "args"}
        return "slime" if is_slime else FUNCTIONS.get(getattr(found, "__name__", ""))
    if _parameters(getattr(found, "run", None)) >= {"client", "task"} and callable(getattr(found, "reward", None)):
        return "agent"
    methods = [getattr(found, name, None) for name in ("reset", "step", "system_prompt")]
    if all(map(inspect.iscoroutinefunction, methods)):
        return "VAGEN"
    takes_tokens = hasattr(found, "tokens_per_action") or "action_tokens" in _parameters(methods[1])
    return "vlm-gym" if all(map(callable, methods[:2])) and takes_tokens else None


def split_scheme(env_id: str) -> tuple[str, str] | None:
    """("openenv", "http://localhost:8000") of "openenv:http://localhost:8000"; None for ids without a known scheme."""
    scheme, colon, rest = env_id.partition(":")
    if not colon or scheme not in SCHEMES:
        return None
    return scheme, env_id if scheme in ("http", "https") else rest


def _parameters(function: Any) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # no function, or a built-in one without a signature
        return set()
