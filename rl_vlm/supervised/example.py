"""The built-in conversations as files: an example of the form that data of one's own takes."""

from __future__ import annotations

import json
from pathlib import Path

from rl_vlm.files import write_atomic
from rl_vlm.supervised.sources import builtin_rows
from rl_vlm.types import Split, UserInputError

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
