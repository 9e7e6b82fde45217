"""Conversations about drawings of shapes, each with the right count: a data set that the repository makes itself."""

from __future__ import annotations

import pyarrow as pa

from rl_vlm.envs.rows import Block, Rows
from rl_vlm.types import Split
from rl_vlm.zoo.shapes.environment import format_answer, shapes_item

SIZES: dict[Split, int] = {"train": 500, "test": 200}


class ShapesRows(Rows):
    """The built-in data set `shapes`. Right answers rotate, so any constant answer is right one time in four."""

    def __init__(self, split: Split) -> None:
        super().__init__([Block(f"shapes ({split})", 0, SIZES[split], lambda: _table(split))])


def _table(split: Split) -> pa.Table:
    items = [shapes_item("count", split, index) for index in range(SIZES[split])]
    messages = [
        [
            {"role": "user", "content": f"<image>{item.question}"},
            {"role": "assistant", "content": format_answer(item.answer)},
        ]
        for item in items
    ]
    return pa.table({"messages": messages, "images": [[item.image.png] for item in items]})
