"""Conversations about drawings of shapes, each with the right count: a data set that the repository makes itself."""

from __future__ import annotations

from typing import Any

from rl_vlm.types import EncodedImage, Split
from rl_vlm.zoo.shapes import environment
from rl_vlm.zoo.shapes.environment import shapes_item

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


def _conversation(split: Split, index: int) -> tuple[EncodedImage, list[dict[str, Any]]]:
    item = shapes_item("count", split, index)
    question = [{"type": "image"}, {"type": "text", "text": item.question}]
    return item.image, [
        {"role": "user", "content": question},
        {"role": "assistant", "content": environment.format_answer(item.answer)},
    ]
