"""The VLM as labeller: which of two pictures comes closer to the goal, and how close does one come?

A pair is asked about in one step (the label at once) or two (describe both pictures, then summarise the text as a
label), and in both orders by default: a model that prefers the picture that it sees first contradicts itself, and a
contradiction is label -1. All questions of a session are in flight at once, or `endpoint.max_in_flight` of them. A
question that gets no answer is an error, which is never a label.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from rl_vlm.asking.endpoints import Answer, Ask, Endpoint, EndpointError, Question, ask_again
from rl_vlm.config import LabelsSection
from rl_vlm.labelling.prompts import TaskPrompts, read_label, read_score, strip_thoughts
from rl_vlm.labelling.types import IDENTICAL, Label, Labeller, LabelValue, Score, SegmentPair, encode, picture_of
from rl_vlm.numerics import derive_seed
from rl_vlm.types import EncodedImage, Message
from rl_vlm.waiting import all_or_none

CHOICES = ("0", "1", "-1")
SCORE_CHOICES = ("-1", "0", *(f"0.{tenth}" for tenth in range(1, 10)), "1")

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(slots=True)
class LabelStats:
    """What labelling has cost so far, and how the labeller behaves."""

    pairs: int = 0
    questions: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    retries: int = 0
    errors: int = 0
    identical: int = 0
    disagreements: int = 0
    shown_first: int = 0  # answers for the picture that was shown first
    shown_second: int = 0
    no_preference: int = 0
    not_understood: int = 0  # asked about once more, and still neither a label nor a score
    seconds: float = 0.0

    @property
    def position_bias(self) -> float:
        """Share of answers for the picture shown first minus that for the second: 0 without bias, ±1 if only the place
        counts."""
        total = self.shown_first + self.shown_second + self.no_preference
        return (self.shown_first - self.shown_second) / total if total else 0.0

    def summary(self) -> str:
        """One line for the log."""
        return (
            f"{self.pairs} pairs in {self.seconds:.1f} s: {self.questions} questions, {self.prompt_tokens} prompt and "
            f"{self.sampled_tokens} sampled tokens, {self.disagreements} contradicted themselves, {self.errors} "
            f"errors, {self.not_understood} not understood, {self.retries} retries, position bias "
            f"{self.position_bias:+.2f}"
        )


@dataclass(frozen=True, slots=True)
class _Query:
    """What is shown, and the templates of the questions about it: `decide` in one step, or `describe` and then
    `summarise`."""

    shown: tuple[str | EncodedImage, ...]
    describe: str
    summarise: str
    decide: str
    choices: tuple[str, ...]


class VLMLabeller(Labeller):
    """Labels pairs and scores pictures with a vision-language model."""

    def __init__(
        self, endpoint: Endpoint, prompts: TaskPrompts, settings: LabelsSection | None = None, seed: int = 0
    ) -> None:
        self._endpoint = endpoint
        self._prompts = prompts
        self._settings = settings or LabelsSection()
        self._seed = seed
        self._sessions = 0
        self._gate: AbstractAsyncContextManager[object] = nullcontext()
        self._has_warned = False
        self.stats = LabelStats()

    async def label(self, pairs: Sequence[SegmentPair]) -> list[Label]:
        """One label per pair, in order. Raises UserInputError if the pairs have no pictures."""
        images = await asyncio.to_thread(_encode_pairs, pairs, self._settings.frames)
        async with self._session(len(pairs)) as ask:
            return await all_or_none([self._label_one(ask, number, *both) for number, both in enumerate(images)])

    async def score(self, frames: Sequence[np.ndarray]) -> list[Score]:
        """One score per picture (uint8 [H, W, 3]), in order."""
        images = await asyncio.to_thread(lambda: [encode(frame) for frame in frames])
        async with self._session(len(frames)) as ask:
            return await all_or_none([self._score_one(ask, number, image) for number, image in enumerate(images)])

    def state(self) -> dict[str, int]:
        """What a resumed run needs to draw the same seeds."""
        return {"sessions": self._sessions}

    def set_state(self, state: dict[str, int]) -> None:
        """Go on from `state`."""
        self._sessions = int(state["sessions"])

    @asynccontextmanager
    async def _session(self, count: int) -> AsyncIterator[Ask]:
        """Opens the endpoint for `count` pairs or pictures, and adds up afterwards what they cost."""
        started, not_understood = time.monotonic(), self.stats.not_understood
        most = self._settings.endpoint.max_in_flight
        self._gate = asyncio.Semaphore(most) if most else nullcontext()  # of this session's event loop
        self._has_warned = False
        async with self._endpoint.open() as ask:
            yield ask
        self._sessions += 1
        self.stats.pairs += count
        self.stats.seconds += time.monotonic() - started
        logger.debug("labels: %s", self.stats.summary())
        lost = self.stats.not_understood - not_understood
        if lost:
            logger.warning(
                "In a session of %d, %d answers were neither a label nor a score, even when the labeller was asked "
                "again. They decide nothing. An endpoint that can be held to the choices loses no answer "
                "(preference.labels.guided, preference.labels.endpoint.guidance).",
                count, lost,
            )  # fmt: skip

    async def _label_one(self, ask: Ask, number: int, first: EncodedImage, second: EncodedImage) -> Label:
        if first.sha256 == second.sha256:
            self.stats.identical += 1
            return Label(-1, (0.0, 0.0, 1.0), IDENTICAL)
        started = time.monotonic()
        orders = [(first, second), (second, first)][: 1 + self._settings.both_orders]
        try:
            shown = await all_or_none([self._compare(ask, (number, order), *pair) for order, pair in enumerate(orders)])
        except EndpointError as error:
            self.stats.errors += 1
            return Label(-1, seconds=time.monotonic() - started, error=str(error))
        for label in shown:
            self.stats.shown_first += label.value == 0
            self.stats.shown_second += label.value == 1
            self.stats.no_preference += label.value == -1
        labels = [shown[0], *(label.swapped() for label in shown[1:])]
        answers = tuple(label.value for label in labels)
        self.stats.disagreements += len(set(answers)) > 1
        return Label(
            answers[0] if len(set(answers)) == 1 else -1,
            _mean([label.probabilities for label in labels]),
            "\n".join(f"[{name}] {label.text}" for name, label in zip(("given", "swapped"), shown, strict=False)),
            time.monotonic() - started,
            answers=answers,
        )

    async def _compare(self, ask: Ask, key: tuple[int, int], first: EncodedImage, second: EncodedImage) -> Label:
        """The label for one order: 0 is the picture shown first."""
        templates = self._prompts.templates
        query = _Query(
            (templates.first, first, templates.second, second),
            templates.describe,
            templates.summarise,
            templates.decide,
            CHOICES,
        )
        value: LabelValue | None
        value, answer, said = await self._answer(ask, key, query, read_label)
        self.stats.not_understood += value is None
        known = answer.probabilities if answer.text.strip() in CHOICES else None
        return Label(-1 if value is None else value, (known["0"], known["1"], known["-1"]) if known else None, said)

    async def _score_one(self, ask: Ask, number: int, image: EncodedImage) -> Score:
        templates = self._prompts.templates
        query = _Query(
            (templates.score_image, image),
            templates.score_describe,
            templates.score_summarise,
            templates.score_decide,
            SCORE_CHOICES,
        )
        started = time.monotonic()
        try:
            value, answer, said = await self._answer(ask, (number, 0), query, read_score)
            if value is None:
                self.stats.not_understood += 1
                raise EndpointError(f"The answer is no score: {answer.text[:200]!r}", retryable=False)
        except EndpointError as error:
            self.stats.errors += 1
            return Score(None, seconds=time.monotonic() - started, error=str(error))
        return Score(None if value < 0 else value, said, time.monotonic() - started)

    async def _answer(
        self, ask: Ask, key: tuple[int, int], query: _Query, read: Callable[[str], T | None]
    ) -> tuple[T | None, Answer, str]:
        """What was read, the last answer, and the text of all answers.

        An answer that is not understood is asked about once more: in text alone, and with the choices where the
        endpoint can enforce them. Raises EndpointError for an answer without a word.
        """
        settings, fill = self._settings, self._prompts.fill
        guide = query.choices if settings.guided else ()

        async def ask_for_summary(step: int, text: str) -> Answer:
            message = Message.of("user", fill(query.summarise, strip_thoughts(text)))
            return _not_empty(await self._asked(ask, (*key, step), message, settings.answer_tokens, guide))

        if settings.steps == 1:
            limit = settings.answer_tokens if settings.guided else settings.describe_tokens
            message = Message("user", (*query.shown, fill(query.decide)))
            answer = _not_empty(await self._asked(ask, (*key, 0), message, limit, guide))
            said = answer.text
        else:
            message = Message("user", (*query.shown, fill(query.describe)))
            description = _not_empty(await self._asked(ask, (*key, 0), message, settings.describe_tokens))
            answer = await ask_for_summary(1, description.text)
            said = f"{description.text} => {answer.text}"
        value = _read(answer, read)
        if value is None:
            answer = await ask_for_summary(2, said)
            value, said = _read(answer, read), f"{said} => {answer.text}"
        return value, answer, said

    async def _asked(
        self, ask: Ask, key: tuple[int, int, int], message: Message, max_new_tokens: int, choices: tuple[str, ...] = ()
    ) -> Answer:
        """One question, asked again after failures that may pass. Its deadline begins when there is room for it."""
        settings = self._settings

        def question(attempt: int) -> Question:
            seed = derive_seed(self._seed, self._sessions, *key, attempt)
            return Question((message,), max_new_tokens, settings.temperature, choices, seed)

        def count_retry(error: EndpointError) -> None:
            self.stats.retries += 1
            if error.busy and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "The labeller is busy. It is asked for up to %g s per question: %s", settings.deadline_s, error
                )

        async with self._gate:
            answer = await ask_again(
                ask,
                question,
                attempts=settings.attempts,
                deadline_s=settings.deadline_s,
                who="labeller",
                on_retry=count_retry,
            )
        self.stats.questions += 1
        self.stats.prompt_tokens += answer.prompt_tokens
        self.stats.sampled_tokens += answer.sampled_tokens
        return answer


def _not_empty(answer: Answer) -> Answer:
    """The answer. Raises EndpointError if it has no word besides its thoughts."""
    if not strip_thoughts(answer.text):
        raise EndpointError(f"The answer decides nothing: {answer.text[:200]!r}", retryable=False)
    return answer


def _read(answer: Answer, read: Callable[[str], T | None]) -> T | None:
    """The value of an answer. One that was cut off is not understood: "0" may be the beginning of 0.7."""
    return None if answer.cut_off else read(answer.text)


def _mean(known: Sequence[tuple[float, float, float] | None]) -> tuple[float, float, float] | None:
    present = [one for one in known if one is not None]
    if len(present) < len(known):
        return None
    first, second, neither = (sum(column) / len(present) for column in zip(*present, strict=True))
    return first, second, neither


def _encode_pairs(pairs: Sequence[SegmentPair], frames: int) -> list[tuple[EncodedImage, EncodedImage]]:
    return [(encode(picture_of(pair.first, frames)), encode(picture_of(pair.second, frames))) for pair in pairs]
