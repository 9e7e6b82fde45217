"""tools/eyes: pictures, questions and conversations from which the model `eyes` learns."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random

import numpy as np
import pytest
from tools.eyes import brush, captions, cells, scenes
from tools.eyes.kinds import KINDS

from rl_vlm.zoo.qa.environment import QAEnv

PHOTOGRAPHS = [brush.Image.new("RGB", (300, 300), "teal")]


@pytest.fixture(autouse=True)
def plain_photographs(monkeypatch: pytest.MonkeyPatch) -> None:
    """scikit-image, whose photographs are used, is no dependency of the project."""
    monkeypatch.setattr(brush, "photographs", lambda: PHOTOGRAPHS)


def test_there_are_generators_enough() -> None:
    assert len(KINDS) >= 30


@pytest.mark.parametrize("name", KINDS)
def test_a_generator_asks_what_has_one_answer(name: str) -> None:
    for seed in range(30):
        asked = KINDS[name](Random(seed))
        assert asked.question and asked.answer and asked.others and asked.answer not in asked.others
        assert all(32 <= side <= 224 for picture in asked.pictures for side in picture.size)
        again = KINDS[name](Random(seed))
        assert again[1:] == asked[1:]
        for one, other in zip(asked.pictures, again.pictures, strict=True):
            assert np.array_equal(np.asarray(one), np.asarray(other))


def test_each_answer_is_given_by_some_picture() -> None:
    """None of the answers is right most of the time, so that nobody can answer without looking."""
    for name, draw in KINDS.items():
        drawn = [draw(Random(seed)) for seed in range(60)]
        commonest = max(sum(one.answer == answer for one in drawn) for answer in {one.answer for one in drawn})
        assert commonest < 45, name


def test_a_question_about_a_scene_has_the_answer_of_its_things() -> None:
    things = [
        scenes.Thing("circle", "red", 0.2, 0.2, 0.2),
        scenes.Thing("star", "blue", 0.8, 0.5, 0.3),
        scenes.Thing("star", "red", 0.5, 0.85, 0.1),
    ]
    answers = {
        r"colour.*circle": "red", r"shape.* blue|What is the blue thing": "star", r"Where is the red circle": "top left",
        r"part is the blue star": "right", r"(Count|many).*red things": "2", r"(Count|many).*stars": "2",
        r"Is the red circle left of the blue star": "yes", r"Is the red star above the red circle": "no",
        r"colour is (largest|rightmost)": "blue", r"shape is leftmost": "circle", r"more red or more blue": "red",
    }  # fmt: skip
    asked = {pair for seed in range(60) for pair in scenes.questions(Random(seed), things)}
    for pattern, answer in answers.items():
        found = {given for question, given in asked if re.search(pattern, question)}
        assert found == {answer}, pattern
    described = {scenes.described(Random(seed), things)[1] for seed in range(9)}
    assert described == {"red circle, blue star, red star", "red circle top left, blue star right, red star bottom"}


def test_each_cell_is_named_after_the_thing_that_covers_its_middle() -> None:
    seen = [
        scenes.Thing("star", "red", 30 / 96, 16 / 96, 36 / 96),
        scenes.Thing("7", "blue", 80 / 96, 80 / 96, 30 / 96),
    ]
    star = {"what": "star", "colour": "red", "row": "top"}
    seven = {"what": "7", "colour": "blue", "row": "bottom", "column": "right", "middle": "one"}
    nothing = {"what": cells.NOTHING}
    assert cells.named(seen, 3) == [
        star | {"column": "left", "middle": "one"}, star | {"column": "middle", "middle": "part"}, nothing,
        *[nothing] * 3,
        nothing, nothing, seven,
    ]  # fmt: skip
    for seed in range(30):
        image, drawn = cells.mosaic(Random(seed), 96)
        assert image.size == (96, 96)
        assert all(one.shape in cells.GROUPS["what"] for one in drawn)
        named = cells.named(drawn, 3)
        assert sum(cell.get("middle") == "one" for cell in named) >= 1


def test_captions_name_every_thing_and_are_questions_of_qa(tmp_path: Path) -> None:
    captions.main([str(tmp_path), "--count", "20"])
    for line in (tmp_path / "described/train.jsonl").read_text().splitlines():
        sentence = json.loads(line)["messages"][1]["content"]
        assert re.fullmatch(r"There is (an? \w+ \w+ (at|in) the [a-z ]+?(, | and |\.))+", sentence), sentence
    env = QAEnv(str(tmp_path / "asked"))
    for index in range(20):
        info = env.reset(options={"index": index, "split": "train"})[1]
        assert env.step(f"There is a thing. <answer>{info['reference']}</answer>")[1] == 1.0
