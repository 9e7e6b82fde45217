"""Where conversations come from: JSON lines, parquet, image folders, the hub's cache, and installed packages."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from rl_vlm.envs.data import DataTable, open_table
from rl_vlm.envs.rows import JsonLinesRows, Rows
from rl_vlm.envs.sources import local_files, other_file, split_slice
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
