"""The few lines of other frameworks that environment files import, for machines where those frameworks are not
installed.

`vlmrl` (vlm-gym) needs JAX, `vagen` needs verl and a GPU. Their environments derive from the classes below.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")
_LOCK = threading.Lock()


@dataclass(frozen=True)
class BaseState:
    """What an environment of vlm-gym remembers between its steps."""


class BaseEnv:
    """`reset(idx) -> (state, observation)`; `step(state, action_tokens) -> (state, out_tokens, reward, done, info)`."""

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


class GymBaseEnv:
    """Made with one dict. A subclass has the coroutines `system_prompt()`, `reset(seed)`, `step(action_str)` and
    `close()`."""

    def __init__(self, env_config: dict[str, Any]) -> None:
        self.config = env_config

    async def close(self) -> None:
        """Free what the environment holds."""


class GymImageEnv(GymBaseEnv):
    """An observation is {"obs_str": text, "multi_modal_input": {"<image>": [PIL images]}}, the second where it has
    images."""


# What stands in for which module.
_MODULES: dict[str, tuple[Any, ...]] = {
    "vlmrl.envs.base": (BaseState, BaseEnv),
    "vlmrl.utils.vlm": (decode_tokens,),
    "vagen.envs": (GymBaseEnv, GymImageEnv),  # newer files import them from here
    "vagen.envs.gym_base_env": (GymBaseEnv,),
    "vagen.envs.gym_image_env": (GymImageEnv,),
}
_DOC = "Stands in for a framework that is not installed."


def with_stand_ins(call: Callable[[], T], file: Path | None) -> T:
    """What `call` returns; once more with the stand-ins, where it imports a framework that has one and is not
    installed.

    `file` is the user's, where there is one: in a checkout of the framework its own modules are found beside the
    stand-ins.
    """
    try:
        return call()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        with _LOCK:
            known = getattr(sys.modules.get(package), "__doc__", "") == _DOC
            if package not in ("vlmrl", "vagen") or not (known or importlib.util.find_spec(package) is None):
                raise
            _provide(package, file)
        return call()


def _provide(package: str, file: Path | None) -> None:
    """Put the stand-ins of a package in place. All of them are packages, which find the modules of a checkout."""
    for target, content in _MODULES.items():
        if not target.startswith(f"{package}."):
            continue
        parts = target.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            module = sys.modules.get(name)
            if module is None:
                module = sys.modules[name] = ModuleType(name, _DOC)
                module.__spec__ = ModuleSpec(name, None, is_package=True)
                if depth > 1:
                    setattr(sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], module)
            folders = [str(above) for above in file.parents if above.name == parts[depth - 1]] if file else []
            module.__path__ = list(dict.fromkeys([*getattr(module, "__path__", ()), *folders]))
        vars(module).update({one.__name__: one for one in content})
    importlib.invalidate_caches()
