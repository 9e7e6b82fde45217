"""Where conversations come from: JSON lines, parquet, image folders, the hub's cache, and installed packages."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from rl_vlm.envs.data import BadRowError, Rows, RowTable, local_files, open_table, split_slice
from rl_vlm.files import write_atomic
from rl_vlm.registry import provided
from rl_vlm.safe_text import one_line
from rl_vlm.supervised.conversations import CONVERSATIONS, Conversation
from rl_vlm.types import Split, UserInputError

BUILTIN_GROUP = "rl_vlm.conversations"  # entry points: a class of `Rows` that takes the split
_METADATA = "metadata.jsonl"


class JsonLinesRows(Rows):
    """The lines of a .jsonl file; only their places are kept in memory. Empty lines are passed over."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._places: list[tuple[int, int]] = []  # (line number from 1, offset)
        try:
            with path.open("rb") as file:
                offset = 0
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        self._places.append((number, offset))
                    offset += len(line)
        except OSError as error:
            raise UserInputError(f"Cannot read {path}: {error.strerror or error}.") from error

    def __len__(self) -> int:
        return len(self._places)

    def row(self, index: int) -> dict[str, Any]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._places[index][1])
                row = json.loads(file.readline())
        except (OSError, ValueError, RecursionError) as error:
            raise BadRowError(f"{self.where(index)}: not JSON ({one_line(error)}).") from error
        if not isinstance(row, dict):
            raise BadRowError(f"{self.where(index)}: a {type(row).__name__} and not an object with `messages`.")
        return row

    def where(self, index: int) -> str:
        return f"{self._path}, line {self._places[index][0]}"

    def folder(self, index: int) -> Path:
        return self._path.parent


def open_conversations(source: str, split: Split) -> RowTable[Conversation]:
    """Open a source, with an optional slice `source@[a:b]`. Raises UserInputError."""
    name = split_slice(source)[0]
    path = Path(name).expanduser()
    lines = path if path.suffix == ".jsonl" else _jsonl_of(path, split)
    if lines is not None:
        rows: Rows = JsonLinesRows(lines)
    elif not path.exists() and name in provided(BUILTIN_GROUP):
        rows = builtin_rows(name, split)
    else:
        return open_table(CONVERSATIONS, source, split)
    return RowTable(CONVERSATIONS, rows, source, split)


def has_split(source: str, split: Split) -> bool:
    """Whether a local or built-in source has conversations of its own for a split."""
    path = Path(split_slice(source)[0]).expanduser()
    if path.is_dir():
        with suppress(UserInputError):
            return bool(_jsonl_of(path, split) or local_files(path, split))
    return not path.exists() and str(path) in provided(BUILTIN_GROUP)


def builtin_rows(name: str, split: Split) -> Rows:
    return provided(BUILTIN_GROUP)[name].load()(split)  # type: ignore[no-any-return]


def _jsonl_of(folder: Path, split: Split) -> Path | None:
    """`train.jsonl`, or the metadata.jsonl of an image folder, whose own is its train split."""
    candidates = [folder / f"{split}.jsonl", folder / split / _METADATA]
    if split == "train":
        candidates.append(folder / _METADATA)
    return next((path for path in candidates if path.is_file()), None)


# The built-in conversations as files: an example of the form that data of one's own takes.

EXAMPLE = "shapes"
SPLITS: tuple[Split, ...] = ("train", "test")


def write_example(folder: Path) -> dict[str, int]:
    """Write train.jsonl, test.jsonl and images/. Returns conversations per split. Raises UserInputError."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserInputError(f"{folder} exists and is not an empty folder: choose another.")
    counts: dict[str, int] = {}
    try:
        (folder / "images").mkdir(parents=True, exist_ok=True)
        for split in SPLITS:
            rows = builtin_rows(EXAMPLE, split)
            lines = []
            for index in range(len(rows)):
                row = rows.row(index)
                names = [f"images/{split}-{index:03d}-{k}.png" for k in range(len(row["images"]))]
                for name, content in zip(names, row["images"], strict=True):
                    (folder / name).write_bytes(content)
                lines.append(json.dumps({"messages": row["messages"], "images": names}) + "\n")
            write_atomic(folder / f"{split}.jsonl", "".join(lines))
            counts[split] = len(rows)
    except OSError as error:
        raise UserInputError(f"Cannot write {folder}: {error.strerror or error}.") from error
    return counts
