"""Shapes-v0: what is drawn, what is asked, what is paid, and that train and test drawings never meet."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from rl_vlm.types import EncodedImage
from rl_vlm.zoo import drawing
from rl_vlm.zoo.shapes import environment
from rl_vlm.zoo.shapes.environment import ShapesEnv, shapes_item


def pixels_of(image: object) -> np.ndarray:
    assert isinstance(image, EncodedImage)
    return np.asarray(image.to_pil())


def num_blobs(pixels: np.ndarray) -> int:
    """Connected regions that are not background, by flood fill."""
    todo = {(int(y), int(x)) for y, x in np.argwhere((pixels != drawing.BACKGROUND).any(-1))}
    blobs = 0
    while todo:
        blobs += 1
        front = [todo.pop()]
        while front:
            y, x = front.pop()
            for near in ((y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)):
                if near in todo:
                    todo.remove(near)
                    front.append(near)
    return blobs


def opened(index: int = 0, split: str = "train", **kwargs: object) -> tuple[ShapesEnv, str]:
    """An environment at an item, and the right answer of that item."""
    env = ShapesEnv(**kwargs)  # type: ignore[arg-type]
    env.reset(options={"index": index, "split": split})
    return env, shapes_item(env.task, split, index, env.seed, env.image_size).answer  # type: ignore[arg-type]


def wrong(answer: str) -> str:
    return "1" if answer != "1" else "2"


@pytest.mark.parametrize("image_size", [64, 65, 150])
def test_the_right_count_is_the_number_of_separate_regions(image_size: int) -> None:
    for index in range(60):
        item = shapes_item("count", "train", index, image_size=image_size)
        assert num_blobs(pixels_of(item.image)) == int(item.answer)


def test_perception_answers_hold_in_the_pixels() -> None:
    rng = drawing.stable_rng("test")
    kinds: Counter[str] = Counter()
    for _ in range(300):
        question, answer, pixels = environment.perception_question(rng)
        kinds[question.split()[1]] += 1
        painted = (pixels != drawing.BACKGROUND).any(-1)
        in_quadrant = [painted[r : r + 32, c : c + 32].any() for r in (0, 32) for c in (0, 32)]
        if question == "What colour?":
            assert {tuple(pixel) for pixel in pixels[painted].tolist()} == {drawing.COLOURS[answer]}
        elif question == "Which corner?":
            assert in_quadrant == [corner == answer for corner in drawing.CORNERS]
        else:
            corner = next(number for number, name in enumerate(drawing.CORNERS) if name in question)
            assert answer == ("yes" if in_quadrant[corner] else "no")
    assert set(kinds) == {"colour?", "corner?", "a"}


def test_any_constant_answer_is_right_one_time_in_four() -> None:
    for task in ("count", "rule"):
        answers = Counter(shapes_item(task, "test", index).answer for index in range(512))  # type: ignore[arg-type]
        assert answers == {"1": 128, "2": 128, "3": 128, "4": 128}


def test_the_rule_gives_every_colour_its_own_number_and_depends_on_the_seed() -> None:
    rules = [environment.rule_numbers(seed) for seed in range(8)]
    assert all(sorted(rule.values()) == ["1", "2", "3", "4"] for rule in rules)
    assert len({tuple(rule.items()) for rule in rules}) > 1
    for index in range(20):
        item = shapes_item("rule", "train", index, seed=3)
        pixels = pixels_of(item.image)
        colour = tuple(pixels[(pixels != drawing.BACKGROUND).any(-1)][0].tolist())
        name = next(name for name, value in drawing.COLOURS.items() if value == colour)
        assert environment.rule_numbers(3)[name] == item.answer


SPACED = '<tool_call>\n{{"name": "calc_score", "arguments": {{"answer": "{0}"}}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("settings", "replies", "rewards"),
    [
        ({}, [" <answer>{0}</answer>\n"], [1.0]),
        ({"turns": 2}, ["<answer>{1}</answer>", "<answer>{0}</answer>"], [0.0, 0.5]),
        ({"turns": 2}, ["<answer>{1}</answer>", "<answer>{1}</answer>"], [0.0, 0.0]),
        ({"turns": 2, "tool": True}, [SPACED.replace("{0}", "{1}"), SPACED], [0.2, 0.5]),
    ],
)
def test_answers_are_paid_by_their_turn(settings: dict[str, bool], replies: list[str], rewards: list[float]) -> None:
    env, answer = opened(3, **settings)
    steps = [env.step(reply.format(answer, wrong(answer))) for reply in replies]
    assert [step[1] for step in steps] == rewards
    assert [step[2] for step in steps] == [False] * (len(steps) - 1) + [True] and not steps[-1][3]
    told = {"correct": rewards[-1] > 0, "well_formed": True, "answer": answer, "turn": len(steps)}
    assert steps[-1][0].messages == () and steps[-1][4] == told
    for step in steps[:-1]:
        role = "tool" if "tool" in settings else "user"
        assert [(message.role, message.text) for message in step[0].messages] == [(role, "Wrong. Try again.")]


@pytest.mark.parametrize(
    ("tool", "text"),
    [
        *((False, text) for text in (
            "{0}", "I see <answer>{0}</answer>", "<answer>{0}</answer> <answer>{0}</answer>", "<answer>{0}", "",
        )),
        *((True, text) for text in (
            "<answer>{0}</answer>",
            "<tool_call>{{}}</tool_call>",
            '<tool_call>["{0}"]</tool_call>',
            '<tool_call>{{"name":"other","arguments":{{"answer":"{0}"}}}}</tool_call>',
            '<tool_call>{{"name":"calc_score","arguments":["{0}"]}}</tool_call>',
            '<tool_call>{{"name":"calc_score","arguments":{{"answer":{0}}}}}</tool_call>',
            '<tool_call>{{"name":"calc_score","arguments":{{"answer":"{0}"}}}}',
        )),
    ],
)  # fmt: skip
def test_anything_but_the_whole_answer_or_call_pays_nothing(tool: bool, text: str) -> None:
    env, answer = opened(1, turns=2, tool=tool)
    observation, reward, terminated, _, info = env.step(text.format(answer))
    assert (reward, terminated, info["well_formed"], info["correct"]) == (0.0, False, False, False)
    assert [(message.role, message.text) for message in observation.messages] == [("user", "Wrong. Try again.")]
