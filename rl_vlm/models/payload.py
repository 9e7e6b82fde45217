"""WeightPayload: one immutable version of what is trained, as bytes and as a folder; an adapter, or all weights.

torch is imported only where tensors are needed, so that the registry, which only passes bytes on, starts fast.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from rl_vlm.files import replace_folder
from rl_vlm.models.tensor_bytes import pack
from rl_vlm.types import POLICY, UserInputError

if TYPE_CHECKING:
    from torch import Tensor

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # by safetensors' names


@dataclass(frozen=True, slots=True)
class WeightPayload:
    """One immutable version of a policy: safetensors bytes, what they are as JSON, and a SHA-256 of the bytes (see `digest`).

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
        """Pack tensors by name, rounded to `dtype` such as bfloat16 where it is given, before they leave their device."""
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
        """The tensors by name. Raises UserInputError when the bytes are no safetensors file."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            return load(bytes(self.tensors))  # no copy where they are bytes
        except SafetensorError as error:
            raise UserInputError(f"{self.KIND} version {self.version} is corrupt ({error}).") from error

    def views(self) -> dict[str, Tensor]:
        """The tensors by name as views of the bytes, not to be written to. Raises as `state` does."""
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
            raise UserInputError(f"{self.KIND} version {self.version} is corrupt ({error!r}).") from error
        return found

    def rounded(self, dtype: str) -> Self:
        """The same version with its tensors rounded to `dtype`, such as bfloat16: half the bytes, and a hash of its own.

        Raises as `state` does.
        """
        import torch

        kind, own = getattr(torch, dtype), self.views()
        if all(tensor.dtype == kind for tensor in own.values()):
            return self
        content = pack(own, dtype)
        return replace(self, tensors=content, sha256=self.digest(content))

    def write(self, folder: Path) -> Path:
        """Write the folder with both files, atomically: it appears complete or not at all. Other files in it stay, such as a model card."""
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
    held = tensors if isinstance(tensors, bytes) else memoryview(tensors)
    return kind(version, held, config_json, sha256, policy)
