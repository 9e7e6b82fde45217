"""What other systems call our keys, from the tables of docs/ for their users (docs/key_names.py writes the file)."""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Collection
from functools import cache
from pathlib import Path

OF_ANYTHING = ("path", "paths", "file", "files", "folder", "dir", "name", "id", "type", "kind")  # need their section


@cache
def _rows() -> dict[str, dict[str, str]]:
    """By name and by every end of a dotted name; a whole name comes before the end of another."""
    with (Path(__file__).parent / "elsewhere.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    found = {row["name"]: row for row in reversed(rows)}
    for row in rows:
        parts = row["name"].split(".")
        for start in range(1, len(parts) - (parts[-1] in OF_ANYTHING)):
            found.setdefault(".".join(parts[start:]), row)
    return found


def _row(key: str) -> dict[str, str]:
    parts = key.replace("-", "_").split(".")
    row = next((row for k in range(len(parts)) if (row := _rows().get(".".join(parts[k:])))), None)
    if row is None and len(parts) > 1:
        row = _misspelt(key, 0.8)
    return row or _misspelt(parts[-1], 0.9) or {}


def is_name(key: str) -> bool:
    """Whether it is, letter by letter, another system's name of a key, or the end of one."""
    return key in _rows()


def _misspelt(key: str, cutoff: float) -> dict[str, str] | None:
    """The row of the name that is most like a key, in its last part too."""
    last = key.rpartition(".")[2]
    for name in difflib.get_close_matches(key, _rows(), 3, cutoff):
        end = name.rpartition(".")[2]
        if last in end or difflib.get_close_matches(last, [end], 1, 0.75):
            return _rows()[name]
    return None


def counterparts(key: str, known: Collection[str]) -> list[str]:
    """Those of the `known` keys that a key of another system is."""
    return [one for one in _row(key).get("keys", "").split() if one in known and one != key]


def counterpart(key: str, known: Collection[str]) -> str:
    """A sentence that says which of the `known` keys a key of another system is; "" if it is none."""
    row, parts = _row(key), key.replace("-", "_").split(".")
    keys = counterparts(key, known)
    if not row or (row["keys"] and not keys):
        return ""
    name = f"{row['system']} calls it {row['name']}" if row["name"] != key else f"It is a key of {row['system']}"
    same = keys and all(one.rpartition(".")[2] == parts[-1] for one in keys)
    sections = [part for name in (row["name"], *keys) for part in name.split(".")[:-1]]
    if same and len(parts) > 1 and not difflib.get_close_matches(parts[-2], sections):
        return ""  # a word such as `path` is all that they have in common
    if row["advice"] and not same and keys[:1] == row["keys"].split()[:1]:
        return f"{name}; here: {row['advice'].removeprefix('none: ')}."
    return f"Did you mean {' or '.join(keys)}?" + ("" if same else f" {name}.")


def same_value(key: str, ours: str) -> bool:
    """Whether a value of this key of another system is one of `ours`: where the table speaks of another unit or other
    values, ours is neither its first word nor its last."""
    return re.search(rf"^{ours}(,|;| and )|{ours}$|^$", _row(key)["advice"]) is not None
