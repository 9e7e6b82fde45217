"""Lamps of a panel: how many are lit?"""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw
from reward import score

from rl_vlm.envs.base import EpisodeEnv, Item, Reply
from rl_vlm.types import Observation

SIZE = 64  # pixels a side; the panel has four fields, in two rows of two
COLOURS = ((230, 30, 30), (30, 200, 40), (40, 60, 235), (240, 220, 30))  # red, green, blue, yellow


def draw(random: np.random.Generator, number: int) -> Image.Image:
    """A grey panel with `number` lit lamps, of random places, sizes and colours: RGB, 64 x 64 pixels.

    Put your own pictures here: open a file, call a simulator, take a row of a table.
    """
    grey = random.integers(124, 133, (SIZE, SIZE, 3), dtype=np.uint8)  # with noise: no picture of test is also in train
    image = Image.fromarray(grey)
    pen = ImageDraw.Draw(image)
    for field in random.permutation(4)[:number].tolist():
        row, column = divmod(field, 2)
        x, y, radius, colour = random.integers((10, 10, 5, 0), (22, 22, 9, len(COLOURS))).tolist()
        pen.circle((SIZE // 2 * column + x, SIZE // 2 * row + y), radius, fill=COLOURS[colour])
    return image


class LampsEnv(EpisodeEnv):
    """One picture, one question, one answer."""

    def __init__(self, num_train: int = 4096, num_test: int = 256) -> None:
        super().__init__(num_train=num_train, num_test=num_test)

    def open(self, item: Item) -> Observation:
        """Show the item. Its randomness comes from `item.random()`, so that it is the same in every episode."""
        number = 1 + item.index % 4  # each answer equally often: who always says the same is right once in four
        self.answer = str(number)
        return Observation.user(draw(item.random(), number), "How many lamps?")

    def reply(self, text: str) -> Reply:
        """Grade the answer and end the episode. `correct` makes the accuracy."""
        reward = score(text, self.answer)
        return Reply(reward, info={"correct": reward == 1.0, "answer": self.answer})
