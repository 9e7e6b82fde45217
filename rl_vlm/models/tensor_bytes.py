"""Tensors as the bytes of a safetensors file, equal for equal tensors, and the digest of many bytes.

torch is imported only where tensors are needed, so that the registry, which passes bytes on, starts fast.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, dtype

PIECE = 16 << 20  # bytes that one thread hashes at a time
_MAX_THREADS = 16
# safetensors' names of types, and the order in which it writes them, backwards.
TYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "float16": "F16", "bfloat16": "BF16", "int32": "I32",
    "float32": "F32", "float64": "F64", "int64": "I64",
}  # fmt: skip


def pack(
    state: Mapping[str, Tensor], dtype: str | None = None, target: memoryview | None = None
) -> tuple[memoryview, str]:
    """The bytes of a safetensors file, read-only, of tensors on any device, rounded there to `dtype` where it is given;
    and their `tree_digest`. Equal tensors give equal bytes. `target`: where the bytes go, `packed_size` of them; else
    into new memory. Raises ValueError for a type that is not in TYPES."""
    import torch

    header, places = _layout(state, dtype)
    size = len(header) + _end(places)
    content = torch.empty(size, dtype=torch.uint8) if target is None else torch.frombuffer(target, dtype=torch.uint8)
    content[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    body, packed = content[len(header) :], content.numpy().data.toreadonly()
    digest = _TreeDigest(packed)
    for name, (begin, end, kind) in places.items():
        body[begin:end].view(kind).view(state[name].shape).copy_(_whole(state[name].detach(), kind))
        digest.filled_to(len(header) + end)
    return packed, digest.result()


def packed_size(state: Mapping[str, Tensor], dtype: str | None = None) -> int:
    """How many bytes `pack` makes of such tensors, whose shapes and types alone are read."""
    header, places = _layout(state, dtype)
    return len(header) + _end(places)


def _end(places: Mapping[str, tuple[int, int, dtype]]) -> int:
    return max((end for _, end, _ in places.values()), default=0)


def take_part_in_packing(state: Mapping[str, Tensor], dtype: str | None = None) -> None:
    """What the other processes do that hold shards of the tensors that one of them packs."""
    for name, (_, _, kind) in _layout(state, dtype)[1].items():
        _whole(state[name].detach(), kind)


def _whole(tensor: Any, kind: dtype) -> Tensor:
    """The tensor itself; one that is divided among processes (a DTensor) is gathered in its type to be."""
    return tensor.to(kind).full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]


def write_tensors(path: Path, state: Mapping[str, Tensor]) -> None:
    """Write a safetensors file to the disk itself, with memory for one tensor at a time. Raises OSError."""
    import torch

    header, places = _layout(state)
    with path.open("wb") as file:
        file.write(header)
        for name in places:
            plain = state[name].detach().to("cpu").contiguous()
            file.write(plain.reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def tree_digest(content: bytes | memoryview) -> str:
    """SHA-256 in hexadecimal; of more than PIECE bytes, that of the SHA-256s of their pieces, which threads compute."""
    return _TreeDigest(memoryview(content)).result()


class _TreeDigest:
    """The digest of bytes that are filled in from first to last, while threads hash the pieces that are full."""

    def __init__(self, view: memoryview) -> None:
        self._view, self._pieces = view, list[Future[bytes]]()
        self._threads = ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1))

    def filled_to(self, end: int) -> None:
        self._hash_until(end - PIECE + 1)

    def _hash_until(self, stop: int) -> None:
        for start in range(len(self._pieces) * PIECE, stop, PIECE):
            self._pieces.append(self._threads.submit(_sha256, self._view[start : start + PIECE]))

    def result(self) -> str:
        """Of all bytes, which are there now."""
        if len(self._view) <= PIECE:
            return _sha256(self._view).hex()
        self._hash_until(len(self._view))
        with self._threads:
            return _sha256(b"".join(piece.result() for piece in self._pieces)).hex()


def _sha256(content: bytes | memoryview) -> bytes:
    return hashlib.sha256(content).digest()


def file_digest(path: Path) -> str:
    """`tree_digest` of a file's content. Raises OSError, and ValueError for an empty file."""
    return tree_digest(mapped(path))


def mapped(path: Path, writable: bool = False) -> memoryview:
    with path.open("r+b" if writable else "rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ))


def _layout(state: Mapping[str, Tensor], dtype: str | None = None) -> tuple[bytes, dict[str, tuple[int, int, dtype]]]:
    """The header with its length before it, and by name, in order, begin, end and type of its bytes behind it."""
    import torch

    kinds = {name: tensor.dtype if dtype is None else getattr(torch, dtype) for name, tensor in state.items()}
    names = {name: str(kind).removeprefix("torch.") for name, kind in kinds.items()}
    order, end = [*TYPES], 0
    entries: dict[str, Any] = {}
    for name in sorted(state, key=lambda name: (-order.index(names[name]), name)):
        begin, end = end, end + state[name].numel() * kinds[name].itemsize
        entries[name] = {"dtype": TYPES[names[name]], "shape": [*state[name].shape], "data_offsets": [begin, end]}
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    places = {name: (*entry["data_offsets"], kinds[name]) for name, entry in entries.items()}
    return len(header).to_bytes(8, "little") + header, places


def read_header(tensors: bytes | memoryview) -> tuple[int, dict[str, Any]]:
    """Where the tensors' bytes begin, and type, shape and place of each by name. Raises ValueError, TypeError and
    RecursionError for a damaged header."""
    start = 8 + int.from_bytes(tensors[:8], "little")
    header = dict(json.loads(bytes(tensors[8:start])))
    header.pop("__metadata__", None)
    return start, header
