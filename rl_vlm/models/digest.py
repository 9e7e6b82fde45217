"""A digest of a model folder, which tells two models apart without reading gigabytes."""

from __future__ import annotations

import hashlib
from pathlib import Path

_WEIGHTS = ".safetensors"
_OTHER_WEIGHTS = ".bin"  # read by transformers where there are no safetensors
_TEXT = (".json", ".jinja", ".txt")
_LARGEST_TEXT = 32 << 20  # bytes; what is larger is no configuration, tokenizer or template

# Of a file of weights: pieces at places that are evenly spread. A merged adapter changes every matrix, but in 16 bits
# not every number.
_PIECE_BYTES, _PIECES = 4096, 1024


def hash_model(folder: Path) -> str:
    """A hash of a model folder: of the contents of its text files, and of some of each weight file.

    4 MiB of each weight file count, its header among them: a merged adapter or a trained model is told from its base,
    an edit of single numbers is not. Takes milliseconds for gigabytes. Raises OSError.
    """
    digest = hashlib.sha256()
    text_files = sorted(
        path
        for path in folder.iterdir()
        if path.suffix in _TEXT
        and not path.name.startswith(".")
        and path.is_file()
        and path.stat().st_size <= _LARGEST_TEXT
    )
    for file in text_files:
        _add(digest, file.name, file.read_bytes())
    for file in sorted(folder.glob(f"*{_WEIGHTS}")) or sorted(folder.glob(f"*{_OTHER_WEIGHTS}")):
        size = file.stat().st_size
        _add(digest, file.name, str(size).encode())
        with file.open("rb", buffering=_PIECE_BYTES) as stream:
            for number in range(_PIECES):
                stream.seek(max(size - _PIECE_BYTES, 0) * number // (_PIECES - 1))
                _add(digest, file.name, stream.read(_PIECE_BYTES))
    return digest.hexdigest()[:16]


def _add(digest: hashlib._Hash, name: str, content: bytes) -> None:
    digest.update(f"{name} {len(content)}\n".encode())
    digest.update(content)
