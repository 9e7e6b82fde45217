"""Adapter versions as bytes and as folders in peft's own format.

torch and peft are imported only where tensors are needed, so that the registry, which only passes bytes on, starts fast.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rl_vlm.models.payload import WeightPayload
from rl_vlm.types import POLICY, UserInputError

if TYPE_CHECKING:
    from peft import LoraConfig
    from torch import Tensor

MAX_RANK, MAX_ALPHA = 8192, 1e6
MAX_CONFIG = 4 * 2**20  # characters: some adapters list every module that they change
PREFIX = "base_model.model."  # peft's, before the module names in adapter files


@dataclass(frozen=True, slots=True)
class AdapterPayload(WeightPayload):
    """One adapter version: peft's names, and `config_json` is peft's configuration."""

    KIND: ClassVar[str] = "Adapter"
    FOLDER: ClassVar[str] = "adapter"
    TENSORS: ClassVar[str] = "adapter_model.safetensors"
    CONFIG: ClassVar[str] = "adapter_config.json"

    @classmethod
    def build(
        cls, version: int, state: Mapping[str, Tensor], config: LoraConfig, dtype: str | None = None
    ) -> AdapterPayload:
        """Pack a peft state dict, rounded where `dtype` is given."""
        return cls.packed(version, state, config_to_json(config), dtype)

    @classmethod
    def read(cls, folder: Path, version: int, policy: str = POLICY) -> AdapterPayload:
        """Read a peft adapter folder."""
        try:
            tensors = (folder / cls.TENSORS).read_bytes()
            config_json = (folder / cls.CONFIG).read_text()
        except OSError as error:
            raise UserInputError(f"{folder} is not a peft adapter folder ({error}).") from error
        check_adapter(folder, config_json, tensors)
        return cls(version, tensors, config_json, hashlib.sha256(tensors).hexdigest(), policy)


def check_adapter(where: Any, config_json: str, tensors: bytes | memoryview) -> None:
    """Raise UserInputError unless this is a LoRA adapter: its kind, its rank and scale, and that it has tensors at all."""
    if len(config_json) > MAX_CONFIG:
        raise UserInputError(f"The adapter {where}: adapter_config.json has more than {MAX_CONFIG} characters.")
    try:
        config = json.loads(config_json)
        if not isinstance(config, dict):
            raise ValueError("it holds no object")
        size = int.from_bytes(tensors[:8], "little")
        names = [] if size > len(tensors) - 8 else [*json.loads(bytes(tensors[8 : 8 + size]))]
    except (ValueError, TypeError, RecursionError) as error:
        raise UserInputError(f"The adapter {where} cannot be read ({error}).") from error
    kind, rank, alpha = config.get("peft_type", "LORA"), config.get("r"), config.get("lora_alpha")
    if kind != "LORA":
        raise UserInputError(f"The adapter {where} is {str(kind)[:40]}, not LORA: only LoRA adapters can be used.")
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise UserInputError(f"The adapter {where} has rank {str(rank)[:40]}: r must be a number from 1 to {MAX_RANK}.")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= MAX_ALPHA:
        raise UserInputError(f"The adapter {where} has lora_alpha {str(alpha)[:40]}: it must be a finite number.")
    if not any(".lora_" in name for name in names):
        raise UserInputError(
            f"The adapter {where} holds no LoRA matrices: adapter_model.safetensors is empty or damaged."
        )


def config_to_json(config: LoraConfig) -> str:
    """peft's adapter_config.json, keys sorted."""
    values = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    values["inference_mode"] = True
    return json.dumps(values, indent=2, sort_keys=True, default=str)
