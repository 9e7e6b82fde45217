"""Tensors as the bytes of a safetensors file, in memory or written one by one, and a digest that several threads compute.

safetensors' own functions copy every tensor twice, in one thread, and hold all copies at once. For all weights of a model that took
longer than the rest of a publication together. The bytes are the same.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor, dtype

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
    """The bytes of a safetensors file, read-only, of tensors on any device, each rounded there to `dtype` where it is given.

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
    """Write a safetensors file, tensor after tensor, to the disk itself: memory for one of them is enough. Raises OSError."""
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
