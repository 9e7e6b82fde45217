"""The VLM as labeller: which of two pictures comes closer to the goal, and how close does one come?

A pair is asked about in one step (the label at once) or two (describe both pictures, then summarise the text as a
label), and in both orders by default: a model that prefers the picture that it sees first contradicts itself, and a
contradiction is label -1. All questions of a session are in flight at once, or `endpoint.max_in_flight` of them. A
question that gets no answer is an error, which is never a label.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np

from rl_vlm.asking import Answer, Ask, Endpoint, EndpointError, Question, ask_again
from rl_vlm.config import LabelsSection
from rl_vlm.labelling.answers import (
    CHOICES,
    RATINGS,
    SCORE_CHOICES,
    SUCCESS,
    expected_place,
    read_label,
    read_score,
    read_word,
)
from rl_vlm.labelling.labels import IDENTICAL, Label, Labeller, LabelValue, Score, SegmentPair, encode, picture_of
from rl_vlm.labelling.templates import TaskPrompts
from rl_vlm.safe_text import without_thoughts
from rl_vlm.seeding import derive_seed
from rl_vlm.types import EncodedImage, Message
from rl_vlm.waiting import all_or_none

logger = logging.getLogger(__name__)

# What may be answered, and how it is read, by what the names of the templates of a comparison or a score begin with.
_KINDS: dict[str, tuple[tuple[str, ...], Callable[[str], float | None]]] = {
    "": (CHOICES, read_label),
    "score_": (SCORE_CHOICES, read_score),
    "rate_": (RATINGS, partial(read_word, words=RATINGS)),
    "success_": (SUCCESS, partial(read_word, words=SUCCESS)),
}
_BY_SCALE = {"number": "score_", "rating": "rate_", "success": "success_"}
_NOT_ASKED = Label(-1, (0.0, 0.0, 1.0), IDENTICAL)


@dataclass(slots=True)
class LabelStats:
    """What labelling has cost so far, and how the labeller behaves."""

    pairs: int = 0
    questions: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    retries: int = 0
    errors: int = 0
    disagreements: int = 0
    shown_first: int = 0  # answers for the picture that was shown first
    shown_second: int = 0
    no_preference: int = 0
    not_understood: int = 0  # asked about once more, and still neither a label nor a score
    seconds: float = 0.0

    @property
    def position_bias(self) -> float:
        """Share of answers for the picture shown first minus that for the second; ±1 if only the place counts."""
        total = self.shown_first + self.shown_second + self.no_preference
        return (self.shown_first - self.shown_second) / total if total else 0.0

    def summary(self) -> str:
        return (
            f"{self.pairs} pairs in {self.seconds:.1f} s: {self.questions} questions, {self.prompt_tokens} prompt and "
            f"{self.sampled_tokens} sampled tokens, {self.disagreements} contradicted themselves, {self.errors} "
            f"errors, {self.not_understood} not understood, {self.retries} retries, position bias "
            f"{self.position_bias:+.2f}"
        )


@dataclass(frozen=True, slots=True)
class _Reading:
    """What was read from the answers about one picture, or about one order of a pair; `answer` is the last one."""

    value: float | None  # None: not understood
    text: str  # of all answers
    answer: Answer | None
    seconds: float
    error: str = ""


class VLMLabeller(Labeller):
    """Labels pairs and scores pictures with a vision-language model."""

    def __init__(
        self, endpoint: Endpoint, prompts: TaskPrompts, settings: LabelsSection | None = None, seed: int = 0
    ) -> None:
        self._endpoint, self._prompts, self._seed = endpoint, prompts, seed
        self._settings = settings or LabelsSection()
        self._sessions = 0
        self._gate: AbstractAsyncContextManager[object] = nullcontext()
        self._has_warned = False
        self.stats = LabelStats()

    async def label(self, pairs: Sequence[SegmentPair]) -> list[Label]:
        shown = (picture_of(part, self._settings.frames) for pair in pairs for part in (pair.first, pair.second))
        templates, orders = self._prompts.templates, range(1 + self._settings.both_orders)
        async with self._session(len(pairs), shown) as (ask, images):
            asked = {
                (number, order): (templates.first, both[order], templates.second, both[1 - order])
                for number, both in enumerate(zip(images[::2], images[1::2], strict=True))
                for order in orders
                if both[0].sha256 != both[1].sha256
            }
            readings = await all_or_none([self._answer(ask, key, parts, "") for key, parts in asked.items()])
            found = dict(zip(asked, readings, strict=True))
            return [
                self._label_of([found[number, order] for order in orders]) if (number, 0) in found else _NOT_ASKED
                for number in range(len(pairs))
            ]

    async def score(self, frames: Sequence[np.ndarray]) -> list[Score]:
        async with self._session(len(frames), frames) as (ask, images):
            asked = enumerate((self._prompts.templates.score_image, image) for image in images)
            kind = _BY_SCALE[self._settings.scale]
            readings = await all_or_none([self._answer(ask, (number, 0), parts, kind) for number, parts in asked])
            return [self._score_of(reading) for reading in readings]

    def state(self) -> dict[str, int]:
        return {"sessions": self._sessions}

    def set_state(self, state: dict[str, int]) -> None:
        self._sessions = int(state["sessions"])

    @asynccontextmanager
    async def _session(self, count: int, shown: Iterable[np.ndarray]) -> AsyncIterator[tuple[Ask, list[EncodedImage]]]:
        """Opens the endpoint for `count` pairs or pictures, and adds up afterwards what they cost."""
        images = await asyncio.to_thread(lambda: list(map(encode, shown)))
        started, not_understood = time.monotonic(), self.stats.not_understood
        most = self._settings.endpoint.max_in_flight
        self._gate = asyncio.Semaphore(most) if most else nullcontext()  # of this session's event loop
        self._has_warned = False
        async with self._endpoint.open() as ask:
            yield ask, images
        self._sessions += 1
        self.stats.pairs += count
        self.stats.seconds += time.monotonic() - started
        logger.debug("labels: %s, position bias %+.2f", self.stats, self.stats.position_bias)
        lost = self.stats.not_understood - not_understood
        if lost:
            logger.warning(
                "In a session of %d, %d answers were neither a label nor a score, even when the labeller was asked "
                "again. They decide nothing. An endpoint that can be held to the choices loses no answer "
                "(preference.labels.guided).",
                count, lost,
            )  # fmt: skip

    def _label_of(self, readings: Sequence[_Reading]) -> Label:
        """The label of a pair that was shown in one or both orders."""
        seconds = max(reading.seconds for reading in readings)
        if error := next((reading.error for reading in readings if reading.error), ""):
            self.stats.errors += 1
            return Label(-1, seconds=seconds, error=error)
        shown = [_label_as_shown(reading) for reading in readings]
        for label in shown:
            self.stats.shown_first += label.value == 0
            self.stats.shown_second += label.value == 1
            self.stats.no_preference += label.value == -1
        labels = [shown[0], *(label.swapped() for label in shown[1:])]
        answers, known = tuple(label.value for label in labels), [label.probabilities for label in labels]
        self.stats.disagreements += len(set(answers)) > 1
        return Label(
            answers[0] if len(set(answers)) == 1 else -1,
            None if None in known else tuple(np.mean(np.array(known), 0).tolist()),
            "\n".join(f"[{name}] {label.text}" for name, label in zip(("given", "swapped"), shown, strict=False)),
            seconds,
            answers=answers,
        )

    def _score_of(self, reading: _Reading) -> Score:
        error = reading.error
        if reading.value is None:
            error = error or f"The answer is no score: {reading.text[-200:]!r}"
            self.stats.errors += 1
            return Score(None, seconds=reading.seconds, error=error)
        return Score(None if reading.value < 0 else reading.value, reading.text, reading.seconds)

    async def _answer(
        self, ask: Ask, key: tuple[int, int], shown: tuple[str | EncodedImage, ...], kind: str
    ) -> _Reading:
        """Ask about the pictures `shown`, in one or two steps, and once more where the answer is not understood. The
        second step and the repetition show the answers so far. `key` are the numbers of the pair and of the order."""
        settings, templates, (choices, read) = self._settings, self._prompts.templates, _KINDS[kind]
        started, value, said = time.monotonic(), None, ""
        answer: Answer | None = None
        try:
            for step, template, limit, guide in self._steps(kind, choices):
                prompt = self._prompts.fill(getattr(templates, kind + template), without_thoughts(said))
                message = Message("user", (prompt,) if said else (*shown, prompt))
                question = partial(self._question, (*key, step), message, limit, guide)
                async with self._gate:  # the deadline begins when there is room for the question
                    answer = await ask_again(
                        ask,
                        question,
                        attempts=settings.attempts,
                        deadline_s=settings.deadline_s,
                        who="labeller",
                        on_retry=self._count_retry,
                    )
                self.stats.questions += 1
                self.stats.prompt_tokens += answer.prompt_tokens
                self.stats.sampled_tokens += answer.sampled_tokens
                if not without_thoughts(answer.text):
                    raise EndpointError(f"The answer decides nothing: {answer.text[:200]!r}", retryable=False)
                said = f"{said} => {answer.text}" if said else answer.text
                # An answer that was cut off is not understood: "0" may be the beginning of 0.7.
                if template != "describe" and not answer.cut_off:
                    value = read(answer.lines)
                if value is not None and answer.probabilities and choices in (RATINGS, SUCCESS):
                    value = expected_place(answer.probabilities, choices)
                if value is not None:
                    break
        except EndpointError as error:
            return _Reading(None, said, answer, time.monotonic() - started, str(error))
        self.stats.not_understood += value is None
        return _Reading(value, said, answer, time.monotonic() - started)

    def _steps(self, kind: str, choices: tuple[str, ...]) -> list[tuple[int, str, int, tuple[str, ...]]]:
        """Of each question: its number, which is part of its seed; its template; the limit of tokens of its answer; the
        choices that the endpoint enforces."""
        settings, guide = self._settings, choices if self._settings.guided else ()
        if kind in ("rate_", "success_"):
            return [(0, "decide", settings.answer_tokens, guide)]
        again = ("summarise", settings.answer_tokens, guide)
        if settings.steps == 1:
            return [(0, "decide", settings.answer_tokens if guide else settings.describe_tokens, guide), (2, *again)]
        return [(0, "describe", settings.describe_tokens, ()), (1, *again), (2, *again)]

    def _question(
        self, key: tuple[int, int, int], message: Message, limit: int, choices: tuple[str, ...], attempt: int
    ) -> Question:
        seed = derive_seed(self._seed, self._sessions, *key, attempt)
        question = Question((message,), limit, self._settings.temperature, choices, seed)
        return question.with_reason() if choices and self._settings.guided == "reason" else question

    def _count_retry(self, error: EndpointError) -> None:
        self.stats.retries += 1
        if error.busy and not self._has_warned:
            self._has_warned = True
            deadline_s = self._settings.deadline_s
            logger.warning("The labeller is busy. It is asked for up to %g s per question: %s", deadline_s, error)


class ScoredPairs(Labeller):
    """Prefers the picture with the higher score of another labeller; its cost is that one's."""

    def __init__(self, scorer: Labeller, frames: int = 1) -> None:
        self._scorer, self._frames = scorer, frames
        self.stats = scorer.stats

    async def label(self, pairs: Sequence[SegmentPair]) -> list[Label]:
        shown = [picture_of(part, self._frames) for pair in pairs for part in (pair.first, pair.second)]
        scores = await self._scorer.score(shown)
        return [self._label_of(*both) for both in zip(scores[::2], scores[1::2], strict=True)]

    @staticmethod
    def _label_of(first: Score, second: Score) -> Label:
        if error := first.error or second.error:
            return Label(-1, seconds=first.seconds + second.seconds, error=error)
        one, other = (math.nan if score.value is None else score.value for score in (first, second))
        value: LabelValue = 0 if one > other else 1 if other > one else -1
        return Label(value, None, f"{one:.4f} against {other:.4f}", first.seconds + second.seconds)


def _label_as_shown(reading: _Reading) -> Label:
    """The label for one order: 0 is the picture that was shown first."""
    answer, value = cast(Answer, reading.answer), -1 if reading.value is None else reading.value
    known = answer.probabilities if answer.text.strip() in CHOICES else None
    probabilities = tuple(known[choice] for choice in CHOICES) if known else None
    return Label(cast(LabelValue, value), probabilities, reading.text)
