"""Atomic writing of files, the cache folder, locks between processes, and conversion of values to plain JSON types."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from rl_vlm.types import UserInputError


def write_atomic(path: str | Path, data: bytes | str) -> None:
    """Replace the file by `data` (text as UTF-8), so that a reader or a crash sees the old or the new content.

    The data is on the disk when this returns. On failure the old file stays and nothing else is left behind.
    """
    path = Path(path)
    content = data.encode("utf-8", "replace") if isinstance(data, str) else data
    # Not mkstemp, which makes files readable for their owner only.
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def open_own(path: str | Path) -> BinaryIO:
    """Open a file for appending, unbuffered, unless it is a symbolic link: who may write into a folder could otherwise make
    us write to any file of ours. Raises UserInputError for a link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return cast(BinaryIO, open(os.open(path, flags, 0o666), "ab", buffering=0))
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise UserInputError(
            f"{path} is a symbolic link, and rl-vlm writes to files of its own only: remove it."
        ) from error


def resolved(path: str | Path) -> Path:
    """The absolute path behind ~ and symbolic links. Raises UserInputError for links in a circle and unknown users."""
    try:
        return Path(path).expanduser().resolve()
    except (OSError, RuntimeError) as error:
        raise UserInputError(f"The path {path} leads nowhere ({error}): correct it.") from error


def append_whole(path: str | Path, data: bytes) -> None:
    """Append `data`, or leave the file as it was: a full disk never leaves a part of a line."""
    # Unbuffered, so that the failure appears here and not when the file is closed.
    with open_own(path) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) :]
        except BaseException:
            file.truncate(size)
            raise


def whole_lines(path: str | Path) -> list[bytes]:
    """The lines of a file without their ends; none if there is no file. A last line that was cut short is left out."""
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        return []
    return content.split(b"\n")[:-1]


def cache_place() -> Path:
    """What `cache_folder` makes."""
    return Path(os.environ.get("RL_VLM_CACHE") or Path.home() / ".cache" / "rl_vlm").expanduser()


def cache_folder() -> Path:
    """The folder of what is built once and used by every run: `~/.cache/rl_vlm`, or what RL_VLM_CACHE names. It is made."""
    folder = cache_place()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserInputError(f"The cache folder {folder} cannot be made ({error}): set RL_VLM_CACHE.") from error
    return folder


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes; the system frees it when its holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def to_jsonable(value: Any) -> Any:
    """`value` in JSON's own types: numpy becomes plain, nan and infinity become null, what is unknown its text."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return str(value).encode("utf-8", "replace").decode()  # lone surrogates are no UTF-8
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(to_jsonable(key)): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_jsonable(item) for item in value]
    if isinstance(value, set | frozenset):
        return [to_jsonable(item) for item in sorted(value, key=str)]
    if isinstance(value, np.ndarray):
        return to_jsonable(value.tolist())
    if isinstance(value, np.bool_ | np.integer | np.floating):
        return to_jsonable(value.item() if not isinstance(value, np.longdouble) else float(value))
    if is_dataclass(value) and not isinstance(value, type):
        return to_jsonable(asdict(value))
    return to_jsonable(str(value))
