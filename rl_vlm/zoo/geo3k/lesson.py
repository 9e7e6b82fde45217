"""Lessons about geometry, which are played in the environment itself.

`drawer` draws those of the tiny model for Geo3k-v0. Each reply gives the right numbers of the figure and then a
random guess, as a call of the scoring tool or in a box: "20 60: 40 Answer: \\boxed{40}". Reinforcement learning has to
find out what follows from the numbers, and that a call is worth its turn.

`geometry_drawer` draws those that teach the form of tool calls and of later turns to tiny models that see no geometry.
Numbers and drawings are random, so nothing about geometry can be learned.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from rl_vlm.envs.base import Item
from rl_vlm.envs.data import ImageQuestion
from rl_vlm.types import EncodedImage, Message
from rl_vlm.zoo.drawing import stable_rng
from rl_vlm.zoo.geo3k.drawn import AngleStep, Problem, drawn_problem
from rl_vlm.zoo.geo3k.environment import Geo3kEnv
from rl_vlm.zoo.shapes.environment import format_call
from rl_vlm.zoo.tiny.teach import Draw, Exchange

LEVEL, IMAGE_SIZE = 1, 64
ANGLE_STEP: AngleStep = 20
GUESSES = tuple(range(20, 141, 20))  # the third angles of triangles whose angles are multiples of 20 degrees
TOOL_SHARE = 0.4  # of the dialogues
_CALL = 0.5  # how often a reply is a call, where there is the tool
_RIGHT_CALL = 0.3  # of the calls; the rest are random
_FIGURES = 1 << 20  # that are shown
_GRADED = 512  # by which answers are graded, each drawn once

CORPUS = (
    *[format_call("80")] * 6,
    *["Find x.\n", "\nAnswer: \\boxed{x}", "20 60: 40 Answer: \\boxed{40}\n"] * 4,
    *["Score: 0. The answer 80 is wrong. Look for the mistake.", "Score: 1. The answer 80 is right. Now finish with "]
    * 4,
    *["Your next message is the last one: give your final Answer: \\boxed{...} in it, without a call."] * 3,
)


def drawer(seed: int) -> Draw:
    """Plays `Geo3kEnv` with brief prompts on drawn triangles of the train split, in one to three turns.

    The environment grades the answers by another figure than the one that is shown. So replies to right calls are
    taught, and what is right for a figure is not.
    """
    rng, figures = Random(f"geometer {seed}"), 1_000_000 + seed  # other figures than those of a run
    envs = [
        Geo3kEnv(
            prompt="brief", scoring_tool=tool, level=LEVEL, angle_step=ANGLE_STEP, image_size=IMAGE_SIZE,
            seed=figures, num_train=_FIGURES,
        )
        for tool in (False, True)
    ]  # fmt: skip

    def problem_of(index: int) -> tuple[Problem, EncodedImage]:
        return drawn_problem((LEVEL,), ANGLE_STEP, IMAGE_SIZE, "train", index, figures)

    def draw() -> list[Exchange]:
        problem, picture = problem_of(rng.randrange(_FIGURES))
        graded, tool = rng.randrange(_GRADED), rng.random() < TOOL_SHARE
        truth = problem_of(graded)[0].answer
        guess = ""

        def reply(message: Message, turn: int) -> str:
            nonlocal guess
            if turn and guess == truth:
                return boxed(guess)
            guess = str(rng.choice([one for one in GUESSES if str(one) != guess]))
            calls = tool and "last one" not in message.text and rng.random() < _CALL
            if calls and rng.random() < _RIGHT_CALL:
                guess = truth
            numbers = " ".join(map(str, problem.numbers))
            return f"{numbers}: {guess} {format_call(guess) if calls else boxed(guess)}"

        return _played(envs[tool], graded, reply, picture)

    return draw


def _played(
    env: Geo3kEnv, index: int, reply: Callable[[Message, int], str], picture: EncodedImage | None = None
) -> list[Exchange]:
    """An episode in which `reply(message, turn)` answers; `picture`: shown in place of the item's own figure."""
    observation, _ = env.reset(options={"index": index, "split": "train"})
    pixels = np.asarray((picture or observation.messages[-1].images[0]).to_pil())
    exchanges: list[Exchange] = []
    while observation.messages:
        message = observation.messages[-1]
        parts = (message.text,) if exchanges else (pixels, message.text)
        exchanges.append(Exchange(message.role, parts, reply(message, len(exchanges))))
        observation = env.step(exchanges[-1].reply)[0]
    return exchanges


def boxed(answer: str) -> str:
    return f"Answer: \\boxed{{{answer}}}"


NUM_QUESTIONS = 64
_RIGHT_FORM_CALL = 0.15  # of the calls; their replies are followed by the same value in a box
_ANSWER_AT_ONCE = (0.35, 0.5, 0.9)  # by turn: how often the reply is a boxed answer and no call


class _QuestionsEnv(Geo3kEnv):
    def __init__(self, questions: list[ImageQuestion], **settings: Any) -> None:
        super().__init__(prompt="brief", num_train=len(questions), **settings)
        self._questions = questions

    def row(self, item: Item) -> ImageQuestion:
        return self._questions[item.index]


def geometry_drawer(seed: int, rng: np.random.Generator) -> Draw:
    """Runs `Geo3kEnv` with brief prompts on generated questions."""
    making = stable_rng("geometry", seed)
    answers = [_number(making) for _ in range(NUM_QUESTIONS)]
    problems = ["<image>" + _problem(making) for _ in answers]
    questions = [
        ImageQuestion(problem, answer, (EncodedImage.from_pil(line_drawing(making)),), "")
        for problem, answer in zip(problems, answers, strict=True)
    ]
    # The settings of the tiny model's runs: whole figures, small grey squares, and without the tool.
    envs = [
        _QuestionsEnv(questions),
        _QuestionsEnv(questions, image_size=64, square=True),
        _QuestionsEnv(questions, image_size=64, square=True, scoring_tool=False),
    ]

    def draw() -> list[Exchange]:
        which = int(rng.choice(3, p=(0.3, 0.5, 0.2)))
        index = int(rng.integers(NUM_QUESTIONS))
        confirmed: str | None = None

        def reply(_: Message, turn: int) -> str:
            nonlocal confirmed
            answer = confirmed or _number(rng)
            if which == 2 or confirmed or rng.random() < _ANSWER_AT_ONCE[turn]:
                return boxed(answer)
            if rng.random() < _RIGHT_FORM_CALL:
                answer = confirmed = answers[index]
            return format_call(answer)

        return _played(envs[which], index, reply)

    return draw


def line_drawing(rng: np.random.Generator) -> Image.Image:
    """A few dark lines and perhaps a circle on white, 100 to 400 pixels a side."""
    width, height = (int(side) for side in rng.integers(100, 401, size=2))
    picture = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(picture)
    corners = [(int(x * width), int(y * height)) for x, y in rng.random((int(rng.integers(3, 6)), 2))]
    pen.line([*corners, corners[0]], fill="black", width=2)
    if rng.random() < 0.3:
        radius = min(width, height) // 3
        box = (width // 2 - radius, height // 2 - radius, width // 2 + radius, height // 2 + radius)
        pen.ellipse(box, outline="black", width=2)
    return picture


def _number(rng: np.random.Generator) -> str:
    """Mostly two digits, some one or three, some with a decimal."""
    whole = int(rng.integers(1, 100)) if rng.random() < 0.85 else int(rng.integers(100, 180))
    return str(whole) if rng.random() < 0.85 else f"{whole}.{int(rng.integers(1, 10))}"


def _problem(rng: np.random.Generator) -> str:
    letters = "".join(chr(ord("A") + number) for number in rng.permutation(26)[:3])
    first, second = rng.integers(1, 90, size=2)
    problems = (
        "Find x.",
        "Find y. Round to the nearest tenth.",
        f"Find the measure of angle {letters}.",
        f"Find the length of {letters[:2]}.",
        f"{letters[:2]} = {first} and {letters[1:]} = {second}. Find the area of triangle {letters}.",
        f"The measure of angle {letters} is {first} degrees. Find the measure of arc {letters[:2]}.",
        f"{letters} is a triangle. The radius of the circle is {first}. Find x. Give the answer in simplest form.",
    )
    return problems[rng.integers(len(problems))]
