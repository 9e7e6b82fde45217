"""LoRA through peft: injection, peft's own file format, and merging for engines that serve merged weights."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model, set_peft_model_state_dict
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor, nn

from rl_vlm.types import UserInputError

# Names of the linear layers in the language model, by the choice that users know.
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
TARGET_MODULES: dict[str, tuple[str, ...]] = {"attn": _ATTENTION, "mlp": _MLP, "all": _ATTENTION + _MLP}
_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class AdapterPayload:
    """One immutable adapter version: safetensors bytes in peft's naming, peft's config, and the SHA-256 of the bytes."""

    version: int
    tensors: bytes
    config_json: str
    sha256: str

    @classmethod
    def build(cls, version: int, state: Mapping[str, Tensor], config: LoraConfig) -> AdapterPayload:
        """Pack a peft state dict."""
        # A copy on the CPU in a fixed order, so that equal weights give equal bytes.
        tensors = {name: state[name].detach().to("cpu").contiguous() for name in sorted(state)}
        blob = save_safetensors(tensors)
        return cls(version, blob, config_to_json(config), hashlib.sha256(blob).hexdigest())

    def verify(self) -> AdapterPayload:
        """Return self if the bytes match the hash."""
        if hashlib.sha256(self.tensors).hexdigest() != self.sha256:
            raise UserInputError(f"Adapter version {self.version} is corrupt: its bytes do not match its SHA-256.")
        return self

    def state(self) -> dict[str, Tensor]:
        """The tensors by peft's names."""
        return load_safetensors(self.tensors)

    def write(self, folder: Path) -> Path:
        """Write a folder that peft and vLLM load, atomically: the folder appears complete or not at all."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            (temporary / "adapter_model.safetensors").write_bytes(self.tensors)
            (temporary / "adapter_config.json").write_text(self.config_json)
            if folder.exists():
                old = folder.with_name(f".{folder.name}-old-{os.getpid()}")
                os.replace(folder, old)
                os.replace(temporary, folder)
                shutil.rmtree(old, ignore_errors=True)
            else:
                os.replace(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return folder

    @classmethod
    def read(cls, folder: Path, version: int) -> AdapterPayload:
        """Read a peft adapter folder."""
        try:
            tensors = (folder / "adapter_model.safetensors").read_bytes()
            config_json = (folder / "adapter_config.json").read_text()
        except OSError as error:
            raise UserInputError(f"{folder} is not a peft adapter folder ({error}).") from error
        return cls(version, tensors, config_json, hashlib.sha256(tensors).hexdigest())


def lora_config(rank: int, alpha: int, target_modules: str, dropout: float = 0.0) -> LoraConfig:
    """LoRA on the language model's linear layers; the vision tower stays frozen."""
    names = TARGET_MODULES[target_modules]
    return LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=rf".*language_model.*\.({'|'.join(names)})",
        task_type="CAUSAL_LM",
    )


def config_to_json(config: LoraConfig) -> str:
    """peft's adapter_config.json, keys sorted."""
    values = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    values["inference_mode"] = True
    return json.dumps(values, indent=2, sort_keys=True, default=str)


def inject_lora(model: nn.Module, config: LoraConfig) -> nn.Module:
    """Put trainable LoRA layers (float32) into `model` in place; everything else is frozen."""
    model.requires_grad_(False)
    inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
            parameter.requires_grad_(True)
    return model


def lora_state(model: nn.Module) -> dict[str, Tensor]:
    """peft's state dict of the injected adapter, named as in an adapter file."""
    state = get_peft_model_state_dict(model)
    return {name if name.startswith(_PREFIX) else _PREFIX + name: tensor for name, tensor in state.items()}


def load_lora_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy an adapter into the injected LoRA layers; raises if a tensor is missing or has another shape."""
    own = lora_state(model)
    if own.keys() != state.keys():
        difference = sorted(own.keys() ^ state.keys())[:3]
        raise UserInputError(f"The adapter does not fit the model: tensors differ, for example {', '.join(difference)}.")
    for name, tensor in state.items():
        if own[name].shape != tensor.shape:
            raise UserInputError(
                f"The adapter does not fit the model: {name} is {tuple(tensor.shape)}, expected {tuple(own[name].shape)}."
            )
    set_peft_model_state_dict(model, {name.removeprefix(_PREFIX): tensor for name, tensor in state.items()})


def merged_weights(model: nn.Module, payload: AdapterPayload, base: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of every adapted linear layer with the adapter merged in: W + (alpha / r) · B·A, by module name.

    `base` holds the layers' own weights [out, in] by module name; the sum is formed in float32 (LoRA, arXiv 2106.09685,
    equation 3).
    """
    config = json.loads(payload.config_json)
    if config.get("use_dora") or config.get("rank_pattern") or config.get("alpha_pattern"):
        raise UserInputError("Adapters with DoRA or per-layer ranks cannot be merged by this engine: use engine vllm.")
    rank = config["r"]
    scale = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
    state = payload.state()
    merged: dict[str, Tensor] = {}
    for name, down in state.items():
        if not name.endswith(".lora_A.weight"):
            continue
        module = name.removeprefix(_PREFIX).removesuffix(".lora_A.weight")
        if module not in base:
            raise UserInputError(f"The adapter does not fit the model: it adapts {module}, which the model lacks.")
        up, weight = state[name.replace("lora_A", "lora_B")], base[module]
        delta = (up.float() @ down.float()).to(weight.device) * scale
        merged[module] = (weight.float() + delta).to(weight.dtype)
    return merged


def linear_weights(model: nn.Module, target_modules: str = "all") -> dict[str, Tensor]:
    """The language model's linear weights by module name, the ones that an adapter may change."""
    names = TARGET_MODULES[target_modules]
    return {
        name: module.weight.data
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "language_model" in name and name.rsplit(".", 1)[-1] in names
    }


def seed_lora(seed: int) -> None:
    """Seed torch before `inject_lora`, so that A is drawn the same in every learner."""
    torch.manual_seed(seed)
