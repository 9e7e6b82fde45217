"""Versions of what is trained, an adapter or all weights: as bytes that travel, and as folders that others can read."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import pickle
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from safetensors import SafetensorError, safe_open

from rl_vlm.config import TrainedModelSection
from rl_vlm.files import replace_folder
from rl_vlm.types import POLICY, UserInputError

if TYPE_CHECKING:
    from peft import LoraConfig
    from torch import Tensor, dtype, nn


PIECE = 16 << 20  # bytes that one thread hashes at a time
_MAX_THREADS = 8
# safetensors' names of types, and the order in which it writes them, backwards.
_TYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "float16": "F16", "bfloat16": "BF16", "int32": "I32",
    "float32": "F32", "float64": "F64", "int64": "I64",
}  # fmt: skip


class _Span(NamedTuple):
    """Where a tensor's bytes lie behind the header, and of which type they are there."""

    begin: int
    end: int
    kind: dtype


def pack(state: Mapping[str, Tensor], dtype: str | None = None) -> memoryview:
    """The bytes of a safetensors file, read-only, of tensors on any device, each rounded there to `dtype` where it is
    given.

    Equal tensors give equal bytes. Raises ValueError for a type that is not in _TYPES.
    """
    import torch

    header, spans = _layout(state, dtype)
    content = torch.empty(len(header) + max((span.end for span in spans.values()), default=0), dtype=torch.uint8)
    content[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    body = content[len(header) :]
    for name, (begin, end, kind) in spans.items():
        body[begin:end].view(kind).view(state[name].shape).copy_(state[name].detach())
    return content.numpy().data.toreadonly()


def write_tensors(path: Path, state: Mapping[str, Tensor]) -> None:
    """Write a safetensors file, tensor after tensor, to the disk itself: memory for one of them is enough. Raises
    OSError."""
    import torch

    header, spans = _layout(state)
    with path.open("wb") as file:
        file.write(header)
        for name in spans:
            plain = state[name].detach().to("cpu").contiguous()
            file.write(plain.reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def tree_digest(content: bytes | memoryview | mmap.mmap) -> str:
    """SHA-256 in hexadecimal, where there are several pieces of PIECE bytes of their SHA-256s, one after the other."""
    view = memoryview(content)
    if len(view) <= PIECE:
        return hashlib.sha256(view).hexdigest()
    starts = range(0, len(view), PIECE)
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
        # hashlib lets go of Python's lock meanwhile.
        digests = threads.map(lambda start: hashlib.sha256(view[start : start + PIECE]).digest(), starts)
        return hashlib.sha256(b"".join(digests)).hexdigest()


def file_digest(path: Path) -> str:
    """`tree_digest` of a file's content. Raises OSError, and ValueError for an empty file."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return tree_digest(content)


def _layout(state: Mapping[str, Tensor], dtype: str | None = None) -> tuple[bytes, dict[str, _Span]]:
    """The header with its length before it, and the tensors' spans in their order."""
    spans = dict(_spans(state, dtype))
    entries = {
        name: {"dtype": _TYPES[_name(kind)], "shape": [*state[name].shape], "data_offsets": [begin, end]}
        for name, (begin, end, kind) in spans.items()
    }
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header, spans


def _spans(state: Mapping[str, Tensor], dtype: str | None) -> Iterator[tuple[str, _Span]]:
    import torch

    kinds = {name: tensor.dtype if dtype is None else getattr(torch, dtype) for name, tensor in state.items()}
    order, end = [*_TYPES], 0
    for name in sorted(state, key=lambda name: (-order.index(_name(kinds[name])), name)):
        begin, end = end, end + state[name].numel() * kinds[name].itemsize
        yield name, _Span(begin, end, kinds[name])


def _name(kind: dtype) -> str:
    return str(kind).removeprefix("torch.")


# torch and peft are imported only where tensors are needed, so that the registry, which only passes bytes on, starts
# fast.

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # by safetensors' names


@dataclass(frozen=True, slots=True)
class WeightPayload:
    """One immutable version of a policy: safetensors bytes, what they are as JSON, and a SHA-256 of the bytes (see
    `digest`).

    KIND begins messages; FOLDER is its folder inside a run or a checkpoint, with the files TENSORS and CONFIG.
    """

    version: int
    tensors: bytes | memoryview
    config_json: str
    sha256: str
    policy: str = POLICY

    KIND: ClassVar[str]
    FOLDER: ClassVar[str]
    TENSORS: ClassVar[str]
    CONFIG: ClassVar[str]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Out of band from pickle protocol 5 on: Ray then lets all processes of a node read the same bytes in place."""
        tensors = pickle.PickleBuffer(self.tensors) if int(protocol) >= 5 else bytes(self.tensors)
        return _unpickled, (type(self), self.version, tensors, self.config_json, self.sha256, self.policy)

    @classmethod
    def packed(cls, version: int, state: Mapping[str, Tensor], config_json: str, dtype: str | None = None) -> Self:
        """Pack tensors by name, rounded to `dtype` such as bfloat16 where it is given, before they leave their
        device."""
        content = pack(state, dtype)
        return cls(version, content, config_json, cls.digest(content))

    @classmethod
    def digest(cls, content: bytes | memoryview) -> str:
        """What `sha256` must be for these bytes."""
        return hashlib.sha256(content).hexdigest()

    def verify(self) -> Self:
        """Return self if the bytes match the hash."""
        if self.digest(self.tensors) != self.sha256:
            raise UserInputError(f"{self.KIND} version {self.version} is corrupt: its bytes do not match its SHA-256.")
        return self

    def state(self) -> dict[str, Tensor]:
        """The tensors by name as views of the bytes, not to be written to. Raises UserInputError for damaged bytes."""
        import torch

        try:
            size = 8 + int.from_bytes(self.tensors[:8], "little")
            header = json.loads(bytes(self.tensors[8:size]))
            header.pop("__metadata__", None)
            tensors: dict[str, Tensor] = {}
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The given buffer is not writable")
                for name, entry in header.items():
                    begin, end = entry["data_offsets"]
                    dtype = getattr(torch, _DTYPES[entry["dtype"]])
                    flat = torch.frombuffer(
                        self.tensors, dtype=dtype, count=(end - begin) // dtype.itemsize, offset=size + begin
                    )
                    tensors[name] = flat.view(entry["shape"])
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            raise UserInputError(f"{self.KIND} version {self.version} is corrupt ({error!r}).") from error
        return tensors

    def rounded(self, dtype: str) -> Self:
        """The same version with its tensors rounded to `dtype`, such as bfloat16: half the bytes, and a hash of its
        own.

        Raises as `state` does.
        """
        import torch

        kind, own = getattr(torch, dtype), self.state()
        if all(tensor.dtype == kind for tensor in own.values()):
            return self
        content = pack(own, dtype)
        return replace(self, tensors=content, sha256=self.digest(content))

    def write(self, folder: Path) -> Path:
        """Write the folder with both files, atomically: it appears complete or not at all. Other files in it stay,
        such as a model card."""
        ours = (self.TENSORS, self.CONFIG)
        with replace_folder(
            folder, lambda old: (path.name for path in old.iterdir() if path.name not in ours)
        ) as draft:
            (draft / self.TENSORS).write_bytes(self.tensors)
            (draft / self.CONFIG).write_text(self.config_json)
        return folder


def _unpickled(
    kind: type[WeightPayload], version: int, tensors: Any, config_json: str, sha256: str, policy: str
) -> WeightPayload:
    content = tensors if isinstance(tensors, bytes) else memoryview(tensors)
    return kind(version, content, config_json, sha256, policy)


def _names_in(tensors: bytes | memoryview) -> list[str]:
    """Names of the tensors in a safetensors file; none where it is empty. Raises ValueError and TypeError for a
    damaged header."""
    size = int.from_bytes(tensors[:8], "little")
    return [] if size > len(tensors) - 8 else [*json.loads(bytes(tensors[8 : 8 + size]))]


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


def adapter_config(where: Any, text: str) -> dict[str, Any]:
    """The content of an adapter_config.json of plain LoRA. Raises UserInputError."""
    if len(text) > MAX_CONFIG:
        raise UserInputError(f"The adapter {where}: adapter_config.json has more than {MAX_CONFIG} characters.")
    try:
        config = json.loads(text)
        if not isinstance(config, dict):
            raise ValueError("it holds no object")
    except (ValueError, RecursionError) as error:
        raise UserInputError(f"The adapter {where} cannot be read ({error}).") from error
    check_plain_lora(where, config)
    return config


def check_adapter(where: Any, config_json: str, tensors: bytes | memoryview) -> None:
    """Raise UserInputError unless this is a LoRA adapter: its kind, its rank and scale, and that it has tensors at
    all."""
    config = adapter_config(where, config_json)
    try:
        names = _names_in(tensors)
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


# Keys of peft's adapter_config.json with which LoRA stays W + scale * B·A; of others the value must say "not used".
_HARMLESS = {
    "alora_invocation_string", "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying",
    "eva_config", "exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config",
    "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "peft_type", "peft_version",
    "qalora_group_size", "r", "revision", "target_modules", "task_type", "use_rslora",
}  # fmt: skip
_UNUSED = {"bias": ("none",), "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva")}


def check_plain_lora(where: Any, config: Mapping[str, Any]) -> None:
    """Raise UserInputError where the adapter changes more than W to W + scale * B·A, by its adapter_config.json.

    PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA change the base model's weights when they begin, DoRA and aLoRA the
    arithmetic, patterns the scale of single layers; others train more than matrices of linear layers.
    """
    for key in sorted(config.keys() - _HARMLESS):
        if config[key] and config[key] not in _UNUSED.get(key, ()):
            raise UserInputError(
                f"The adapter {where} was made with {key} {json.dumps(config[key])[:40]}, which is no plain LoRA: "
                "merge it into the model with peft, and give the merged model's folder."
            )


def config_to_json(config: LoraConfig) -> str:
    """peft's adapter_config.json, keys sorted."""
    values = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    values["inference_mode"] = True
    return json.dumps(values, indent=2, sort_keys=True, default=str)


@dataclass(frozen=True, slots=True)
class FullPayload(WeightPayload):
    """All parameters of a model by transformers' names, tied ones once; `config_json` names the model that they
    began as."""

    KIND: ClassVar[str] = "Weight"
    FOLDER: ClassVar[str] = "weights"
    TENSORS: ClassVar[str] = "model.safetensors"
    CONFIG: ClassVar[str] = "full_weights.json"

    @classmethod
    def build(cls, version: int, state: Mapping[str, Tensor], base: str, dtype: str | None = None) -> FullPayload:
        """Pack parameters, rounded where `dtype` is given; `base` is the model that training began with."""
        about = json.dumps({"format": "rl_vlm full weights", "base_model": base}, indent=1)
        return cls.packed(version, state, about, dtype)

    @classmethod
    def digest(cls, content: bytes | memoryview) -> str:
        """See WeightPayload; of gigabytes, by several threads."""
        return tree_digest(content)

    @classmethod
    def read(cls, folder: Path, version: int, policy: str = POLICY) -> FullPayload:
        """Read what `write` wrote. Raises UserInputError."""
        try:
            tensors, config_json = (folder / cls.TENSORS).read_bytes(), (folder / cls.CONFIG).read_text()
        except OSError as error:
            raise UserInputError(f"{folder} holds no full weights of a run ({error}).") from error
        try:
            names = _names_in(tensors)
        except (ValueError, TypeError, RecursionError) as error:
            raise UserInputError(f"The weights {folder} cannot be read ({error}).") from error
        if not names:
            raise UserInputError(f"The weights {folder} hold no tensors: {cls.TENSORS} is empty or damaged.")
        return cls(version, tensors, config_json, cls.digest(tensors), policy)


def check_fits(state: Mapping[str, Tensor], own: Mapping[str, Tensor], what: str) -> None:
    """Raise UserInputError, about `what`, unless `state` holds a finite tensor of the same shape for each of `own`,
    and no other."""
    import torch

    if state.keys() != own.keys():
        example = sorted(state.keys() ^ own.keys())[0]
        raise UserInputError(f"{what} does not fit the model: tensors differ, for example {example}.")
    for name, tensor in state.items():
        if tensor.shape != own[name].shape:
            shapes = f"{name} is {tuple(tensor.shape)}, expected {tuple(own[name].shape)}"
            raise UserInputError(f"{what} does not fit the model: {shapes}.")
        if not torch.isfinite(tensor.sum(dtype=torch.float32)):  # finite where all values are, and one pass
            raise UserInputError(f"{what} has values that are not finite, in {name}.")


def put_weights(model: nn.Module, payload: WeightPayload) -> None:
    """Copy a version into a model, rounded to its precision. Raises UserInputError for one that does not fit."""
    own, state = dict(model.named_parameters()), payload.state()
    check_fits(state, own, f"Weight version {payload.version}")
    for name, parameter in own.items():
        parameter.data.copy_(state[name])


# What a run trained, as it lies in a folder: an adapter in peft's format, or all weights.

_KINDS: tuple[type[AdapterPayload] | type[FullPayload], ...] = (AdapterPayload, FullPayload)


def read_payload(folder: Path, version: int, policy: str = POLICY) -> WeightPayload:
    """Read the version in a folder, of whichever kind it is. Raises UserInputError."""
    return _kind_of(folder).read(folder, version, policy)


def tensors_file(folder: Path) -> Path:
    """The file with the tensors in such a folder."""
    return folder / _kind_of(folder).TENSORS


def _kind_of(folder: Path) -> type[AdapterPayload] | type[FullPayload]:
    return FullPayload if is_full(folder) else AdapterPayload


def is_full(folder: Path) -> bool:
    """Whether a folder holds all weights of a model as a run keeps them, not an adapter."""
    return (folder / FullPayload.CONFIG).is_file()


def trained_folder(run_dir: Path) -> Path | None:
    """The folder inside a run (or a checkpoint) that holds what was trained; None where there is none."""
    folders = (run_dir / kind.FOLDER for kind in _KINDS if (run_dir / kind.FOLDER / kind.CONFIG).is_file())
    return next(folders, None)


def find_trained(adapter: Path | None, run_dir: Path | None) -> Path | None:
    """The folder of trained weights that a command names directly or by its run folder; None: the base model.

    Raises UserInputError when both are named, or what is named holds neither an adapter nor full weights.
    """
    if adapter is not None and run_dir is not None:
        raise UserInputError("--adapter and --run-dir both name an adapter: give one of them.")
    if run_dir is not None:
        return trained_folder(run_dir) or _refuse(run_dir / AdapterPayload.FOLDER)
    if adapter is not None and not is_full(adapter) and not (adapter / AdapterPayload.CONFIG).is_file():
        return _refuse(adapter)
    if adapter is not None and not is_full(adapter):
        adapter_config(adapter, (adapter / AdapterPayload.CONFIG).read_text())  # now, not when replicas have started
    return adapter


def _refuse(folder: Path) -> Path:
    raise UserInputError(f"{folder} is not a peft adapter folder: it holds no {AdapterPayload.CONFIG}.")


# The adapter that training starts from (`model.adapter`): found, and compared with the LoRA that the configuration
# describes.


def initial_adapter(model: TrainedModelSection, version: int = 1) -> AdapterPayload:
    """The adapter that `model.adapter` names, as a version. Raises UserInputError where it is not what `model.lora`
    describes."""
    check_initial_adapter(model)
    return AdapterPayload.read(initial_adapter_folder(model), version)


def initial_adapter_folder(model: TrainedModelSection) -> Path:
    """The folder of that adapter, which a run folder has inside. Raises UserInputError."""
    assert model.adapter is not None
    folder = Path(model.adapter)
    for candidate in (folder, folder / "adapter"):
        if (candidate / "adapter_config.json").is_file():
            return candidate
    raise UserInputError(
        f"model.adapter: {folder} is neither a peft adapter folder nor a run folder with an adapter/: it holds no "
        "adapter_config.json."
    )


def check_initial_adapter(model: TrainedModelSection) -> dict[str, Any]:
    """Compare rank, alpha and layers of `model.adapter` with `model.lora`, from headers alone.

    Returns what was found, to be printed; nothing without an adapter. Raises UserInputError, which says what to set.
    """
    if model.adapter is None:
        return {}
    from rl_vlm.models.lora import target_choice  # imports torch, which a dry run without an adapter does not need

    folder = initial_adapter_folder(model)
    try:
        config = json.loads((folder / "adapter_config.json").read_text())
        rank, alpha = int(config["r"]), config["lora_alpha"]
        with safe_open(folder / "adapter_model.safetensors", framework="numpy") as file:
            names = list(file.keys())
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise UserInputError(f"model.adapter: {folder} is no readable LoRA adapter ({error}).") from error
    check_plain_lora(folder, config)
    if config.get("use_rslora"):
        raise UserInputError(f"model.adapter: {folder} was made with use_rslora, which training cannot continue.")
    modules = [
        name.removeprefix(PREFIX).removesuffix(".lora_A.weight") for name in names if name.endswith(".lora_A.weight")
    ]
    wanted = model.lora
    target_modules = target_choice(modules, wanted.target_modules)
    if (rank, alpha, target_modules) != (wanted.rank, wanted.alpha, wanted.target_modules):
        advice = f"model.lora='{{rank: {rank}, alpha: {alpha}, target_modules: {target_modules}}}'"
        what = f"rank {rank}, alpha {alpha} and target_modules {target_modules or 'of its own'}"
        raise UserInputError(
            f"model.adapter: {folder} has {what}, and model.lora says {wanted.rank}, {wanted.alpha} and "
            f"{wanted.target_modules}: "
            f"{f'set {advice}' if target_modules else 'train an adapter with one of our choices'}."
        )
    return {"adapter": str(folder)}
