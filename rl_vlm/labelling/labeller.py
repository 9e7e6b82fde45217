"""The VLM as labeller: which of two pictures comes closer to the goal, and how close does one come?

A pair is asked about in one step (the label at once) or two (describe both pictures, then summarise the text as a
label), and in both orders by default: a model that prefers the picture that it sees first contradicts itself, and a
contradiction is label -1. All questions of a session are in flight at once, or `endpoint.max_in_flight` of them. A
question that gets no answer is an error, which is never a label.
"""

from __future__ import annotations

import asyncio
import difflib
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

import numpy as np
from pydantic import StringConstraints, ValidationError, model_validator

from rl_vlm.asking import Answer, Ask, Endpoint, EndpointError, Question, ask_again
from rl_vlm.config import LabelsSection
from rl_vlm.config.loading import explain, load_yaml_file
from rl_vlm.config.section import Section
from rl_vlm.labelling.store import IDENTICAL, Label, Labeller, LabelValue, Score, SegmentPair, encode, picture_of
from rl_vlm.safe_text import without_thoughts
from rl_vlm.seeding import derive_seed
from rl_vlm.types import EncodedImage, Message, UserInputError
from rl_vlm.waiting import all_or_none

# What a labeller is asked: the goal of each task in words, and the questions around it.
#
# A question is a template with `{goal}`, and `{answer}` in the second of two steps. Tasks are RL-VLM-F's, or come from
# a YAML file:
#
#     push-button: to press the red button all the way down     # the goal alone, or:
#     stack:
#       goal: to stack the blue cube on the green one
#       description: The blue cube stands on the green cube.    # for similarity of image and text
#       templates:
#         describe: What do you see? The goal is {goal}. Which image is nearer to it?

_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")


class Templates(Section):
    """The texts of all queries. Comparisons show `first`, image, `second`, image and then a question."""

    first: str = "Compare the following two images.\nImage 1:\n"
    second: str = "\nImage 2:\n"
    describe: str = (
        "\n1. What is shown in Image 1?\n2. What is shown in Image 2?\n"
        "3. The goal is {goal}. Does one of the images come closer to the goal than the other, and in what way?\n"
        "Answer in two sentences."
    )
    summarise: str = (
        "Two images were compared. The goal is {goal}. This was said about Image 1, about Image 2 and about the "
        "difference between them in terms of the goal:\n{answer}\n\n"
        "In which image is the goal better achieved, according to this text? Reply with a single line: 0 for Image 1, "
        "1 for Image 2, or -1 if there is no difference or the text is unsure."
    )
    decide: str = (
        "\nThe goal is {goal}. In which image is the goal better achieved? Reply with a single line: 0 for Image 1, "
        "1 for Image 2, or -1 if there is no difference or it cannot be told."
    )
    score_image: str = "Look at the following image:\n"
    score_describe: str = (
        "\n1. What is shown in the image?\n"
        "2. The goal is {goal}. On a scale from 0 to 1, where 1 means that the goal is achieved, which score does the "
        "image deserve?\nAnswer in two sentences."
    )
    score_summarise: str = (
        "An image was scored from 0 to 1, where 1 means that the goal is achieved. The goal is {goal}. This was said:\n"
        "{answer}\n\nReply with a single line: the score that the text gives, or -1 if it is unsure."
    )
    score_decide: str = (
        "\nThe goal is {goal}. On a scale from 0 to 1, where 1 means that the goal is achieved, which score does the "
        "image deserve? Reply with a single line: the score, or -1 if it cannot be told."
    )

    @model_validator(mode="after")
    def _placeholders(self) -> Templates:
        for name, field in type(self).model_fields.items():
            wanted, given = (set(_PLACEHOLDER.findall(text)) for text in (str(field.default), getattr(self, name)))
            if given != wanted:
                shown = " and ".join(f"{{{part}}}" for part in sorted(wanted)) or "no placeholder"
                raise ValueError(f"the template `{name}` must hold {shown}, and holds {sorted(given) or 'none'}")
        return self


class TaskPrompts(Section):
    """One task: `goal` completes "The goal is ...", `description` says what the achieved goal looks like."""

    goal: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
    description: Annotated[str, StringConstraints(strip_whitespace=True)] = ""
    templates: Templates = Templates()

    def fill(self, template: str, answer: str = "") -> str:
        parts = {"goal": self.goal, "answer": answer}
        # Not str.format: answers may hold braces.
        return _PLACEHOLDER.sub(lambda match: parts[match[1]], template)


# RL-VLM-F's names of tasks, where they differ by more than prefix, version and hyphens.
_ALIASES = {
    "continuouscartpole": "cartpole",
    "ropeflatteneasy": "ropeflatten",
    "clothfolddiagonal": "clothfold",
    "drawer": "draweropen",
    "sweep": "sweepinto",
}


def task_prompts(task: str, file: str | Path | None = None, goal: str = "") -> TaskPrompts:
    """The prompts of a task, from the user's file first, then from `TASKS`; else our own templates with the `goal`.
    RL-VLM-F's names, such as `metaworld_drawer-open-v2`, are understood. Raises UserInputError."""
    own = load_prompts(file) if file is not None else {}
    short = _short_name(task)
    for named in (own, TASKS):
        known = named.get(task) or {_short_name(name): prompts for name, prompts in named.items()}.get(short)
        if known is not None:
            return known
    if goal:
        return TaskPrompts(goal=goal)
    names = [*own, *sorted(TASKS)]
    near = difflib.get_close_matches(short, names, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]}?" if near else f"Known are {', '.join(names)}."
    raise UserInputError(
        f"There are no prompts for the task {task!r}. {hint} Another goal can be given in words, or in a YAML file."
    )


def load_prompts(path: str | Path) -> dict[str, TaskPrompts]:
    """Read a user's prompts. Raises UserInputError on the first thing that is wrong."""
    file = Path(path)
    data = load_yaml_file(file, "file of prompts")
    if not isinstance(data, dict) or not data:
        raise UserInputError(
            f"The prompts in {file} must map names of tasks to goals, such as `stack: to stack cubes`."
        )
    tasks = {}
    for name, value in data.items():
        keys = value if isinstance(value, dict) else {"goal": value}
        try:
            tasks[str(name)] = TaskPrompts.model_validate(keys)
        except ValidationError as error:
            raise UserInputError(f"The prompts in {file}, task {name!r}: {explain(error, TaskPrompts)}") from error
    return tasks


def _short_name(task: str) -> str:
    short = re.sub(r"^(metaworld|softgym|meta-world)[_/]", "", task.strip(), flags=re.IGNORECASE)
    short = re.sub(r"[-_]v\d+$", "", short).lower().replace("_", "").replace("-", "")
    return _ALIASES.get(short, short)


# Goal, and what the achieved goal looks like.
_GOALS = {
    "cartpole": (
        "to balance the brown pole upright on the black cart",
        "The brown pole stands vertically upright on the black cart.",
    ),
    "drawer-open": ("to open the drawer", "The drawer is open."),
    "sweep-into": ("to bring the green cube as close as possible to the hole", "The green cube is in the hole."),
    "soccer": ("to move the soccer ball into the goal", "The soccer ball is in the goal."),
    "door-open": ("to open the door of the safe", "The door of the safe is open."),
    "assembly": ("to pick up the nut and place it onto the peg", "The nut is on the peg."),
    "box-close": ("to grasp the cover and close the box with it", "The box is closed by its cover."),
    "coffee-push": ("to push the mug under the coffee machine", "The mug is under the coffee machine."),
    "stick-pull": (
        "to grasp the stick and pull the box with it",
        "The box has been pulled to the goal with the stick.",
    ),
    "rope-flatten": ("to straighten the blue rope", "The blue rope is straight."),
    "pass-water": (
        "to move the container of water as close as possible to the red circle, without spilling much water",
        "The container is at the red circle and holds its water.",
    ),
    "cloth-fold": (
        "to fold the cloth along its diagonal, from the top left corner to the bottom right corner",
        "The cloth is folded diagonally, its top left corner on its bottom right corner.",
    ),
}
TASKS = {name: TaskPrompts(goal=goal, description=description) for name, (goal, description) in _GOALS.items()}
TASKS["cartpole-tiny"] = TaskPrompts(  # for `tiny-labeller`, whose every token costs
    goal="an upright pole",
    description="The pole is upright.",
    templates=Templates(first="1:", second=" 2:", decide=" The goal is {goal}: 0, 1 or -1."),
)


# Reading an answer: the whole of it, or its last line, must be the number, which only quotes, brackets and marks of
# emphasis may surround. A number in a sentence may count images or items of a list, and a label for the wrong image
# teaches the reward model the opposite.

_BEFORE, _AFTER = r"[\s*_`'\"(\[{$]*", r"[\s*_`'\")\]}$]*\.?[\s*_`'\")\]}$]*"
_LABEL = re.compile(rf"{_BEFORE}(-1|0|1){_AFTER}")
_IMAGE = re.compile(r"\bimage\s*([12])\b", re.IGNORECASE)
# "0.7", "70 %", "7/10", and -1 for an answer that is unsure.
_SCORE = re.compile(
    rf"{_BEFORE}(?P<number>-1|\d{{1,9}}(?:\.\d{{1,9}})?|\.\d{{1,9}})\s*"
    rf"(?:(?P<percent>%)|/\s*(?P<scale>\d{{1,9}}(?:\.\d{{1,9}})?))?{_AFTER}"
)


def read_label(text: str) -> LabelValue | None:
    """The label of an answer; None if it is not understood: its lines hold different labels, or its text names the
    other image alone ("Image 2 is better.", and then 0)."""
    said = without_thoughts(text)
    lines = [_LABEL.fullmatch(line) for line in said.splitlines()]
    labels = {line[1] for line in lines if line}
    if len(labels) != 1 or lines[-1] is None:
        return None
    label = cast(LabelValue, int(labels.pop()))
    named = set(_IMAGE.findall(said))
    return None if label != -1 and named and str(label + 1) not in named else label


def read_score(text: str) -> float | None:
    """The score in [0, 1] of an answer, -1.0 if it is unsure, None if it is not understood."""
    lines = without_thoughts(text).splitlines()
    match = _SCORE.fullmatch(lines[-1]) if lines else None
    if match is None:
        return None
    if match["number"] == "-1":
        return -1.0
    scale = 100.0 if match["percent"] else float(match["scale"] or 1)
    value = float(match["number"]) / scale if scale else -1.0
    return value if 0 <= value <= 1 else None


CHOICES = ("0", "1", "-1")
SCORE_CHOICES = ("-1", "0", *(f"0.{tenth}" for tenth in range(1, 10)), "1")
# What may be answered, and how it is read, by what the names of the templates of a comparison or a score begin with.
_KINDS: dict[str, tuple[tuple[str, ...], Callable[[str], float | None]]] = {
    "": (CHOICES, read_label),
    "score_": (SCORE_CHOICES, read_score),
}

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
        async with self._session(len(pairs), shown) as (ask, images):
            both = zip(images[::2], images[1::2], strict=True)
            return await all_or_none([self._label_one(ask, number, *pair) for number, pair in enumerate(both)])

    async def score(self, frames: Sequence[np.ndarray]) -> list[Score]:
        async with self._session(len(frames), frames) as (ask, images):
            return await all_or_none([self._score_one(ask, number, image) for number, image in enumerate(images)])

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

    async def _label_one(self, ask: Ask, number: int, first: EncodedImage, second: EncodedImage) -> Label:
        if first.sha256 == second.sha256:
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
        answers, known = tuple(label.value for label in labels), [label.probabilities for label in labels]
        self.stats.disagreements += len(set(answers)) > 1
        return Label(
            answers[0] if len(set(answers)) == 1 else -1,
            None if None in known else tuple(np.mean(np.array(known), 0).tolist()),
            "\n".join(f"[{name}] {label.text}" for name, label in zip(("given", "swapped"), shown, strict=False)),
            time.monotonic() - started,
            answers=answers,
        )

    async def _compare(self, ask: Ask, key: tuple[int, int], first: EncodedImage, second: EncodedImage) -> Label:
        """The label for one order: 0 is the picture shown first."""
        templates = self._prompts.templates
        shown = (templates.first, first, templates.second, second)
        value, answer, said = await self._answer(ask, key, shown, "")
        self.stats.not_understood += value is None
        known = answer.probabilities if answer.text.strip() in CHOICES else None
        label = cast(LabelValue, -1 if value is None else value)
        return Label(label, (known["0"], known["1"], known["-1"]) if known else None, said)

    async def _score_one(self, ask: Ask, number: int, image: EncodedImage) -> Score:
        started, shown = time.monotonic(), (self._prompts.templates.score_image, image)
        try:
            value, answer, said = await self._answer(ask, (number, 0), shown, "score_")
            if value is None:
                self.stats.not_understood += 1
                raise EndpointError(f"The answer is no score: {answer.text[:200]!r}", retryable=False)
        except EndpointError as error:
            self.stats.errors += 1
            return Score(None, seconds=time.monotonic() - started, error=str(error))
        return Score(None if value < 0 else value, said, time.monotonic() - started)

    async def _answer(
        self, ask: Ask, key: tuple[int, int], shown: tuple[str | EncodedImage, ...], kind: str
    ) -> tuple[float | None, Answer, str]:
        """What was read, the last answer, and the text of all answers. An answer that is not understood is asked about
        once more. Raises EndpointError for one without a word."""
        settings, (choices, read) = self._settings, _KINDS[kind]

        async def answer_to(step: int, template: str, limit: int, choices: tuple[str, ...], said: str = "") -> Answer:
            prompt = self._prompts.fill(getattr(self._prompts.templates, kind + template), without_thoughts(said))
            message = Message("user", (prompt,) if said else (*shown, prompt))
            return await self._asked(ask, (*key, step), message, limit, choices)

        def value_of(answer: Answer) -> float | None:
            # One that was cut off is not understood: "0" may be the beginning of 0.7.
            return None if answer.cut_off else read(answer.lines)

        at_once, guide = settings.steps == 1, choices if settings.guided else ()
        if at_once and guide:
            answer = await answer_to(0, "decide", settings.answer_tokens, guide)
        else:
            answer = await answer_to(0, "decide" if at_once else "describe", settings.describe_tokens, ())
        value, said = value_of(answer) if at_once else None, answer.text
        for step in (2,) if at_once else (1, 2):
            if value is None:
                answer = await answer_to(step, "summarise", settings.answer_tokens, guide, said)
                value, said = value_of(answer), f"{said} => {answer.text}"
        return value, answer, said

    async def _asked(
        self, ask: Ask, key: tuple[int, int, int], message: Message, max_new_tokens: int, choices: tuple[str, ...] = ()
    ) -> Answer:
        """One question, asked again after failures that may pass. Its deadline begins when there is room for it."""
        settings = self._settings

        def question(attempt: int) -> Question:
            seed = derive_seed(self._seed, self._sessions, *key, attempt)
            one = Question((message,), max_new_tokens, settings.temperature, choices, seed)
            return one.with_reason() if choices and settings.guided == "reason" else one

        def count_retry(error: EndpointError) -> None:
            self.stats.retries += 1
            if error.busy and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "The labeller is busy. It is asked for up to %g s per question: %s", settings.deadline_s, error
                )

        attempts, deadline_s = settings.attempts, settings.deadline_s
        async with self._gate:
            answer = await ask_again(
                ask, question, attempts=attempts, deadline_s=deadline_s, who="labeller", on_retry=count_retry
            )
        self.stats.questions += 1
        self.stats.prompt_tokens += answer.prompt_tokens
        self.stats.sampled_tokens += answer.sampled_tokens
        if not without_thoughts(answer.text):
            raise EndpointError(f"The answer decides nothing: {answer.text[:200]!r}", retryable=False)
        return answer
