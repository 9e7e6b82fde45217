"""Shapes-v0: count the shapes of a small drawing, or learn a hidden map from its colour to a number."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal

import numpy as np
from PIL import Image
from pydantic import Field

from rl_vlm.envs.base import Count, EpisodeEnv, Info, Item, Reply
from rl_vlm.envs.tool_forms import CLOSE, OPEN, ToolCallError
from rl_vlm.envs.tools import parse_tool_call
from rl_vlm.types import EncodedImage, Message, Observation, Split
from rl_vlm.zoo import drawing
from rl_vlm.zoo.drawing import COLOURS, CORNERS, IMAGE_SIZE, KINDS, MAX_SHAPES, Shape, render, split_of, stable_rng

COUNT_QUESTION = "How many shapes?"
RULE_QUESTION = "Which number?"
TOOL_HINT = " Call calc_score."
TRY_AGAIN = "Wrong. Try again."
Task = Literal["count", "rule"]
_ANSWER = re.compile(r"<answer>([^<>]*)</answer>")
NUMBERS = ("1", "2", "3", "4")


def draw(
    rng: np.random.Generator, count: int, split: Split, image_size: int = IMAGE_SIZE
) -> tuple[list[Shape], np.ndarray]:
    """A random drawing that belongs to `split`: `count` shapes, each in a quadrant of its own, and the pixels."""
    half, names = IMAGE_SIZE // 2, tuple(COLOURS)
    while True:
        shapes = []
        quadrants = np.sort(rng.permutation(MAX_SHAPES)[:count])
        looks = [rng.integers(0, len(choices), size=count) for choices in (KINDS, names)]
        sizes, offsets = rng.integers(12, 23, size=count), rng.random((count, 2))
        for quadrant, kind, colour, size, (dx, dy) in zip(quadrants, *looks, sizes, offsets, strict=True):
            room = half - int(size) - 2  # one pixel of grey on either side keeps neighbours apart
            x = int(quadrant % 2) * half + 1 + int(dx * (room + 1))
            y = int(quadrant // 2) * half + 1 + int(dy * (room + 1))
            shapes.append(Shape(int(quadrant), KINDS[kind], names[colour], x, y, int(size)))
        pixels = render(shapes, image_size)
        if split_of(pixels) == split:
            return shapes, pixels


def rule_numbers(seed: int) -> dict[str, str]:
    """The hidden rule of a data set: a random one-to-one map from colours to numbers."""
    order = stable_rng("rule", seed).permutation(len(COLOURS))
    return {colour: str(int(number) + 1) for colour, number in zip(COLOURS, order, strict=True)}


def perception_question(rng: np.random.Generator) -> tuple[str, str, np.ndarray]:
    """A random question about colour, corner or presence, its answer, and a drawing of the train split."""
    kind = int(rng.integers(0, 3))
    if kind < 2:
        shapes, pixels = draw(rng, 1, "train")
        if kind == 0:
            return "What colour?", shapes[0].colour, pixels
        return "Which corner?", CORNERS[shapes[0].quadrant], pixels
    # 2 shapes of 4 places on average, so that "yes" and "no" are equally frequent
    shapes, pixels = draw(rng, int(rng.choice((1, 2, 2, 3))), "train")
    quadrant = int(rng.integers(0, MAX_SHAPES))
    answer = "yes" if any(shape.quadrant == quadrant for shape in shapes) else "no"
    return f"Is a shape at {CORNERS[quadrant]}?", answer, pixels


def format_answer(answer: str) -> str:
    """The one form in which an answer counts."""
    return f"<answer>{answer}</answer>"


def format_call(answer: str) -> str:
    """The answer as a call of the scoring tool, as short as JSON allows."""
    return f'<tool_call>{{"name":"calc_score","arguments":{{"answer":"{answer}"}}}}</tool_call>'


@dataclass(frozen=True, slots=True)
class ShapesItem:
    image: EncodedImage
    question: str
    answer: str


@lru_cache(maxsize=4096)
def shapes_item(
    task: Task, split: Split, index: int, seed: int = 0, image_size: int = drawing.IMAGE_SIZE
) -> ShapesItem:
    """Task instance `index`; cached for the copies of a group.

    Right answers rotate with the index, so that any constant answer is right one time in four.
    """
    rng = drawing.stable_rng("shapes", task, split, index, seed)
    if task == "count":
        shapes, pixels = draw(rng, 1 + index % drawing.MAX_SHAPES, split, image_size)
        question, answer = COUNT_QUESTION, str(len(shapes))
    else:
        question, answer, numbers = RULE_QUESTION, "", rule_numbers(seed)
        while answer != NUMBERS[index % len(NUMBERS)]:
            shapes, pixels = draw(rng, 1, split, image_size)
            answer = numbers[shapes[0].colour]
    return ShapesItem(EncodedImage.from_pil(Image.fromarray(pixels)), question, answer)


def parse_answer(text: str) -> str | None:
    """The answer if the whole text is `<answer>...</answer>`; None otherwise."""
    match = _ANSWER.fullmatch(text.strip())
    return match[1].strip() if match else None


def parse_call(text: str) -> str | None:
    """The answer if the whole text is one well-formed call of `calc_score`; None otherwise."""
    text = text.strip()
    if not (text.startswith(OPEN) and text.endswith(CLOSE) and text.count(OPEN) == text.count(CLOSE) == 1):
        return None
    try:
        call = parse_tool_call(text)
    except ToolCallError:
        return None
    answer = call.arguments.get("answer") if call is not None and call.name == "calc_score" else None
    return answer.strip() if isinstance(answer, str) else None


class ShapesEnv(EpisodeEnv):
    """A drawing and one question; the whole turn must be `<answer>N</answer>`.

    task: "count" (how many shapes, 1 to 4) or "rule" (a hidden map from the shape's colour to a number 1 to 4).
    turns: 2 allows a second try; a right second answer earns `second_reward` in place of 1. tool: the answer must be a
    call of `calc_score`; a well-formed wrong call earns `call_bonus`. seed: which set of drawings, and which rule.

    `info` holds `correct`, `well_formed`, the right `answer` and the `turn`.
    """

    name = "Shapes-v0"

    def __init__(
        self,
        task: Task = "count",
        *,
        turns: Annotated[int, Field(ge=1, le=2)] = 1,
        tool: bool = False,
        image_size: Annotated[int, Field(ge=drawing.MIN_IMAGE_SIZE, le=drawing.MAX_IMAGE_SIZE)] = drawing.IMAGE_SIZE,
        seed: int = 0,
        num_train: Count = 4096,
        num_test: Count = 512,
        second_reward: float = 0.5,
        call_bonus: float = 0.2,
    ) -> None:
        super().__init__(num_train=num_train, num_test=num_test, max_turns=turns)
        self.task: Task = task
        self.turns = turns
        self.tool = tool
        self.image_size, self.seed = image_size, seed
        self.second_reward, self.call_bonus = second_reward, call_bonus

    def open(self, item: Item) -> Observation:
        self._drawn = shapes_item(self.task, item.split, item.index, self.seed, self.image_size)
        return Observation.user(self._drawn.image, self._drawn.question + (TOOL_HINT if self.tool else ""))

    def reply(self, text: str) -> Reply:
        given = parse_call(text) if self.tool else parse_answer(text)
        correct = given == self._drawn.answer
        if correct:
            reward = 1.0 if self.turn == 1 else self.second_reward
        else:
            reward = self.call_bonus if self.tool and given is not None else 0.0
        facts = {"correct": correct, "well_formed": given is not None}
        info: Info = {**facts, "answer": self._drawn.answer, "turn": self.turn}
        if correct or self.is_last_turn:
            return Reply(reward, None, info)
        # Only a call has a reply from the tool; plain text is answered by the user.
        role: Literal["tool", "user"] = "tool" if self.tool and given is not None else "user"
        return Reply(reward, Observation((Message.of(role, TRY_AGAIN),)), info)
