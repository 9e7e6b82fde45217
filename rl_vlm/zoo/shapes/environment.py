"""Shapes-v0: count the shapes of a small drawing, or learn a hidden map from its colour to a number.

A small visual task for quick runs: a guess is right one time in four. It needs no data set and no network.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from PIL import Image

from rl_vlm.envs.base import Info, MadeItemsEnv, StepResult
from rl_vlm.types import EncodedImage, Message, Observation, Split, UserInputError
from rl_vlm.zoo import drawing
from rl_vlm.zoo.shapes import data

Task = Literal["count", "rule"]
TASKS: tuple[Task, ...] = ("count", "rule")

_ANSWER = re.compile(r"<answer>([^<>]*)</answer>")
_CALL = re.compile(r"<tool_call>(.*)</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ShapesItem:
    """One task instance: the picture, the question's text and the right answer."""

    image: EncodedImage
    question: str
    answer: str


@lru_cache(maxsize=4096)
def shapes_item(
    task: Task, split: Split, index: int, seed: int = 0, image_size: int = drawing.IMAGE_SIZE
) -> ShapesItem:
    """Task instance `index`; cached, because all copies of a group ask for the same one.

    Right answers rotate with the index, so that any constant answer is right exactly one time in four.
    """
    rng = drawing.stable_rng("shapes", task, split, index, seed)
    if task == "count":
        shapes, pixels = data.draw(rng, 1 + index % drawing.MAX_SHAPES, split, image_size)
        question = data.count_question(shapes)
    else:
        while True:
            shapes, pixels = data.draw(rng, 1, split, image_size)
            question = data.rule_question(shapes, seed)
            if question.answer == data.NUMBERS[index % len(data.NUMBERS)]:
                break
    return ShapesItem(EncodedImage.from_pil(Image.fromarray(pixels)), question.text, question.answer)


def parse_answer(text: str) -> str | None:
    """The answer if the whole text is `<answer>...</answer>`; None otherwise."""
    match = _ANSWER.fullmatch(text.strip())
    return match[1].strip() if match else None


def parse_call(text: str) -> str | None:
    """The answer if the whole text is one well-formed call of `calc_score`; None otherwise."""
    match = _CALL.fullmatch(text.strip())
    if not match:
        return None
    try:
        call = json.loads(match[1])
    except ValueError:
        return None
    if not isinstance(call, dict) or call.get("name") != "calc_score" or not isinstance(call.get("arguments"), dict):
        return None
    answer = call["arguments"].get("answer")
    return answer.strip() if isinstance(answer, str) else None


class ShapesEnv(MadeItemsEnv):
    """A drawing and one question; the whole turn must be `<answer>N</answer>`.

    task: "count" (how many shapes, 1 to 4) or "rule" (a hidden map from the shape's colour to a number 1 to 4).
    turns: 2 allows a second try after "Wrong. Try again."; a right second answer pays `second_reward`.
    tool: the answer must be a call of `calc_score` instead; a well-formed wrong call pays `call_bonus`, and the reply
        comes as a tool message.
    seed: which data set of drawings (and which rule); num_train and num_test: how many task instances it holds.

    Rewards are 1 for a right first answer, `second_reward` for a right second one and 0 (or `call_bonus`) otherwise.
    `info` holds `correct`, `well_formed`, the right `answer` and the `turn`.
    """

    def __init__(
        self,
        task: Task = "count",
        *,
        turns: int = 1,
        tool: bool = False,
        image_size: int = drawing.IMAGE_SIZE,
        seed: int = 0,
        num_train: int = 4096,
        num_test: int = 512,
        second_reward: float = 0.5,
        call_bonus: float = 0.2,
    ) -> None:
        super().__init__("Shapes-v0", num_train, num_test)
        if task not in TASKS:
            raise UserInputError(f"Shapes-v0: env.kwargs.task {task!r} is unknown; choose one of {', '.join(TASKS)}.")
        if isinstance(turns, bool) or turns not in (1, 2):
            raise UserInputError(f"Shapes-v0: env.kwargs.turns must be 1 or 2, not {turns!r}.")
        if not isinstance(image_size, int) or not drawing.MIN_IMAGE_SIZE <= image_size <= drawing.MAX_IMAGE_SIZE:
            raise UserInputError(
                f"Shapes-v0: env.kwargs.image_size must be an integer from {drawing.MIN_IMAGE_SIZE} to {drawing.MAX_IMAGE_SIZE}, "
                f"not {image_size!r}."
            )
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise UserInputError(f"Shapes-v0: env.kwargs.seed must be an integer, not {seed!r}.")
        for name, value in (("num_train", num_train), ("num_test", num_test)):
            if not isinstance(value, int) or value < 1:
                raise UserInputError(f"Shapes-v0: env.kwargs.{name} must be a positive integer, not {value!r}.")
        self.task: Task = task
        self.turns = turns
        self.tool = tool
        self.image_size = image_size
        self.seed = seed
        self.second_reward = second_reward
        self.call_bonus = call_bonus
        self._item: ShapesItem | None = None
        self._turn = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """Show drawing `options["index"]` of `options["split"]`; a random one without an index."""
        super().reset(seed=seed)
        split, index = self.chosen_item(options)
        self._item = shapes_item(self.task, split, index, self.seed, self.image_size)
        self._turn = 0
        question = self._item.question + (data.TOOL_HINT if self.tool else "")
        return Observation.user(self._item.image, question), {"index": index, "split": split}

    def step(self, action: str) -> StepResult:
        """Grade one turn of text (without its end-of-turn token)."""
        if self._item is None:
            raise UserInputError("Shapes-v0: call reset() before step(), and again after an episode has ended.")
        given = parse_call(action) if self.tool else parse_answer(action)
        correct = given == self._item.answer
        if correct:
            reward = 1.0 if self._turn == 0 else self.second_reward
        else:
            reward = self.call_bonus if self.tool and given is not None else 0.0
        self._turn += 1
        info: Info = {
            "correct": correct,
            "well_formed": given is not None,
            "answer": self._item.answer,
            "turn": self._turn,
        }
        if correct or self._turn == self.turns:
            self._item = None
            return Observation(), reward, True, False, info
        # Only a call has a reply from the tool; plain text is answered by the user.
        role: Literal["tool", "user"] = "tool" if self.tool and given is not None else "user"
        return Observation((Message.of(role, data.TRY_AGAIN),)), reward, False, False, info
