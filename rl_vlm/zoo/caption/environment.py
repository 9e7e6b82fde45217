"""Caption-v0: describe an image in one sentence; drawn scenes, or the rows of a data set with reference captions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from rl_vlm.envs.base import Count, EpisodeEnv, Info, Item, Reply
from rl_vlm.envs.rows import BadRowError
from rl_vlm.envs.tables import DataSource, RowTable, TableSet, cell_text
from rl_vlm.types import EncodedImage, Observation, Split
from rl_vlm.zoo.caption.reward import grade_caption
from rl_vlm.zoo.drawing import MAX_IMAGE_SIZE, MIN_IMAGE_SIZE
from rl_vlm.zoo.scenes.data import caption_item, caption_of, picture_of

NAME = "Caption-v0"
PROMPTS = {
    "full": "Describe the image in one sentence: what is there, what it looks like, and where. Name each thing once.",
    "brief": "Caption?",
}


@dataclass(frozen=True, slots=True)
class CaptionItem:
    """An image and its reference captions."""

    image: EncodedImage
    references: tuple[str, ...]


class CaptionTable(RowTable[CaptionItem]):
    """Rows of `image` and `caption`: one reference caption, or a list of them."""

    COLUMNS = ("image", "caption")

    def _read(self, row: int) -> tuple[tuple[str, ...], list[Any]]:
        values, where = self._rows.row(row), self._rows.where(row)
        captions = values["caption"] if isinstance(values["caption"], list) else [values["caption"]]
        references = tuple(cell_text(caption) for caption in captions)
        if not references or "" in references:
            raise BadRowError(f"{where}: the caption is empty or not text.")
        return references, [values["image"]]

    def _make(self, fields: tuple[str, ...], images: tuple[EncodedImage, ...], where: str) -> CaptionItem:
        return CaptionItem(images[0], fields)


@lru_cache(maxsize=4096)
def drawn_item(split: Split, index: int, seed: int, image_size: int) -> CaptionItem:
    """A drawn item with its picture; cached, because all copies of a group ask for the same one."""
    scene = caption_item(split, index, seed)
    return CaptionItem(picture_of(scene, image_size), (caption_of(scene),))


class CaptionEnv(EpisodeEnv):
    """One image to describe; the reward, 0 to 1, is how well the caption agrees with a reference in precision and recall.

    data: a data set with the columns `image` and `caption` (a text, or several); without it, drawn scenes of one to three
        shapes, whose reference names colour, kind and place of each.
    synonyms: groups of words that count as one, beside those that are known: [[sofa, couch], ...].
    prompt: "full" asks in words; "brief" in one, for the tiny model.
    image_size: pixels per side of drawn scenes. seed: which set of them; num_train and num_test: how many it holds.

    `info` of a step: `score` (the reward; logged as `env/score`, whatever is paid), `f1`, `precision`, `recall`, `length`, `reason` (why a caption is refused; see
    `zoo/caption/reward.py`), `well_formed`, `reference` (the first one).
    """

    name = NAME
    metrics: ClassVar[Mapping[str, tuple[float, ...]]] = {"score": ()}

    def __init__(
        self,
        data: DataSource | None = None,
        *,
        synonyms: Sequence[Sequence[str]] = (),
        prompt: Literal["full", "brief"] = "full",
        image_size: Annotated[int, Field(ge=MIN_IMAGE_SIZE, le=MAX_IMAGE_SIZE)] = 64,
        seed: int = 0,
        num_train: Count = 16_384,
        num_test: Count = 512,
    ) -> None:
        super().__init__(num_train=num_train, num_test=num_test, rows=TableSet(CaptionTable, data) if data else None)
        self._drawn = (seed, image_size)
        self._synonyms = synonyms
        self._question = PROMPTS[prompt]

    def open(self, item: Item) -> Observation:
        """Show the image. Raises BadRowError if the row cannot be used."""
        self._shown = shown = self.row(item) or drawn_item(item.split, item.index, *self._drawn)
        return Observation.user(shown.image, self._question)

    def reply(self, text: str) -> Reply:
        """Grade the caption."""
        references = self._shown.references
        grade = grade_caption(text, references, self._synonyms)
        info: Info = {
            "score": grade.score,
            "f1": grade.f1,
            "precision": grade.precision,
            "recall": grade.recall,
            "length": grade.length,
            "reason": grade.reason,
            "well_formed": not grade.reason,
            "reference": references[0],
        }
        return Reply(grade.score, None, info)
