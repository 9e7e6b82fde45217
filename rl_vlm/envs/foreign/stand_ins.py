"""The few lines of frameworks that environment files import, for machines without these frameworks.

`vlmrl` (vlm-gym) needs JAX, `vagen` needs verl and a GPU. Their environments derive from the classes below.
"""

from __future__ import annotations

import importlib.util
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
