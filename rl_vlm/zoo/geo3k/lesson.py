"""Lessons of the tiny model for Geo3k-v0, which are played in the environment itself.

Each reply gives the right numbers of the figure and then a random guess, as a call of the scoring tool or in a box:
"20 60: 40 Answer: \\boxed{40}". Reinforcement learning has to find out what follows from the numbers, and that a call
is worth its turn.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np

from rl_vlm.types import EncodedImage, Message
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

        return play_episode(envs[tool], graded, reply, picture)

    return draw


def play_episode(
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
