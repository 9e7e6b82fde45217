"""Where conversations come from: JSON lines, parquet, image folders, the hub's cache, and what packages provide, such
as the built-in `shapes`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from rl_vlm.envs.data import HUB_NAME, BadRowError, file_rows, hub_rows, local_files, split_slice
from rl_vlm.envs.images import one_line
from rl_vlm.files import write_atomic
from rl_vlm.registry import provided
from rl_vlm.supervised.conversations import Conversation, read_conversation
from rl_vlm.types import Split, UserInputError

BUILTIN_GROUP = "rl_vlm.conversations"  # entry points: a class of `Rows` that takes the split
_COLUMNS, _OPTIONAL = ("messages",), ("images", "tools")
_METADATA = "metadata.jsonl"
_MAX_LINE = 256 * 2**20  # bytes


class Rows(Protocol):
    """Rows by number, each with its place in words and the folder of its image paths."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> dict[str, Any]:
        """Row `index`. Raises BadRowError."""
        ...

    def where(self, index: int) -> str:
        """File and line in words."""
        ...

    def folder(self, index: int) -> Path | None:
        """The folder that image paths are relative to; None: there is none."""
        ...


class JsonLinesRows:
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
        """Line `index` of those that are not empty."""
        _, offset = self._places[index]
        try:
            with self._path.open("rb") as file:
                file.seek(offset)
                line = file.readline(_MAX_LINE + 1)
            if len(line) > _MAX_LINE:
                raise BadRowError(f"{self.where(index)}: longer than {_MAX_LINE} bytes.")
            row = json.loads(line)
        except (OSError, ValueError, RecursionError) as error:
            raise BadRowError(f"{self.where(index)}: not JSON ({one_line(error)}).") from error
        if not isinstance(row, dict):
            raise BadRowError(f"{self.where(index)}: a {type(row).__name__} and not an object with `messages`.")
        return row

    def where(self, index: int) -> str:
        """File and line in words."""
        return f"{self._path}, line {self._places[index][0]}"

    def folder(self, index: int) -> Path:
        """The folder of the file."""
        return self._path.parent


class ConversationTable:
    """A sequence of conversations; a row is read and checked when it is asked for."""

    def __init__(self, rows: Rows, selected: range, name: str) -> None:
        self.name = name
        self._rows = rows
        self.selected = selected  # rows of the file

    def __len__(self) -> int:
        return len(self.selected)

    def __getitem__(self, index: int) -> Conversation:
        """Conversation `index`; IndexError outside the table, BadRowError that names file and line if it is not
        usable."""
        row = self.selected[index]
        return read_conversation(self._rows.row(row), self._rows.where(row), self._rows.folder(row))

    def __iter__(self) -> Iterator[Conversation]:
        return (self[index] for index in range(len(self)))


def open_conversations(source: str, split: Split) -> ConversationTable:
    """Open a source, with an optional slice `source@[a:b]`. A single file holds one split, whichever is asked for.

    Raises UserInputError if there is no such source or it selects nothing.
    """
    path_text, selected = split_slice(source)
    rows = _rows(path_text, split)
    chosen = range(len(rows))[selected]
    if not chosen:
        raise UserInputError(f"{source} selects none of the {len(rows)} conversations of its {split} split.")
    return ConversationTable(rows, chosen, f"{source} ({split})" if not Path(path_text).is_file() else source)


def has_split(source: str, split: Split) -> bool:
    """Whether a source that is no single file has conversations of its own for a split; of the hub's it is not
    known."""
    path = Path(split_slice(source)[0]).expanduser()
    if not path.exists() and str(path) in provided(BUILTIN_GROUP):
        return True
    if not path.is_dir():
        return False
    return _jsonl_of(path, split) is not None or any(
        list(folder.glob(f"{split}.parquet")) + list(folder.glob(f"{split}-*.parquet"))
        for folder in (path, path / "data")
    )


def _rows(name: str, split: Split) -> Rows:
    path = Path(name).expanduser()
    if path.is_dir():
        found = _jsonl_of(path, split)
        return JsonLinesRows(found) if found else file_rows(local_files(path, split), _COLUMNS, _OPTIONAL)
    if path.is_file():
        if path.suffix == ".parquet":
            return file_rows([path], _COLUMNS, _OPTIONAL)
        if path.suffix != ".jsonl":
            raise UserInputError(f"{path} is neither .jsonl nor .parquet: conversations are read from these.")
        return JsonLinesRows(path)
    if name in provided(BUILTIN_GROUP):
        return builtin_rows(name, split)
    if not HUB_NAME.fullmatch(name) or path.suffix in (".jsonl", ".parquet"):
        raise UserInputError(f"There is no file or folder {name!r}, and it is no name of a data set on the hub.")
    return hub_rows(name, split, _COLUMNS, _OPTIONAL)


def builtin_rows(name: str, split: Split) -> Rows:
    """One split of a data set that an installed package provides."""
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
    """Write train.jsonl, test.jsonl and the drawings in images/. Returns conversations per split.

    Raises UserInputError for a folder that holds anything.
    """
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
