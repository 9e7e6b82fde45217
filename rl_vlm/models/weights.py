"""Versions of what is trained, an adapter or all weights: as bytes that travel, and as folders that others can read.

torch and peft are imported only where tensors are needed, so that the registry, which passes bytes on, starts fast.
"""

from __future__ import annotations

import json
import pickle
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rl_vlm.files import replace_folder
from rl_vlm.models.shared_memory import VersionRoom
from rl_vlm.models.tensor_bytes import TYPES, mapped, pack, read_header, tree_digest
from rl_vlm.types import POLICY, UserInputError

if TYPE_CHECKING:
    from peft import LoraConfig
    from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class WeightPayload:
    """One immutable version of a policy: safetensors bytes with their `tree_digest`, and what they are as JSON. `file`
    is where the bytes lie in this node's shared memory, if they do: then pickling passes on its name alone."""

    version: int
    tensors: bytes | memoryview
    config_json: str
    sha256: str
    policy: str = POLICY
    file: str = ""

    FOLDER: ClassVar[str]  # inside a run or a checkpoint, with the files TENSORS and CONFIG
    TENSORS: ClassVar[str]
    CONFIG: ClassVar[str]
    ENDINGS: ClassVar[tuple[str, ...]]  # of the tensors' names

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Out of band from pickle protocol 5 on: Ray lets all processes of a node read the same bytes in place."""
        tensors: Any = None
        if not self.file:
            tensors = pickle.PickleBuffer(self.tensors) if int(protocol) >= 5 else bytes(self.tensors)
        return _unpickled, (type(self), self.version, tensors, self.config_json, self.sha256, self.policy, self.file)

    @classmethod
    def packed(
        cls,
        version: int,
        state: Mapping[str, Tensor],
        config_json: str,
        dtype: str | None = None,
        room: VersionRoom | None = None,
    ) -> Self:
        """Pack tensors by name, rounded to `dtype` where it is given, into the `room` if they fit there."""
        target = room.take() if room is not None else None
        content, digest = pack(state, dtype, target)
        file = str(room.path) if room is not None and target is not None else ""
        return cls(version, content, config_json, digest, file=file)

    @classmethod
    def read(cls, folder: Path, version: int, policy: str = POLICY) -> Self:
        """Read what `write` wrote, or an adapter folder of peft. Raises UserInputError."""
        tensors, config_json = cls.checked(folder, Path.read_bytes)
        return cls(version, tensors, config_json, tree_digest(tensors), policy)

    @classmethod
    def checked(cls, folder: Path, load: Callable[[Path], Any]) -> tuple[Any, str]:
        """The tensors' file by `load`, and the configuration. Raises UserInputError for headers of another kind."""
        try:
            tensors, config_json = load(folder / cls.TENSORS), (folder / cls.CONFIG).read_text()
        except (OSError, ValueError) as error:
            hint = " Load its .bin file with peft and save it again." if any(folder.glob("adapter_model.bin")) else ""
            raise UserInputError(f"{folder} holds no {cls.TENSORS} with its {cls.CONFIG} ({error}).{hint}") from error
        if cls is AdapterPayload:
            LoraSettings.read(folder, config_json)
        try:
            _, header = read_header(tensors)
            # Adapters of convolutions have the same names.
            other = [name for name, one in header.items() if cls is AdapterPayload and len(one["shape"]) != 2]
            other += [f"{name} in {x['dtype']}" for name, x in header.items() if x["dtype"] not in TYPES.values()]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise UserInputError(f"{cls.TENSORS} of {folder} cannot be read ({error}).") from error
        if not header:
            raise UserInputError(f"{cls.TENSORS} of {folder} holds no tensors: it is empty or damaged.")
        if wrong := [name for name in header if not name.endswith(cls.ENDINGS)] + other:
            raise UserInputError(f"{cls.TENSORS} of {folder} holds {wrong[0]}: only LoRA of linear layers is taken.")
        return tensors, config_json

    def verify(self) -> Self:
        """Self. Raises UserInputError unless the bytes match the hash."""
        if tree_digest(self.tensors) != self.sha256:
            raise UserInputError(f"Policy version {self.version} is corrupt: its bytes do not match its SHA-256.")
        return self

    def state(self) -> dict[str, Tensor]:
        """The tensors by name as views of the bytes, not to be written to. Raises UserInputError for damaged bytes."""
        import torch

        try:
            start, header = read_header(self.tensors)
            types = {name: getattr(torch, kind) for kind, name in TYPES.items()}
            tensors: dict[str, Tensor] = {}
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The given buffer is not writable")
                for name, entry in header.items():
                    (begin, end), dtype = entry["data_offsets"], types[entry["dtype"]]
                    count = (end - begin) // dtype.itemsize
                    flat = torch.frombuffer(self.tensors, dtype=dtype, count=count, offset=start + begin)
                    tensors[name] = flat.view(entry["shape"])
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            raise UserInputError(f"Policy version {self.version} is corrupt ({error!r}).") from error
        return tensors

    def rounded(self, dtype: str) -> Self:
        """The same version with its tensors rounded to `dtype`, such as bfloat16. Raises as `state` does."""
        import torch

        kind, own = getattr(torch, dtype), self.state()
        if all(tensor.dtype == kind for tensor in own.values()):
            return self
        content, digest = pack(own, dtype)
        return replace(self, tensors=content, sha256=digest, file="")

    def write(self, folder: Path) -> Path:
        """Write both files; the folder appears complete or not at all. Other files in it stay, such as a model card."""

        def others(old: Path) -> Iterator[str]:
            return (path.name for path in old.iterdir() if path.name not in (self.TENSORS, self.CONFIG))

        with replace_folder(folder, others) as draft:
            (draft / self.TENSORS).write_bytes(self.tensors)
            (draft / self.CONFIG).write_text(self.config_json)
        return folder


def _unpickled(
    kind: type[WeightPayload], version: int, tensors: Any, config_json: str, sha256: str, policy: str, file: str
) -> WeightPayload:
    """Raises OSError where the payload's file is not, or no longer, on this node."""
    content = mapped(Path(file)) if file else tensors if isinstance(tensors, bytes) else memoryview(tensors)
    return kind(version, content, config_json, sha256, policy, file)


PREFIX = "base_model.model."  # peft's, before the module names in adapter files
DOWN, UP = ".lora_A.weight", ".lora_B.weight"  # at the end of a tensor's name


def in_language_model(name: str) -> bool:
    """Whether a module or tensor of this name belongs to the language model, by all families' names for it."""
    return re.search(r"\b(language_model|text_model)\.", name) is not None


# Keys of peft's adapter_config.json with which LoRA stays W + scale * B·A; of others the value must say "not used".
_HARMLESS = {
    "alora_invocation_string", "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying",
    "eva_config", "exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config",
    "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "peft_version", "qalora_group_size",
    "revision", "target_modules", "task_type",
}  # fmt: skip
_UNUSED = {"bias": ("none",), "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva")}


class LoraSettings(BaseModel):
    """What peft's adapter_config.json says of plain LoRA, whose sum is W + scale · B·A."""

    model_config = ConfigDict(extra="allow", strict=True)

    peft_type: Literal["LORA"] = "LORA"
    r: int = Field(ge=1, le=8192)
    lora_alpha: float = Field(ge=-1e6, le=1e6, allow_inf_nan=False)
    use_rslora: bool = False

    @classmethod
    def read(cls, where: Any, text: str) -> LoraSettings:
        """From the file's text. Raises UserInputError where it cannot be read, or is not plain LoRA: PiSSA, OLoRA,
        CorDA, LoftQ and LoRA-GA change the base weights, DoRA and aLoRA the arithmetic, patterns single scales."""
        try:
            settings = cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = "".join(f" {part}:" for part in first["loc"])
            raise UserInputError(
                f"The adapter_config.json of {where} is not that of a LoRA adapter:{key} {first['msg'][:80]}."
            ) from error
        for key, value in sorted((settings.model_extra or {}).items()):
            if key not in _HARMLESS and value and value not in _UNUSED.get(key, ()):
                raise UserInputError(
                    f"The adapter {where} was made with {key} {json.dumps(value)[:40]}, which is no plain LoRA: merge "
                    "it into the model with peft, and give the merged model's folder."
                )
        return settings

    @property
    def scale(self) -> float:
        """Of B·A."""
        return self.lora_alpha / (self.r**0.5 if self.use_rslora else self.r)


@dataclass(frozen=True, slots=True)
class AdapterPayload(WeightPayload):
    """One adapter version: peft's names, and `config_json` is peft's configuration."""

    FOLDER: ClassVar[str] = "adapter"
    TENSORS: ClassVar[str] = "adapter_model.safetensors"
    CONFIG: ClassVar[str] = "adapter_config.json"
    ENDINGS: ClassVar[tuple[str, ...]] = (DOWN, UP)

    @classmethod
    def build(
        cls, version: int, state: Mapping[str, Tensor], config: LoraConfig, dtype: str | None = None
    ) -> AdapterPayload:
        values = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
        about = json.dumps({**values, "inference_mode": True}, indent=2, sort_keys=True, default=str)
        return cls.packed(version, state, about, dtype)


@dataclass(frozen=True, slots=True)
class FullPayload(WeightPayload):
    """All parameters by transformers' names, tied ones once; `config_json` names the model that they began as."""

    FOLDER: ClassVar[str] = "weights"
    TENSORS: ClassVar[str] = "model.safetensors"
    CONFIG: ClassVar[str] = "full_weights.json"
    ENDINGS: ClassVar[tuple[str, ...]] = ("",)

    @classmethod
    def build(
        cls,
        version: int,
        state: Mapping[str, Tensor],
        base: str,
        dtype: str | None = None,
        room: VersionRoom | None = None,
    ) -> FullPayload:
        """`base` is the model that training began with."""
        about = json.dumps({"format": "rl_vlm full weights", "base_model": base}, indent=1)
        return cls.packed(version, state, about, dtype, room)


def require_full(payload: WeightPayload) -> FullPayload:
    """The payload. Raises UserInputError for an adapter, which replicas of full weights cannot serve."""
    if not isinstance(payload, FullPayload):
        raise UserInputError(
            f"Version {payload.version} is an adapter, and these replicas serve full weights: set model.train to lora."
        )
    return payload


def check_fits(state: Mapping[str, Tensor], own: Mapping[str, Tensor], what: str) -> None:
    """Raise UserInputError, about `what`, unless `state` holds finite tensors of the names and shapes of `own`."""
    found, wanted = ({name: tuple(one.shape) for name, one in tensors.items()} for tensors in (state, own))
    check_shapes(found, wanted, what)
    check_finite(state, what)


def check_shapes(found: Mapping[str, tuple[int, ...]], own: Mapping[str, tuple[int, ...]], what: str) -> None:
    """Raise UserInputError, about `what`, unless both hold tensors of the same names and shapes."""
    if found.keys() != own.keys():
        example = sorted(found.keys() ^ own.keys())[0]
        raise UserInputError(f"{what} does not fit the model: tensors differ, for example {example}.")
    for name, shape in found.items():
        if shape != own[name]:
            raise UserInputError(f"{what} does not fit the model: {name} is {shape}, expected {own[name]}.")


def check_finite(state: Mapping[str, Tensor], what: str) -> None:
    """Raise UserInputError, about `what`, unless all values are finite."""
    import torch

    for name, tensor in state.items():
        if not torch.isfinite(tensor.sum(dtype=torch.float32)):  # finite where all values are, and one pass
            raise UserInputError(f"{what} has values that are not finite, in {name}.")


def put_weights(model: nn.Module, payload: WeightPayload) -> None:
    """Copy all weights into a model, rounded to its precision. Raises UserInputError where they do not fit."""
    own, state = dict(model.named_parameters()), payload.state()
    check_fits(state, own, f"Weight version {payload.version}")
    for name, parameter in own.items():
        parameter.data.copy_(state[name])
