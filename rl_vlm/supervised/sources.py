"""Where conversations come from: JSON lines, parquet, image folders, the hub's cache, and installed packages."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from rl_vlm.envs.data import DataTable, local_files, open_table, other_file, split_slice
from rl_vlm.envs.rows import JsonLinesRows, Rows
from rl_vlm.files import write_atomic
from rl_vlm.registry import provided
from rl_vlm.supervised.conversations import CONVERSATIONS, SFTConversation
from rl_vlm.types import Split, UserInputError

BUILTIN_GROUP = "rl_vlm.conversations"  # entry points: a class of `Rows` that takes the split


def open_conversations(source: str, split: Split) -> DataTable[SFTConversation]:
    """Open a source, with an optional slice `source@[a:b]`. Raises UserInputError."""
    name = split_slice(source)[0]
    path = Path(name).expanduser()
    lines = path if path.suffix == ".jsonl" else other_file(path, split, (".jsonl",))
    if lines is not None:
        rows: Rows = JsonLinesRows(lines)
    elif not path.exists() and name in provided(BUILTIN_GROUP):
        rows = builtin_rows(name, split)
    else:
        return open_table(CONVERSATIONS, source, split)
    return DataTable(CONVERSATIONS, rows, source, split)


def has_split(source: str, split: Split) -> bool:
    """Whether a local or built-in source has conversations of its own for a split."""
    path = Path(split_slice(source)[0]).expanduser()
    if path.is_dir():
        with suppress(UserInputError):
            return bool(other_file(path, split, (".jsonl",)) or local_files(path, split))
    return not path.exists() and str(path) in provided(BUILTIN_GROUP)


def builtin_rows(name: str, split: Split) -> Rows:
    return provided(BUILTIN_GROUP)[name].load()(split)  # type: ignore[no-any-return]


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
