"""The VLM as labeller: which of two pictures comes closer to the goal, and how close does one come?

A pair is asked about in one step (the label at once) or two (describe both pictures, then summarise the text as a
label), and in both orders unless told otherwise: a model that prefers the picture that it sees first contradicts itself,
and a contradiction is label -1. All questions of a session are in flight at once, or `endpoint.max_in_flight` of them. What got no
answer is an error, which is never a label.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
from PIL import Image

from rl_vlm.asking.endpoints import Answer, Ask, Endpoint, EndpointError, Question
from rl_vlm.asking.retries import all_of, ask_again
from rl_vlm.config import LabelsSection
from rl_vlm.labelling.answer_text import finished_sentences, strip_thoughts
from rl_vlm.labelling.parsing import parse_label, parse_score
from rl_vlm.labelling.prompts import TaskPrompts
from rl_vlm.labelling.types import IDENTICAL, Label, LabelValue, Score, Segment, SegmentPair
from rl_vlm.seeding import derive_seed
from rl_vlm.types import EncodedImage, Message, UserInputError

CHOICES = ("0", "1", "-1")
SCORE_CHOICES = ("-1", "0", *(f"0.{tenth}" for tenth in range(1, 10)), "1")

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
    not_understood: int = 0  # of those without a preference: answers that the parser could not read
    seconds: float = 0.0

    @property
    def position_bias(self) -> float:
        """Share of answers for the picture shown first minus that for the second: 0 without bias, ±1 if only the place counts."""
        total = self.shown_first + self.shown_second + self.no_preference
        return (self.shown_first - self.shown_second) / total if total else 0.0

    def summary(self) -> str:
        """One line for the log."""
        return (
            f"{self.pairs} pairs in {self.seconds:.1f} s: {self.questions} questions, {self.prompt_tokens} prompt and "
            f"{self.sampled_tokens} sampled tokens, {self.disagreements} contradicted themselves, {self.errors} errors, "
            f"{self.not_understood} not understood, {self.retries} retries, position bias {self.position_bias:+.2f}"
        )


class VLMLabeller:
    """Labels pairs and scores pictures with a vision-language model. Implements `Labeller` and `Scorer`."""

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
        started = time.monotonic()
        async with self._open() as ask:
            labels = await all_of([self._label_one(ask, number, *both) for number, both in enumerate(images)])
        self._end_session(len(pairs), started)
        return labels

    async def score(self, frames: Sequence[np.ndarray]) -> list[Score]:
        """One score per picture (uint8 [H, W, 3]), in order."""
        images = await asyncio.to_thread(lambda: [_encode(frame) for frame in frames])
        started = time.monotonic()
        async with self._open() as ask:
            scores = await all_of([self._score_one(ask, number, image) for number, image in enumerate(images)])
        self._end_session(len(frames), started)
        return scores

    def state(self) -> dict[str, int]:
        """What a resumed run needs to draw the same seeds."""
        return {"sessions": self._sessions}

    def set_state(self, state: dict[str, int]) -> None:
        """Go on from `state`."""
        self._sessions = int(state["sessions"])

    def _open(self) -> AbstractAsyncContextManager[Ask]:
        """The endpoint and the gate of one session; gates belong to the loop that they are used in."""
        most = self._settings.endpoint.max_in_flight
        self._gate = asyncio.Semaphore(most) if most else nullcontext()
        self._has_warned = False
        return self._endpoint.open()

    def _end_session(self, count: int, started: float) -> None:
        self._sessions += 1
        self.stats.pairs += count
        self.stats.seconds += time.monotonic() - started
        logger.debug("labels: %s", self.stats.summary())

    async def _label_one(self, ask: Ask, number: int, first: EncodedImage, second: EncodedImage) -> Label:
        if first.sha256 == second.sha256:
            self.stats.identical += 1
            return Label(-1, (0.0, 0.0, 1.0), IDENTICAL)
        started = time.monotonic()
        orders = [(first, second), (second, first)][: 1 + self._settings.both_orders]
        try:
            shown = await all_of([self._compare(ask, (number, order), *pair) for order, pair in enumerate(orders)])
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
        templates, fill = self._prompts.templates, self._prompts.fill
        shown = (templates.first, first, templates.second, second)
        answer, said = await self._answer(ask, key, shown, fill(templates.describe), fill(templates.decide), CHOICES)
        value = self._read(answer)
        if value is None:
            # Free text that is no verdict: ask once more, about the text alone, with the choices where they can be enforced.
            summarise = Message.of("user", fill(templates.summarise, strip_thoughts(said)))
            guide = CHOICES if self._settings.guided else ()
            answer = await self._asked(ask, (*key, 2), summarise, self._settings.answer_tokens, guide)
            said, value = f"{said} => {answer.text}", self._read(answer)
        if value is None:
            self.stats.not_understood += 1
            value = -1
        known = answer.probabilities if answer.text.strip() in CHOICES else None
        return Label(value, (known["0"], known["1"], known["-1"]) if known else None, said)

    def _read(self, answer: Answer) -> LabelValue | None:
        """The label of an answer, None if it is not understood. Raises EndpointError for an empty answer."""
        if not strip_thoughts(answer.text):
            raise EndpointError(f"The answer decides nothing: {answer.text[:200]!r}", retryable=False)
        return parse_label(_finished(answer), self._prompts.goal)

    async def _score_one(self, ask: Ask, number: int, image: EncodedImage) -> Score:
        templates, fill = self._prompts.templates, self._prompts.fill
        started = time.monotonic()
        shown = (templates.score_image, image)
        try:
            answer, said = await self._answer(
                ask, (number, 0), shown, fill(templates.score_describe), fill(templates.score_decide), SCORE_CHOICES
            )
            value = parse_score(_finished(answer))
            if value is None:
                raise EndpointError(f"The answer holds no score: {answer.text[:200]!r}", retryable=False)
        except EndpointError as error:
            self.stats.errors += 1
            return Score(None, seconds=time.monotonic() - started, error=str(error))
        return Score(None if value < 0 else value, said, time.monotonic() - started)

    async def _answer(
        self,
        ask: Ask,
        key: tuple[int, int],
        shown: tuple[str | EncodedImage, ...],
        describe: str,
        decide: str,
        choices: tuple[str, ...],
    ) -> tuple[Answer, str]:
        """The last answer, and the text of all answers."""
        settings, templates = self._settings, self._prompts.templates
        guide = choices if settings.guided else ()
        if settings.steps == 1:
            limit = settings.answer_tokens if settings.guided else settings.describe_tokens
            answer = await self._asked(ask, (*key, 0), Message("user", (*shown, decide)), limit, guide)
            return answer, answer.text
        described = await self._asked(ask, (*key, 0), Message("user", (*shown, describe)), settings.describe_tokens)
        text = strip_thoughts(described.text)
        if not text:
            raise EndpointError("The description is empty.", retryable=False)
        template = templates.summarise if choices == CHOICES else templates.score_summarise
        summarise = Message.of("user", self._prompts.fill(template, text))
        answer = await self._asked(ask, (*key, 1), summarise, settings.answer_tokens, guide)
        return answer, f"{described.text} => {answer.text}"

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


def _finished(answer: Answer) -> str:
    """What an answer says for certain: where it was cut off, "a score of 0" may be the beginning of 0.7."""
    return finished_sentences(answer.text) if answer.cut_off else answer.text


def _mean(known: Sequence[tuple[float, float, float] | None]) -> tuple[float, float, float] | None:
    present = [one for one in known if one is not None]
    if len(present) < len(known):
        return None
    first, second, neither = (sum(column) / len(present) for column in zip(*present, strict=True))
    return first, second, neither


def picture_of(segment: Segment, frames: int = 1) -> np.ndarray:
    """uint8 [H, frames × W, 3]: `frames` pictures of the segment side by side, evenly spaced, the last of them its last.

    Raises UserInputError if the segment has no pictures.
    """
    if segment.frames is None:
        raise UserInputError("These segments have no pictures: give the environment a camera or a render function.")
    steps = len(segment)
    places = [max(steps - 1 - back * (steps // frames), 0) for back in reversed(range(frames))]
    return np.concatenate([segment.frames[place] for place in places], axis=1)


def _encode_pairs(pairs: Sequence[SegmentPair], frames: int) -> list[tuple[EncodedImage, EncodedImage]]:
    return [(_encode(picture_of(pair.first, frames)), _encode(picture_of(pair.second, frames))) for pair in pairs]


def _encode(frame: np.ndarray) -> EncodedImage:
    return EncodedImage.from_pil(Image.fromarray(frame))
