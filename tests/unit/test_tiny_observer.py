"""The tiny observer: what it is taught about scenes, that it is asked as it was taught, and that it is not taught the tasks."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import numpy as np

from rl_vlm.zoo.caption.environment import grade_caption
from rl_vlm.zoo.drawing import render
from rl_vlm.zoo.nlvr2.environment import read_verdict
from rl_vlm.zoo.scenes.data import LOOKS, caption_of, pair_item, random_scene
from rl_vlm.zoo.scenes.lesson import VERDICT_QUESTION, draw_lesson, vague_caption, verdict_lesson

# --- what is taught


def test_a_verdict_is_random_whatever_the_images_hold_and_the_counts_before_it_are_right() -> None:
    rng = Random(0)
    right: list[bool] = []
    truths: dict[str, bool] = {}
    for index in range(200):
        pair = pair_item("train", index)
        truths[str(pair.statement)] = pair.truth
        left, right_count = (pair.statement.noun.count(scene) for scene in (pair.left, pair.right))
        _, (first, second, question), reply = verdict_lesson(pair, verdict=False)
        assert (first == render(pair.left)).all() and (second == render(pair.right)).all()
        assert question == f"{pair.statement} True or False?"
        order = ("same", "more left", "more right")[int(np.sign(left - right_count))]
        assert reply == f"{left} left {right_count} right, {order}: False"
    verdicts: Counter[bool] = Counter()
    for _ in range(3000):
        _, parts, reply = draw_lesson(rng)
        text = str(parts[-1])
        if text.endswith(VERDICT_QUESTION):
            verdict = read_verdict(reply).value
            assert verdict is not None
            verdicts[verdict] += 1
            words = reply.split()
            right.append(_holds(text.removesuffix(VERDICT_QUESTION), int(words[0]), int(words[2])) == verdict)
    assert 0.3 < len(right) / 3000 < 0.5
    assert abs(np.mean(right) - 0.5) < 0.05
    assert abs(verdicts[True] / len(right) - 0.5) < 0.05


def _holds(sentence: str, left: int, right: int) -> bool:
    """The meaning of a sentence, read from its words."""
    if sentence.startswith("Both"):
        return left == right
    if sentence.startswith("Exactly"):
        return (left == 0) != (right == 0)
    if sentence.endswith("in all."):
        return left + right == int(sentence.split()[3])
    return left > right if sentence.startswith("The left") else right > left


def test_captions_leave_out_much_and_say_nothing_false() -> None:
    rng = Random(1)
    scores = []
    for _ in range(500):
        scene = random_scene(rng, [rng.choice(LOOKS) for _ in range(rng.randint(1, 3))], "train")
        caption = vague_caption(rng, scene)
        truth = caption_of(scene).split()
        assert not set(caption.replace(",", "").split()) - {word.strip(",") for word in truth} - {"shape", "and"}
        scores.append(grade_caption(caption, [caption_of(scene)]).score)
    assert 0.25 < np.mean(scores) < 0.45
    # The likeliest choice at every step leaves colour, kind and place out, so the likeliest caption is vague as well.
    assert np.mean([score == 1 for score in scores]) < 0.05


def test_no_test_picture_is_shown() -> None:
    rng = Random(2)
    shown = {part.tobytes() for _ in range(1500) for part in draw_lesson(rng).parts if not isinstance(part, str)}
    test = {render(scene).tobytes() for index in range(512) for scene in _pair("test", index)}
    assert len(shown) > 1500 and len(test) > 900 and not shown & test


def _pair(split: str, index: int) -> tuple[Any, Any]:
    pair = pair_item(split, index)  # type: ignore[arg-type]
    return pair.left, pair.right


# --- how it is asked
