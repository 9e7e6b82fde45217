"""Caption-v0: describe an image in one sentence; drawn scenes, or the rows of a data set with reference captions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rl_vlm.envs.base import Count, EpisodeEnv, Info, Item, Reply
from rl_vlm.envs.data import Row, Schema, TableSet, cell_text
from rl_vlm.envs.rows import BadRowError
from rl_vlm.envs.sources import DataSource
from rl_vlm.types import EncodedImage, Observation, Split
from rl_vlm.zoo.caption.grading import grade_caption
from rl_vlm.zoo.drawing import MAX_IMAGE_SIZE, MIN_IMAGE_SIZE
from rl_vlm.zoo.scenes.data import caption_item, caption_of, picture_of

PROMPTS = {
    "full": "Describe the image in one sentence: what is there, what it looks like, and where. Name each thing once.",
    "brief": "Caption?",
}


CaptionItem = tuple[EncodedImage, tuple[str, ...]]  # an image and its reference captions


def read_item(row: Row) -> CaptionItem:
    """An image with one reference caption, or a list of them."""
    caption = row.cells["caption"]
    references = tuple(map(cell_text, caption if isinstance(caption, list) else [caption]))
    if not references or "" in references:
        raise BadRowError("the caption is empty or not text.")
    if not any(grade_caption(reference, references).score == 1 for reference in references):
        reason = grade_caption(references[0], references).reason
        raise BadRowError(f"the caption {references[0][:80]!r} would not be rewarded as an answer ({reason}).")
    return row.image(row.cells["image"]), references


@lru_cache(maxsize=4096)
def drawn_item(split: Split, index: int, seed: int, image_size: int) -> CaptionItem:
    """A drawn item with its picture; cached for the copies of a group."""
    scene = caption_item(split, index, seed)
    return picture_of(scene, image_size), (caption_of(scene),)


class CaptionEnv(EpisodeEnv):
    """One image to describe; the reward, 0 to 1, is how well it agrees with a reference in precision and recall.

    data: a data set with the columns `image` and `caption` (a text, or several); without it scenes of one to three
    shapes are drawn. docs/environments.md lists the other arguments and what `info` holds.
    """

    name = "Caption-v0"
    metrics: ClassVar[Mapping[str, tuple[float, ...]]] = {"score": ()}

    def __init__(
        self,
        data: DataSource | None = None,
        *,
        prompt: Literal["full", "brief"] = "full",
        image_size: Annotated[int, Field(ge=MIN_IMAGE_SIZE, le=MAX_IMAGE_SIZE)] = 64,
        seed: int = 0,
        num_train: Count = 16_384,
        num_test: Count = 512,
    ) -> None:
        rows = TableSet(Schema(read_item, ("image", "caption")), data) if data else None
        super().__init__(num_train=num_train, num_test=num_test, rows=rows)
        self._drawn = (seed, image_size)
        self._question = PROMPTS[prompt]

    def open(self, item: Item) -> Observation:
        shown: CaptionItem = self.row(item) or drawn_item(item.split, item.index, *self._drawn)
        image, self._references = shown
        return Observation.user(image, self._question)

    def reply(self, text: str) -> Reply:
        grade = grade_caption(text, self._references)
        info: Info = {**asdict(grade), "well_formed": not grade.reason, "reference": self._references[0]}
        return Reply(grade.score, None, info)
