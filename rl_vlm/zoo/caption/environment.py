"""Caption-v0: describe an image in one sentence; drawn scenes, or the rows of a data set with reference captions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from rl_vlm.envs.base import Info, StepResult
from rl_vlm.envs.one_shot import MAX_IMAGE_SIZE, MIN_IMAGE_SIZE, OneShotEnv, check_integers, question_of
from rl_vlm.envs.rows import BadRowError
from rl_vlm.envs.tables import DataSource, RowTable, cell_text
from rl_vlm.types import EncodedImage, Observation, Split, UserInputError
from rl_vlm.zoo.caption.reward import grade_caption
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


class CaptionEnv(OneShotEnv[CaptionItem]):
    """One image to describe; the reward, 0 to 1, is how well the caption agrees with a reference in precision and recall.

    data: a data set with the columns `image` and `caption` (a text, or several); without it, drawn scenes of one to three
        shapes, whose reference names colour, kind and place of each.
    synonyms: groups of words that count as one, beside those that are known: [[sofa, couch], ...].
    prompt: "full" asks in words; "brief" in one, for the tiny model.
    image_size: pixels per side of drawn scenes. seed: which set of them; num_train and num_test: how many it holds.

    `info` of a step: `score` (the reward; logged as `env/score`, whatever is paid), `f1`, `precision`, `recall`, `length`, `reason` (why a caption is refused; see
    `zoo/caption/reward.py`), `well_formed`, `reference` (the first one).
    """

    metrics: ClassVar[Mapping[str, tuple[float, ...]]] = {"score": ()}

    def __init__(
        self,
        data: DataSource | None = None,
        *,
        synonyms: Sequence[Sequence[str]] = (),
        prompt: str = "full",
        image_size: int = 64,
        seed: int = 0,
        num_train: int = 16_384,
        num_test: int = 512,
    ) -> None:
        super().__init__(
            NAME,
            CaptionTable,
            data,
            lambda split, index: drawn_item(split, index, seed, image_size),
            num_train,
            num_test,
        )
        check_integers(NAME, seed=(seed, None, None), image_size=(image_size, MIN_IMAGE_SIZE, MAX_IMAGE_SIZE))
        if isinstance(synonyms, str) or not all(
            not isinstance(group, str) and all(isinstance(word, str) for word in group) for group in synonyms
        ):
            raise UserInputError(
                f"{NAME}: env.kwargs.synonyms must be lists of words, such as [[sofa, couch]], not {synonyms!r}."
            )
        self._synonyms = synonyms
        self._question = question_of(NAME, PROMPTS, prompt)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """Show image `options["index"]` of `options["split"]`. Raises BadRowError if the row cannot be used."""
        super().reset(seed=seed)
        item, info = self.open_item(options)
        return Observation.user(item.image, self._question), info

    def step(self, action: str) -> StepResult:
        """Grade the caption."""
        item = self.close_item()
        grade = grade_caption(action, item.references, self._synonyms)
        info: Info = {
            "score": grade.score,
            "f1": grade.f1,
            "precision": grade.precision,
            "recall": grade.recall,
            "length": grade.length,
            "reason": grade.reason,
            "well_formed": not grade.reason,
            "reference": item.references[0],
        }
        return Observation(), grade.score, True, False, info
