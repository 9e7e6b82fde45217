"""Where conversations come from: files, image folders, the hub's cache, and installed packages."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from rl_vlm.envs.data import DataTable, open_table
from rl_vlm.envs.rows import MissingColumnError, Rows
from rl_vlm.envs.sources import local_files, split_slice
from rl_vlm.registry import provided
from rl_vlm.supervised.conversations import CONVERSATIONS, FORM, SFTConversation
from rl_vlm.types import Split, UserInputError

BUILTIN_GROUP = "rl_vlm.conversations"  # entry points: a class of `Rows` that takes the split


def open_conversations(source: str, split: Split) -> DataTable[SFTConversation]:
    """Open a source, with an optional slice `source@[a:b]`. Raises UserInputError."""
    name = split_slice(source)[0]
    if not Path(name).expanduser().exists() and name in provided(BUILTIN_GROUP):
        return DataTable(CONVERSATIONS, builtin_rows(name, split), source, split)
    try:
        return open_table(CONVERSATIONS, source, split)
    except MissingColumnError as error:
        raise UserInputError(f"{error} {FORM}") from error


def has_split(source: str, split: Split) -> bool:
    """Whether a local or built-in source has conversations of its own for a split."""
    path = Path(split_slice(source)[0]).expanduser()
    if path.is_dir() and not (path / "state.json").exists():  # a single saved data set is one split
        with suppress(UserInputError):
            return bool(local_files(path, split))
    return not path.exists() and str(path) in provided(BUILTIN_GROUP)


def builtin_rows(name: str, split: Split) -> Rows:
    return provided(BUILTIN_GROUP)[name].load()(split)  # type: ignore[no-any-return]
