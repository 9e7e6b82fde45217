"""QA-v0: images, a question and an answer, from data of the user's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from rl_vlm.envs.base import Count, EpisodeEnv, Info, Item, Reply
from rl_vlm.envs.images import fit
from rl_vlm.envs.sources import DataSource
from rl_vlm.rewards.functions import is_right, stated_answer
from rl_vlm.types import EncodedImage, Message, Observation
from rl_vlm.zoo.qa.data import Part, QARow, QARows


class QAEnv(EpisodeEnv):
    """A question about the images of a row of your data; one answer.

    The reward is 1 for a right answer and 0 otherwise; `env.reward` replaces it by reward functions.

    data: a parquet, JSON-lines or CSV file, an image folder, a hub name, or one of these for each split. columns: which
    columns hold the `image`, `question` and `answer`, where their names do not say so; null where there is none.
    question: asked of every row, in place of a column. system: the system message. conversational: reward functions are
    given messages where the data have plain texts, too. split_column: the column that says train or test. test_share:
    the share of rows that are the test split. image_size: longest side of an image in pixels at most.

    `info` holds `answer` (what was said), `truth`, `correct`, `where` (file and row), `columns` (the row's cells),
    `image_columns` (which of its images each column holds) and `prompt`; without answers in the data, no `truth` and no
    `correct`.
    """

    name = "QA-v0"

    def __init__(
        self,
        data: DataSource,
        *,
        columns: dict[Part, str | list[str] | None] | None = None,
        question: Annotated[str, Field(min_length=1)] | None = None,
        system: str = "",
        conversational: bool = False,
        split_column: str | None = None,
        test_share: Annotated[float, Field(ge=0, lt=1)] = 0.0,
        image_size: Count | None = None,
    ) -> None:
        super().__init__(rows=QARows(data, columns or {}, question, conversational, split_column, test_share))
        self._system, self._image_size = system, image_size

    def open(self, item: Item) -> tuple[Observation, Info]:
        self._example: QARow = self.row(item)
        messages = [self._resized(message) for message in self._example.messages]
        if self._system and messages[0].role != "system":
            messages.insert(0, Message.of("system", self._system))
        example = self._example
        info: Info = {"where": example.where, "prompt": example.prompt, "columns": example.columns}
        info["image_columns"] = example.image_columns
        if example.accepted:  # known from the start, because an answer that is cut off never gets a reply
            info |= {"correct": False, "truth": example.accepted[0], "reference": example.accepted[0]}
        return Observation(tuple(messages)), info

    def reply(self, text: str) -> Reply:
        info: Info = {"answer": stated_answer(text)}
        if not self._example.accepted:
            return Reply(0.0, info=info)
        correct = is_right(text, self._example.accepted)
        return Reply(float(correct), info={**info, "correct": correct})

    def _resized(self, message: Message) -> Message:
        size = self._image_size
        if size is None:
            return message
        return replace(
            message, parts=tuple(fit(part, size) if isinstance(part, EncodedImage) else part for part in message.parts)
        )
