"""NLVR2-v0: is a sentence about two images True or False? Drawn scenes, or the rows of a data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import Field

from rl_vlm.envs.base import Count, EpisodeEnv, Info, Item, Reply
from rl_vlm.envs.data import Row, Schema, TableSet
from rl_vlm.envs.rows import BadRowError
from rl_vlm.envs.sources import DataSource
from rl_vlm.types import EncodedImage, Observation, Split
from rl_vlm.zoo.drawing import MAX_IMAGE_SIZE, MIN_IMAGE_SIZE
from rl_vlm.zoo.nlvr2.verdicts import read_verdict
from rl_vlm.zoo.scenes.data import STATEMENT_KINDS, StatementKind, pair_item, picture_of

# After the sentence. "brief" is for the tiny model, whose every token costs.
PROMPTS = {
    "full": (
        "\nIs the sentence about the left and the right image true or false? Look at both. End your answer with a line "
        "that holds one word, True or False, and use neither word before it."
    ),
    "brief": " True or False?",
}
_LABELS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True, slots=True)
class PairItem:
    left: EncodedImage
    right: EncodedImage
    sentence: str
    label: bool
    kind: str = ""


def read_item(row: Row) -> PairItem:
    """A row of NLVR2, whose label is a boolean, 0 or 1, or "True" or "False"."""
    label = str(row.cells["label"])
    if label.strip().lower() not in _LABELS:
        raise BadRowError(f"the label is {label[:40]!r}; it must be True or False.")
    left, right = (row.image(row.cells[name]) for name in ("left_image", "right_image"))
    return PairItem(left, right, row.text("sentence"), _LABELS[label.strip().lower()])


PAIRS = Schema(read_item, ("sentence", "left_image", "right_image", "label"))


@lru_cache(maxsize=4096)
def drawn_item(split: Split, index: int, seed: int, image_size: int, kinds: tuple[StatementKind, ...]) -> PairItem:
    """A drawn item with its pictures; cached for the copies of a group."""
    pair = pair_item(split, index, seed, kinds)
    left, right = (picture_of(scene, image_size) for scene in (pair.left, pair.right))
    return PairItem(left, right, str(pair.statement), pair.truth, pair.statement.kind)


class NLVR2Env(EpisodeEnv):
    """Two images and a sentence about both: is it true?

    A reward of 1 for the right word, 0 for the wrong one or for none. data: a data set with the columns of `PAIRS`;
    without it scenes of shapes are drawn, with sentences about how many each image holds. docs/environments.md lists
    the other arguments and what `info` holds.
    """

    name = "NLVR2-v0"

    def __init__(
        self,
        data: DataSource | None = None,
        *,
        prompt: Literal["full", "brief"] = "full",
        kinds: Annotated[Sequence[StatementKind], Field(min_length=1)] = STATEMENT_KINDS,
        image_size: Annotated[int, Field(ge=MIN_IMAGE_SIZE, le=MAX_IMAGE_SIZE)] = 64,
        seed: int = 0,
        num_train: Count = 16_384,
        num_test: Count = 512,
    ) -> None:
        super().__init__(num_train=num_train, num_test=num_test, rows=TableSet(PAIRS, data) if data else None)
        self._drawn = (seed, image_size, tuple(kinds))
        self._question = PROMPTS[prompt]

    def open(self, item: Item) -> tuple[Observation, Info]:
        self._pair = pair = self.row(item) or drawn_item(item.split, item.index, *self._drawn)
        return Observation.user(pair.left, pair.right, pair.sentence + self._question), {"kind": pair.kind}

    def reply(self, text: str) -> Reply:
        verdict, label = read_verdict(text), self._pair.label
        correct = verdict.value == label
        info: Info = {
            "correct": correct, "verdict": verdict.value, "reason": verdict.reason,
            "well_formed": verdict.value is not None, "label": label, "kind": self._pair.kind,
        }  # fmt: skip
        return Reply(float(correct), None, info)
