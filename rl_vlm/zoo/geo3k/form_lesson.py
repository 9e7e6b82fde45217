"""Lessons that teach the form of tool calls and of later turns to tiny models that see no geometry.

Numbers and drawings are random, so nothing about geometry can be learned.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from rl_vlm.envs.base import Item
from rl_vlm.envs.questions import ImageQuestion
from rl_vlm.types import EncodedImage, Message
from rl_vlm.zoo.drawing import stable_rng
from rl_vlm.zoo.geo3k.environment import Geo3kEnv
from rl_vlm.zoo.geo3k.lesson import boxed, play_episode
from rl_vlm.zoo.shapes.environment import format_call
from rl_vlm.zoo.tiny.teach import Draw, Exchange

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

        return play_episode(envs[which], index, reply)

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
