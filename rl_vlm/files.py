"""Atomic writing of files and folders, the cache folder, locks between processes, and values as plain JSON types."""

from __future__ import annotations

import contextlib
import csv
import difflib
import errno
import fcntl
import io
import math
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from rl_vlm.types import UserInputError

_DRAFT, _ASIDE = ".writing-", ".replaced-"  # prefixes of folders that `replace_folder` makes


def write_atomic(path: str | Path, data: bytes | str) -> None:
    """Replace the file by `data`, on the disk when this returns; a reader or a crash sees old or new content."""
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


@contextlib.contextmanager
def replace_folder(target: Path, kept: Callable[[Path], Iterable[str]] = lambda old: ()) -> Iterator[Path]:
    """A draft folder, which takes the place of `target` at the end: a reader sees the old folder or the new one. `kept`
    names entries of the old folder that the new one keeps; it may raise an error to stop that."""
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f"{_ASIDE}{target.name}")
    draft = Path(tempfile.mkdtemp(prefix=f"{_DRAFT}{target.name}-", dir=target.parent))
    draft.chmod(0o755)  # mkdtemp makes it readable for its owner only
    try:
        yield draft
        _put_back(aside)  # of a writer that was killed
        if target.exists():
            for name in kept(target):
                link_tree(target / name, draft / name)
            os.replace(target, aside)
        os.replace(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        _put_back(aside)


def clean_leftovers(parent: Path, name: str = "") -> None:
    """Delete what a killed `replace_folder` left in `parent`, for `name` alone, and put back what it was to replace."""
    for draft in parent.glob(f"{_DRAFT}{name}*"):
        shutil.rmtree(draft, ignore_errors=True)
    for aside in parent.glob(f"{_ASIDE}{name}*"):
        _put_back(aside)


def _put_back(aside: Path) -> None:
    """A folder that was moved aside goes back where nothing has taken its place, and is deleted otherwise."""
    target = aside.with_name(aside.name.removeprefix(_ASIDE))
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
    elif aside.exists():
        os.replace(aside, target)


def link_tree(source: Path, target: Path) -> None:
    """The file or folder `source` as `target`, as hard links where possible; files that are there stay."""
    if source.is_dir():
        shutil.copytree(source, target, copy_function=_link, dirs_exist_ok=True)
    elif os.path.lexists(source):
        target.parent.mkdir(parents=True, exist_ok=True)
        _link(str(source), str(target))


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except FileExistsError:
        return
    except OSError:  # another file system, or one without links
        if not os.path.lexists(target):
            partial = f"{target}.partial"
            shutil.copy2(source, partial, follow_symlinks=False)
            os.replace(partial, target)


def open_own(path: str | Path) -> BinaryIO:
    """Open a file for appending, unbuffered. Raises UserInputError for a symbolic link, which may lead anywhere."""
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


def did_you_mean(path: Path, pattern: str = "*") -> str:
    """A sentence about what there is in place of a path that is not there, with a blank before it: a name like it, or
    what the deepest folder of the path holds that is there."""
    there = next(folder for folder in path.absolute().parents if folder.is_dir())
    lacking = path.absolute().relative_to(there).parts[0]
    if there == path.absolute().parent:
        there = path.parent
    else:
        pattern = "*/"
    if lacking == "runs":
        here = there.absolute()
        return f" There is no folder runs in {here}: go to where you trained, or `rl-vlm train quickstart` first."
    names = sorted(one.name for one in there.glob(pattern) if not one.name.startswith("."))
    stems = {Path(name).stem: name for name in reversed(names)}
    if near := difflib.get_close_matches(Path(lacking).stem, stems, n=1):
        return f" Did you mean {there / stems[near[0]]}?"
    if not names:
        what = {"*": "nothing", "*/": "no folder"}.get(pattern, f"no file {pattern}")
        return f" There is {what} in {there.absolute()}."
    return f" In {there.absolute()} are: {', '.join(names[:10])}{', ...' * (len(names) > 10)}."


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


class AppendedFile:
    """A file that is appended to. What a full disk did not take is kept, and written with the next entry."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pending: list[bytes] = []

    def add(self, data: bytes = b"") -> None:
        """Append `data` after what is pending. Raises OSError."""
        if data:
            self.pending.append(data)
        if self.pending:
            append_whole(self.path, b"".join(self.pending))
            self.pending.clear()

    def lines(self) -> list[bytes]:
        """All lines without their ends, the pending ones included."""
        return whole_lines(self.path) + b"".join(self.pending).split(b"\n")[:-1]


def cut_lines(path: Path, place: Callable[[bytes], int], last: int, head: int = 0) -> None:
    """Keep the first `head` lines, and those whose `place` is `last` at most; damaged lines, of which it raises, go."""
    lines, kept = whole_lines(path), []
    for line in lines[head:]:
        with contextlib.suppress(ValueError, TypeError, LookupError):
            if place(line) <= last:
                kept.append(line)
    if not kept:
        path.unlink(missing_ok=True)
    elif path.stat().st_size > sum(len(line) + 1 for line in lines[:head] + kept):
        write_atomic(path, b"\n".join([*lines[:head], *kept, b""]))


def csv_lines(rows: Iterable[Sequence[Any]]) -> bytes:
    """Rows as lines of CSV; lone surrogates become question marks."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    return buffer.getvalue().encode("utf-8", "replace")


def cache_place() -> Path:
    return Path(os.environ.get("RL_VLM_CACHE") or Path.home() / ".cache" / "rl_vlm").expanduser()


def cache_folder() -> Path:
    """The folder of what is built once and used by every run, which is made."""
    folder = cache_place()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserInputError(f"The cache folder {folder} cannot be made ({error}): set RL_VLM_CACHE.") from error
    return folder


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock in the cache, which ends with its holder. Raises UserInputError where the cache takes no more."""
    try:
        path.write_bytes(b"\0" * 65536)  # a disk that is full may still take an empty file
        file = path.open("w")
    except OSError as error:
        raise UserInputError(f"The cache folder {path.parent} cannot be used ({error}): set RL_VLM_CACHE.") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def built_once(name: str, build: Callable[[Path], object]) -> Path:
    """The folder of that name in the cache, which `build` makes on first use, complete or not at all. Of many processes
    at once one builds, and the others wait."""
    folder = cache_folder() / name
    if not folder.is_dir():
        with locked(folder.with_name(f"{name}.lock")):
            if not folder.is_dir():  # another process may have built it meanwhile
                clean_leftovers(folder.parent, name)  # of a build that was killed
                build(folder)
    return folder


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
