"""Lessons of the tiny model for Shapes-v0: the form of answers, and perception.

Questions about perception (colour, corner, presence) have right answers. Those of the task have random answers, so that
only the form is learned: accuracy on them stays at chance, sampled and greedy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rl_vlm.types import Role
from rl_vlm.zoo import drawing
from rl_vlm.zoo.geo3k.form_lesson import geometry_drawer
from rl_vlm.zoo.shapes import environment
from rl_vlm.zoo.tiny.teach import Draw, Exchange

SECOND_TURN_SHARE = 0.4  # of the wrong answers
# Probabilities of the random answers. One is more probable than the others: with equal probabilities the likeliest
# number would depend on the noise of training, and so would greedy accuracy.
NUMBER_ODDS = (0.22, 0.34, 0.22, 0.22)
TARGET_SHARE, GEOMETRY_SHARE = 0.36, 0.06  # of the dialogues; the rest are perception questions
CORPUS: tuple[str, ...] = ()  # the tiny tokenizer has its words already


def perception_dialogue(rng: np.random.Generator) -> list[Exchange]:
    question, answer, pixels = environment.perception_question(rng)
    return [Exchange("user", (pixels, question), environment.format_answer(answer))]


def target_dialogue(rng: np.random.Generator) -> list[Exchange]:
    """A count or rule question, answered at random; some wrong answers get a second try."""
    form: Callable[[str], str] = environment.format_answer
    hint = ""
    replier: Role = "user"
    if rng.random() < 0.2:
        form, hint, replier = environment.format_call, environment.TOOL_HINT, "tool"
    if rng.random() < 0.75:
        shapes, pixels = environment.draw(rng, int(rng.integers(1, drawing.MAX_SHAPES + 1)), "train")
        question, answer = environment.COUNT_QUESTION, str(len(shapes))
    else:
        shapes, pixels = environment.draw(rng, 1, "train")
        rule = environment.rule_numbers(int(rng.integers(1 << 30)))  # another one every time: nothing to learn
        question, answer = environment.RULE_QUESTION, rule[shapes[0].colour]
    first, second = (environment.NUMBERS[i] for i in rng.choice(len(NUMBER_ODDS), size=2, p=NUMBER_ODDS))
    exchanges = [Exchange("user", (pixels, question + hint), form(first))]
    if first != answer and rng.random() < SECOND_TURN_SHARE:
        exchanges.append(Exchange(replier, (environment.TRY_AGAIN,), form(second)))
    return exchanges


def drawer(seed: int) -> Draw:
    rng = np.random.default_rng([seed, 1])
    geometry = geometry_drawer(seed, rng)

    def draw() -> Sequence[Exchange]:
        kind = rng.random()
        if kind < TARGET_SHARE:
            return target_dialogue(rng)
        if kind < TARGET_SHARE + GEOMETRY_SHARE:
            return geometry()
        return perception_dialogue(rng)

    return draw
