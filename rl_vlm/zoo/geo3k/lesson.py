"""Lessons of the tiny model for Geo3k-v0: the numbers in a drawn figure, and the form of guesses, calls and answers.

The dialogues are played in the environment itself. Each reply gives the right numbers of the figure and then a random guess, as a call of
the scoring tool or in a box: "20 60: 40 Answer: \\boxed{40}". Reinforcement learning has to find out what follows from the numbers, and that
a call is worth its turn.
"""

from __future__ import annotations

from random import Random

import numpy as np

from rl_vlm.types import EncodedImage
from rl_vlm.zoo.geo3k.drawn import Problem, drawn_problem
from rl_vlm.zoo.geo3k.environment import Geo3kEnv
from rl_vlm.zoo.shapes.environment import format_call
from rl_vlm.zoo.tiny.teach import Dialogue, Draw, Exchange

LEVEL, ANGLE_STEP, IMAGE_SIZE = 1, 20, 64
GUESSES = tuple(range(20, 141, 20))  # the third angles of triangles whose angles are multiples of 20 degrees
TOOL_SHARE = 0.4  # of the dialogues
_CALL = 0.5  # how often a reply is a call, where there is the tool
_RIGHT_CALL = 0.3  # of the calls; the rest are random
_FIGURES = 1 << 20  # that are shown
_GRADED = 512  # by which answers are graded, each drawn once

# Words that become single tokens, the more surely the oftener they stand here.
CORPUS = (
    *[format_call("80")] * 6,
    *["Find x.\n", "\nAnswer: \\boxed{x}", "20 60: 40 Answer: \\boxed{40}\n"] * 4,
    *["Score: 0. The answer 80 is wrong. Look for the mistake.", "Score: 1. The answer 80 is right. Now finish with "]
    * 4,
    *["Your next message is the last one: give your final Answer: \\boxed{...} in it, without a call."] * 3,
)


class FigureDialogues:
    """Plays `Geo3kEnv` with brief prompts on drawn triangles of the train split."""

    def __init__(self, seed: int) -> None:
        self._seed = 1_000_000 + seed  # other figures than those of a run
        self._envs = [
            Geo3kEnv(
                prompt="brief", scoring_tool=tool, level=LEVEL, angle_step=ANGLE_STEP, image_size=IMAGE_SIZE,
                seed=self._seed, num_train=_FIGURES,
            )
            for tool in (False, True)
        ]  # fmt: skip

    def draw(self, rng: Random) -> Dialogue:
        """One dialogue of one to three turns.

        The environment grades the answers by another figure than the one that is shown: so replies to right calls are
        taught, and what is right for a figure is not.
        """
        problem, picture = self._problem(rng.randrange(_FIGURES))
        graded, tool = rng.randrange(_GRADED), rng.random() < TOOL_SHARE
        truth = self._problem(graded)[0].answer
        env = self._envs[tool]
        observation, _ = env.reset(options={"index": graded, "split": "train"})
        guess = ""
        exchanges: list[Exchange] = []
        while observation.messages:
            message = observation.messages[-1]
            if exchanges and guess == truth:
                reply = boxed(guess)
            else:
                guess = str(rng.choice([one for one in GUESSES if str(one) != guess]))
                calls = tool and "last one" not in message.text and rng.random() < _CALL
                if calls and rng.random() < _RIGHT_CALL:
                    guess = truth
                reply = written(problem.numbers, guess) + (format_call(guess) if calls else boxed(guess))
            exchanges.append(Exchange(message.role, message.text, reply))
            observation = env.step(reply)[0]
        return Dialogue((pixels_of(picture),), tuple(exchanges))

    def _problem(self, index: int) -> tuple[Problem, EncodedImage]:
        return drawn_problem((LEVEL,), ANGLE_STEP, IMAGE_SIZE, "train", index, self._seed)


def written(numbers: list[int], guess: str) -> str:
    """What the geometer writes before a call or a box: the numbers in the figure, and its guess."""
    return f"{' '.join(map(str, numbers))}: {guess} "


def boxed(answer: str) -> str:
    """The last line of an answer."""
    return f"Answer: \\boxed{{{answer}}}"


def pixels_of(picture: EncodedImage) -> np.ndarray:
    """uint8 [height, width, 3]."""
    return np.asarray(picture.to_pil())


def drawer(seed: int) -> Draw:
    """A function that draws conversations for one warm start."""
    rng, dialogues = Random(f"geometer {seed}"), FigureDialogues(seed)
    return lambda: dialogues.draw(rng).turns
