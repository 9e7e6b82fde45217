"""Environments written to other frameworks' interfaces: how each interface is recognised, which adapter runs it, and
the few lines of the frameworks that environment files import, for machines without them."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")
_LOCK = threading.Lock()
_OURS = Path(__file__).parents[2]
# By interface, "module:Class" of the VisionEnv that wraps its environments.
ADAPTERS = {
    "slime": "rl_vlm.envs.foreign.slime:SlimeEnv",
    "vlm-gym": "rl_vlm.envs.foreign.vlm_gym:VlmGymEnv",
    "verifiers": "rl_vlm.envs.foreign.verifiers:VerifiersEnv",
    "VAGEN": "rl_vlm.envs.foreign.vagen:VagenEnv",
}
# The functions that make environments, by the names that they have in a user's module.
FUNCTIONS = {"build_env": "slime", "create_env": "vlm-gym", "load_environment": "verifiers"}
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


# `vlmrl` (vlm-gym) needs JAX, `vagen` needs verl and a GPU. Their environments derive from the classes below.


@dataclass(frozen=True)
class BaseState:
    """What an environment of vlm-gym remembers between its steps."""


class BaseEnv:
    """See `vlm_gym.py` for what a subclass has."""

    tokens_per_action: int = 32
    force_answer_at: int = -1
    num_tasks: int = -1  # no end

    @staticmethod
    def clean_action(action_tokens: Sequence[int], end_token: int) -> list[int]:
        """The tokens up to and with the first `end_token`."""
        tokens = list(action_tokens)
        return tokens[: tokens.index(end_token) + 1] if end_token in tokens else tokens


def decode_tokens(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """The text without special tokens, its spaces as they are."""
    return str(tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class GymEnv:
    """Made with one dict; see `vagen.py` for what a subclass has. It is GymBaseEnv, and GymImageEnv with images."""

    def __init__(self, env_config: dict[str, Any]) -> None:
        self.config = env_config

    async def close(self) -> None:
        """Free what the environment holds."""


_GYM = {"GymBaseEnv": GymEnv, "GymImageEnv": GymEnv}
# What stands in for which module; packages come before what is in them, and newer files import from `vagen.envs`.
_STAND_INS: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("vlmrl", "vlmrl.envs", "vlmrl.utils", "vagen")},
    "vlmrl.envs.base": {"BaseState": BaseState, "BaseEnv": BaseEnv},
    "vlmrl.utils.vlm": {"decode_tokens": decode_tokens},
    **dict.fromkeys(("vagen.envs", "vagen.envs.gym_base_env", "vagen.envs.gym_image_env"), _GYM),
}


def with_stand_ins(call: Callable[[], T]) -> T:
    """What `call` returns; it is tried again with the stand-ins if it imports a framework that is not installed.

    The stand-ins are packages: in a checkout of the framework they find its own modules beside the importing file.
    """
    try:
        return call()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        with _LOCK:
            if package not in _STAND_INS or getattr(importlib.util.find_spec(package), "origin", None):
                raise
            files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
            folders = [above for file in files if not file.is_relative_to(_OURS) for above in file.parents]
            for name in (one for one in _STAND_INS if one.partition(".")[0] == package):
                parent, _, last = name.rpartition(".")
                module = sys.modules.setdefault(name, ModuleType(name, "Stands in for what is not installed."))
                module.__spec__ = ModuleSpec(name, None, is_package=True)
                own = [str(folder) for folder in folders if folder.name == last]
                module.__path__ = list(dict.fromkeys([*getattr(module, "__path__", ()), *own]))
                vars(module).update(_STAND_INS[name])
                if parent:
                    setattr(sys.modules[parent], last, module)
        return call()
