"""Adapter versions as bytes and as folders in peft's own format.

torch and peft are imported only where tensors are needed, so that the registry, which only passes bytes on, starts fast.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_vlm.types import POLICY, UserInputError

if TYPE_CHECKING:
    from peft import LoraConfig
    from torch import Tensor

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # by safetensors' names
MAX_RANK, MAX_ALPHA = 8192, 1e6
MAX_CONFIG = 4 * 2**20  # characters: some adapters list every module that they change
PREFIX = "base_model.model."  # peft's, before the module names in adapter files


@dataclass(frozen=True, slots=True)
class AdapterPayload:
    """One immutable adapter version of a policy: safetensors bytes in peft's naming, peft's config, and the SHA-256 of the bytes."""

    version: int
    tensors: bytes | memoryview
    config_json: str
    sha256: str
    policy: str = POLICY

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Out of band from pickle protocol 5 on: Ray then lets all processes of a node read the same bytes in place."""
        tensors = pickle.PickleBuffer(self.tensors) if int(protocol) >= 5 else bytes(self.tensors)
        return _unpickled, (self.version, tensors, self.config_json, self.sha256, self.policy)

    @classmethod
    def build(cls, version: int, state: Mapping[str, Tensor], config: LoraConfig) -> AdapterPayload:
        """Pack a peft state dict."""
        from safetensors.torch import save

        # A copy on the CPU in a fixed order, so that equal weights give equal bytes.
        tensors = {name: state[name].detach().to("cpu").contiguous() for name in sorted(state)}
        blob = save(tensors)
        return cls(version, blob, config_to_json(config), hashlib.sha256(blob).hexdigest())

    def verify(self) -> AdapterPayload:
        """Return self if the bytes match the hash."""
        if hashlib.sha256(self.tensors).hexdigest() != self.sha256:
            raise UserInputError(f"Adapter version {self.version} is corrupt: its bytes do not match its SHA-256.")
        return self

    def state(self) -> dict[str, Tensor]:
        """The tensors by peft's names. Raises UserInputError when the bytes are no safetensors file."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            return load(bytes(self.tensors))  # no copy where they are bytes
        except SafetensorError as error:
            raise UserInputError(f"Adapter version {self.version} is corrupt ({error}).") from error

    def views(self) -> dict[str, Tensor]:
        """The tensors by peft's names as views of the bytes, not to be written to. Raises as `state` does."""
        import torch

        try:
            size = 8 + int.from_bytes(self.tensors[:8], "little")
            header = json.loads(bytes(self.tensors[8:size]))
            header.pop("__metadata__", None)
            found: dict[str, Tensor] = {}
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The given buffer is not writable")
                for name, entry in header.items():
                    begin, end = entry["data_offsets"]
                    dtype = getattr(torch, _DTYPES[entry["dtype"]])
                    flat = torch.frombuffer(
                        self.tensors, dtype=dtype, count=(end - begin) // dtype.itemsize, offset=size + begin
                    )
                    found[name] = flat.view(entry["shape"])
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            raise UserInputError(f"Adapter version {self.version} is corrupt ({error!r}).") from error
        return found

    def rounded(self, dtype: str) -> AdapterPayload:
        """The same version with its tensors rounded to `dtype`, such as bfloat16: half the bytes, and a hash of its own.

        Raises as `state` does.
        """
        import torch
        from safetensors.torch import save

        kind = getattr(torch, dtype)
        blob = save({name: tensor.to(kind).contiguous() for name, tensor in self.views().items()})
        return replace(self, tensors=blob, sha256=hashlib.sha256(blob).hexdigest())

    def write(self, folder: Path) -> Path:
        """Write a folder that peft and vLLM load, atomically: the folder appears complete or not at all."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        temporary.chmod(0o755)  # mkdtemp makes it private
        try:
            (temporary / "adapter_model.safetensors").write_bytes(self.tensors)
            (temporary / "adapter_config.json").write_text(self.config_json)
            if folder.exists():
                old = folder.with_name(f".{folder.name}-old-{os.getpid()}")
                os.replace(folder, old)
                os.replace(temporary, folder)
                for left in old.iterdir():
                    if not (folder / left.name).exists():  # not ours: a model card, a note
                        os.replace(left, folder / left.name)
                shutil.rmtree(old, ignore_errors=True)
            else:
                os.replace(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return folder

    @classmethod
    def read(cls, folder: Path, version: int, policy: str = POLICY) -> AdapterPayload:
        """Read a peft adapter folder."""
        try:
            tensors = (folder / "adapter_model.safetensors").read_bytes()
            config_json = (folder / "adapter_config.json").read_text()
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


def _unpickled(version: int, tensors: Any, config_json: str, sha256: str, policy: str) -> AdapterPayload:
    held = tensors if isinstance(tensors, bytes) else memoryview(tensors)
    return AdapterPayload(version, held, config_json, sha256, policy)


def config_to_json(config: LoraConfig) -> str:
    """peft's adapter_config.json, keys sorted."""
    values = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    values["inference_mode"] = True
    return json.dumps(values, indent=2, sort_keys=True, default=str)


def find_adapter(adapter: Path | None, run_dir: Path | None) -> Path | None:
    """The adapter folder that a command names directly or by its run folder; None: the base model.

    Raises UserInputError when both are named, or what is named is no adapter.
    """
    if adapter is not None and run_dir is not None:
        raise UserInputError("--adapter and --run-dir both name an adapter: give one of them.")
    folder = run_dir / "adapter" if run_dir is not None else adapter
    if folder is not None and not (folder / "adapter_config.json").is_file():
        raise UserInputError(f"{folder} is not a peft adapter folder: it holds no adapter_config.json.")
    return folder
