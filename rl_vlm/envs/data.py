"""Question sets: rows of `problem`, `answer` and `images` from parquet files or the hub, read lazily and checked.

See `tables.py` for what names a data set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rl_vlm.envs.images import MAX_PIXELS
from rl_vlm.envs.rows import COLUMNS, BadRowError
from rl_vlm.envs.tables import DataSource, RowTable, cell_text, open_split_table, open_table
from rl_vlm.types import EncodedImage, Part, Split, UserInputError

IMAGE_MARKER = "<image>"


@dataclass(frozen=True, slots=True)
class Question:
    """A problem with its `<image>` markers, the true answer, the images, and the file and row that it comes from.

    `kind` says what sort of problem it is, where that is known.
    """

    problem: str
    answer: str
    images: tuple[EncodedImage, ...]
    where: str
    kind: str = ""

    def parts(self) -> tuple[Part, ...]:
        """Text and images in reading order: each marker replaced by its image; images first without markers."""
        if IMAGE_MARKER not in self.problem:
            return (*self.images, self.problem)
        texts = self.problem.split(IMAGE_MARKER)
        parts: list[Part] = [texts[0]]
        for image, text in zip(self.images, texts[1:], strict=True):
            parts += [image, text]
        return tuple(part for part in parts if part != "")


class ImageTable(RowTable[Question]):
    """A sequence of `Question`s."""

    COLUMNS = COLUMNS

    def _read(self, row: int) -> tuple[tuple[str, str], list[Any]]:
        """(problem, answer) and the undecoded images of a row."""
        values = self._rows.row(row)
        where = self._rows.where(row)
        problem, answer = cell_text(values["problem"]), cell_text(values["answer"])
        if not problem:
            raise BadRowError(f"{where}: the problem is empty or not text.")
        if not answer:
            raise BadRowError(f"{where}: the answer is empty or neither text nor a number.")
        images = values["images"]
        images = images if isinstance(images, list) else [] if images is None else [images]
        markers = problem.count(IMAGE_MARKER)
        if markers and markers != len(images):
            raise BadRowError(f"{where}: {markers} {IMAGE_MARKER} markers in the problem, {len(images)} images.")
        return (problem, answer), images

    def _make(self, fields: tuple[str, str], images: tuple[EncodedImage, ...], where: str) -> Question:
        return Question(*fields, images, where)


def open_dataset(source: str, split: str, max_pixels: int = MAX_PIXELS) -> ImageTable:
    """Open a question set; see `open_table`."""
    return open_table(ImageTable, source, split, max_pixels)


def open_split(data: DataSource, split: Split) -> ImageTable:
    """Open a split of a question set for an environment; see `open_split_table`."""
    return open_split_table(ImageTable, data, split)


def check_max_turns(max_turns: int) -> int:
    """Return `max_turns`; UserInputError unless it is a whole number of at least 1."""
    if isinstance(max_turns, bool) or not isinstance(max_turns, int) or max_turns < 1:
        raise UserInputError(f"env.kwargs.max_turns is {max_turns!r}; it must be a whole number of at least 1.")
    return max_turns
