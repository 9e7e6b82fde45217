"""A digest of a model folder, which tells two models apart without reading gigabytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

_WEIGHTS = ".safetensors"
_OTHER_WEIGHTS = ".bin"  # read by transformers where there are no safetensors
_TEXT = (".json", ".jinja", ".txt")
_LARGEST_TEXT = 32 << 20  # bytes; what is larger is no configuration, tokenizer or template

# Of each tensor, thrice: a merged adapter changes every matrix, but in 16 bits not every number.
_PIECE_BYTES = 4096
_PLACES = 256  # in files whose tensors are not known
_LARGEST_HEADER = 100_000_000  # bytes, as safetensors has it


def hash_model(folder: Path) -> str:
    """A hash of a model folder: of the contents of the text files, and of each weight file the header and some of each tensor.

    A few KiB of each tensor's beginning, middle and end count: a merged adapter or a trained model is told from its base, an edit
    of single numbers is not. Takes milliseconds for gigabytes. Raises OSError.
    """
    found = hashlib.sha256()
    for name in _text_files(folder):
        _add(found, name, (folder / name).read_bytes())
    weights = sorted(folder.glob(f"*{_WEIGHTS}")) or sorted(folder.glob(f"*{_OTHER_WEIGHTS}"))
    for file in weights:
        for piece in _pieces(file):
            _add(found, file.name, piece)
    return found.hexdigest()[:16]


def _text_files(folder: Path) -> list[str]:
    """Names of the files of a model's text side and configuration, in order. Raises OSError."""
    return sorted(
        path.name
        for path in folder.iterdir()
        if path.suffix in _TEXT
        and not path.name.startswith(".")
        and path.is_file()
        and path.stat().st_size <= _LARGEST_TEXT
    )


def _add(found: hashlib._Hash, name: str, content: bytes) -> None:
    found.update(f"{name} {len(content)}\n".encode())
    found.update(content)


def _pieces(file: Path) -> Iterator[bytes]:
    """The size, the header and parts of the tensors of a weight file."""
    size = file.stat().st_size
    yield str(size).encode()
    with file.open("rb", buffering=_PIECE_BYTES) as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = stream.read(length) if length <= min(_LARGEST_HEADER, size) else b""
        yield header
        spans = _tensor_spans(header, 8 + length, size)
        for begin, end in spans or _even_spans(size):
            if end - begin <= 3 * _PIECE_BYTES:
                starts, count = [begin], end - begin
            else:
                starts, count = [begin, (begin + end) // 2, end - _PIECE_BYTES], _PIECE_BYTES
            for start in starts:
                stream.seek(start)
                yield stream.read(count)


def _tensor_spans(header: bytes, start: int, size: int) -> list[tuple[int, int]]:
    """Where the tensors of a safetensors file begin and end, in order; none for a file that is no such file."""
    try:
        entries = json.loads(header)
        found = [entries[name]["data_offsets"] for name in entries if name != "__metadata__"]
        spans = sorted((start + int(begin), start + int(end)) for begin, end in found)
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
    return spans if all(start <= begin <= end <= size for begin, end in spans) else []


def _even_spans(size: int) -> list[tuple[int, int]]:
    return [(size * place // _PLACES, size * (place + 1) // _PLACES) for place in range(_PLACES)]
