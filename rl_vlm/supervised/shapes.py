"""Conversations about drawings of shapes, each with the right count: a data set that the repository makes itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rl_vlm.envs import shapes_data as data
from rl_vlm.envs.shapes import shapes_item
from rl_vlm.files import write_atomic
from rl_vlm.types import EncodedImage, Split, UserInputError

SIZES: dict[Split, int] = {"train": 500, "test": 200}


class ShapesRows:
    """The built-in data set `shapes`: how many shapes does the drawing show?

    Drawings of train and test are different; right answers rotate, so any constant answer is right one time in four.
    """

    def __init__(self, split: Split) -> None:
        self._split: Split = split

    def __len__(self) -> int:
        return SIZES[self._split]

    def row(self, index: int) -> dict[str, Any]:
        """A conversation in the form of a data file, its image as bytes."""
        image, messages = _conversation(self._split, index)
        return {"messages": messages, "images": [image.png]}

    def where(self, index: int) -> str:
        """The conversation in words."""
        return f"shapes, {self._split} conversation {index}"

    def folder(self, index: int) -> None:
        """There is none."""


def write_shapes(folder: Path) -> dict[str, int]:
    """Write the data set as files: train.jsonl, test.jsonl and the drawings in images/. Returns conversations per split.

    An example of the form that data of one's own takes. Raises UserInputError for a folder that holds anything.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserInputError(f"{folder} exists and is not an empty folder: choose another.")
    try:
        (folder / "images").mkdir(parents=True, exist_ok=True)
        for split, size in SIZES.items():
            lines = []
            for index in range(size):
                image, messages = _conversation(split, index)
                name = f"images/{split}-{index:03d}.png"
                (folder / name).write_bytes(image.png)
                lines.append(json.dumps({"messages": messages, "images": [name]}) + "\n")
            write_atomic(folder / f"{split}.jsonl", "".join(lines))
    except OSError as error:
        raise UserInputError(f"Cannot write {folder}: {error.strerror or error}.") from error
    return {str(split): size for split, size in SIZES.items()}


def _conversation(split: Split, index: int) -> tuple[EncodedImage, list[dict[str, Any]]]:
    item = shapes_item("count", split, index)
    question = [{"type": "image"}, {"type": "text", "text": item.question}]
    return item.image, [
        {"role": "user", "content": question},
        {"role": "assistant", "content": data.format_answer(item.answer)},
    ]
