"""Zoom-v0: what the overview hides and a crop shows, how crops are asked for, what is paid, rows of data sets, and the splits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from test_data import png
from test_shapes import pixels_of

import rl_vlm
from rl_vlm.envs.base import StepResult, VisionEnv
from rl_vlm.types import Message
from rl_vlm.zoo.drawing import CORNERS
from rl_vlm.zoo.zoom.crops import QUADRANTS, Crop, cut, overview, read_crop
from rl_vlm.zoo.zoom.flags import PATTERNS, RED, WHITE, FlagScene, flag_item, random_scene, render_scene


def painted(scene: FlagScene, zoom: int = 4) -> Image.Image:
    return Image.fromarray(render_scene(scene, zoom))


def with_pattern(scene: FlagScene, pattern: str) -> FlagScene:
    return replace(scene, flag=replace(scene.flag, pattern=pattern))


def call(x: float, y: float, w: float, h: float) -> str:
    return f'<tool_call>\n{{"name": "crop", "arguments": {{"x": {x}, "y": {y}, "w": {w}, "h": {h}}}}}\n</tool_call>'


def opened(index: int = 1, split: str = "train", **kwargs: Any) -> tuple[VisionEnv, Message]:
    env = rl_vlm.make("Zoom-v0", **kwargs)
    observation, _ = env.reset(options={"index": index, "split": split})
    (message,) = observation.messages
    return env, message


# --- what is drawn


@pytest.mark.parametrize(("view_size", "zoom"), [(64, 4), (64, 2), (128, 4)])
def test_the_overview_of_a_hard_item_is_the_same_for_every_pattern(view_size: int, zoom: int) -> None:
    rng = Random(0)
    for _ in range(10):
        scene = random_scene(rng, "rows", True, "train", view_size)
        shown = {overview(painted(with_pattern(scene, pattern), zoom), view_size).png for pattern in PATTERNS}
        assert len(shown) == 1
        whole = {painted(with_pattern(scene, pattern), zoom).tobytes() for pattern in PATTERNS}
        assert len(whole) == len(PATTERNS)  # the pictures themselves differ


@pytest.mark.parametrize("hard", [False, True])
def test_a_quarter_shows_the_pattern_and_an_easy_overview_does(hard: bool) -> None:
    rng = Random(2)
    for _ in range(12):
        scene = random_scene(rng, "rows", hard, "train")
        home = CORNERS[scene.flag.quadrant]
        pictures = {pattern: painted(with_pattern(scene, pattern)) for pattern in PATTERNS}
        quarters = [pixels_of(cut(picture, QUADRANTS[home], 64)) for picture in pictures.values()]
        views = quarters + ([] if hard else [pixels_of(overview(picture, 64)) for picture in pictures.values()])
        for shown in (views[:5], views[5:]) if not hard else (views,):
            for number, one in enumerate(shown):
                cloth = (one == RED).all(-1) | (one == WHITE).all(-1)
                assert cloth.sum() >= 100  # pure fields, not their mean
                assert all((one != other)[cloth].mean() > 0.15 for other in shown[number + 1 :])
        for corner in set(CORNERS) - {home}:  # the others show nothing of it
            assert len({cut(picture, QUADRANTS[corner], 64).png for picture in pictures.values()}) == 1


def test_patterns_by_hand() -> None:
    expected = {
        "rows": ("####", "....", "####", "...."),
        "columns": ("#.#.", "#.#.", "#.#.", "#.#."),
        "checks": ("#.#.", ".#.#", "#.#.", ".#.#"),
        "bricks": ("##..", "..##", "##..", "..##"),
        "stairs": ("###.", "..#.", "#.##", "#..."),
    }
    scene = random_scene(Random(3), "rows", True, "train")
    flag = replace(scene.flag, x=4, y=6, size=6, quadrant=0)
    for pattern, rows in expected.items():
        pixels = render_scene(replace(scene, flag=replace(flag, pattern=pattern), shapes=()), 4)
        fields = pixels[24:32:2, 16:24:2]  # of two pixels
        assert ["".join("#" if (field == RED).all() else "." for field in row) for row in fields] == list(rows)
        assert ((pixels == RED).all(-1).sum(), (pixels == WHITE).all(-1).sum()) == (288, 288)


def test_the_pattern_does_not_decide_the_split() -> None:
    scene = flag_item("test", 5)
    assert {with_pattern(scene, pattern).split() for pattern in PATTERNS} == {"test"}


# --- crops


def test_a_crop_is_named_in_thousandths_of_the_picture() -> None:
    assert read_crop(f"It is small.\n{call(500, 0, 250.5, 1000)}") == Crop(500, 0, 250.5, 1000)
    assert read_crop("Answer: rows") is None
    assert read_crop("zoom top left") is None  # only the brief form
    for name, (x, y) in zip(CORNERS, ((0, 0), (500, 0), (0, 500), (500, 500)), strict=True):
        assert read_crop(f"See {name}\nzoom {name}.", brief=True) == Crop(x, y, 500, 500)
    for text in ("zoom", "zoom left top", "zooms top left", "zoom top left now", "zoom middle"):
        assert read_crop(text, brief=True) is None


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (call(600, 0, 500, 500), "leaves the picture"),
        (call(-1, 0, 500, 500), "leaves the picture"),
        (call(0, 0, 5, 500), "at least 10"),
        (call(0, 0, 1e9, 500), "numbers from 0 to 1000"),
        (call(0, 0, 500, 500).replace("crop", "zoom"), "no tool 'zoom'"),
        ('<tool_call>{"name": "crop", "arguments": {"x": "0", "y": 0, "w": 500, "h": 500}}</tool_call>', "must be numbers"),
        ('<tool_call>{"name": "crop", "arguments": {"x": true, "y": 0, "w": 500, "h": 500}}</tool_call>', "must be numbers"),
        ('<tool_call>{"name": "crop", "arguments": {"x": 0, "y": 0, "w": 500}}</tool_call>', "exactly the arguments"),
        ('<tool_call>{"name": "crop", "arguments": {"bbox": [0, 0, 500, 500]}}</tool_call>', "exactly the arguments"),
        ('<tool_call>{"name": "crop", "arguments": {"x": NaN, "y": 0, "w": 500, "h": 500}}</tool_call>', "NaN"),
        ("<tool_call>{}", "not closed"),
        (call(0, 0, 10, 1000), "10 times as long"),
    ],
)  # fmt: skip
def test_a_call_that_cannot_be_carried_out_is_answered_counted_and_paid_for(text: str, what: str) -> None:
    env, _ = opened()
    observation, reward, terminated, truncated, info = env.step(text)
    (message,) = observation.messages
    assert what in message.text and message.role == "tool" and not message.images
    assert (reward, terminated, truncated) == (-0.05, False, False)
    assert (info["calls"], info["call_errors"], info["calls_hard"]) == (1, 1, 1)


def test_a_crop_equals_the_pixels_of_the_part() -> None:
    rng = np.random.default_rng(0)
    picture = Image.fromarray(rng.integers(0, 256, (200, 400, 3), dtype=np.uint8))
    quarter = pixels_of(cut(picture, QUADRANTS["bottom right"], 200))
    assert (quarter == np.asarray(picture)[100:, 200:]).all()
    halved = pixels_of(cut(picture, Crop(0, 0, 1000, 1000), 200)).astype(int)
    means = np.asarray(picture, dtype=float).reshape(100, 2, 200, 2, 3).mean((1, 3))
    assert halved.shape == (100, 200, 3) and np.abs(halved - means).max() <= 1
    enlarged = cut(picture, Crop(100, 100, 10, 20), 64)  # 4 by 4 pixels
    assert (enlarged.width, enlarged.height) == (64, 64)
    assert overview(picture, 800).width == 400  # a small picture is not enlarged


# --- the episode


def test_a_hard_item_is_solved_by_a_call_and_an_answer() -> None:
    env, message = opened(3, prompt="brief")
    scene = flag_item("train", 3)
    assert message.text == "Which pattern?" and pixels_of(message.images[0]).shape == (64, 64, 3)
    corner = CORNERS[scene.flag.quadrant]
    observation, reward, terminated, truncated, info = env.step(f"zoom {corner}")
    (reply,) = observation.messages
    assert (reply.role, reply.text, reward, terminated, truncated) == ("tool", "", -0.05, False, False)
    assert (pixels_of(reply.images[0]) == pixels_of(cut(painted(scene), QUADRANTS[corner], 64))).all()
    observation, reward, terminated, truncated, info = env.step(f"Answer: {scene.flag.pattern}")
    assert (reward, terminated, truncated, observation.messages) == (1.0, True, False, ())
    (crop,) = info.pop("crops")
    corners = {"top left": [0, 0], "top right": [0.5, 0], "bottom left": [0, 0.5], "bottom right": [0.5, 0.5]}
    left, top = corners[corner]
    assert crop == {"picture": 1, "of": 0, "box": [left, top, left + 0.5, top + 0.5]}
    assert info == {
        "correct": True, "correct_hard": True, "calls": 1, "calls_hard": 1, "call_errors": 0, "difficulty": "hard", "answer": scene.flag.pattern,
        "reason": "", "well_formed": True, "truth": scene.flag.pattern,
    }  # fmt: skip


def test_the_full_prompt_explains_tool_and_price_and_the_last_turn_is_announced() -> None:
    env, message = opened(1, max_turns=3, call_cost=0.1)
    assert "You have 3 turns" in message.text and "costs 0.1" in message.text
    assert read_crop(message.text) == Crop(250, 0, 500, 500)  # the example is a call
    (first,) = env.step(call(0, 0, 500, 500))[0].messages
    assert "x 0, y 0, w 500, h 500" in first.text and "last turn" not in first.text
    (second,) = env.step(call(0, 0, 500, 2000))[0].messages
    assert second.text.endswith("This is your last turn: answer now.")
    observation, reward, terminated, truncated, info = env.step(call(0, 0, 500, 500))
    assert (reward, terminated, truncated, observation.messages) == (-0.1, False, True, ())
    assert (info["calls"], info["call_errors"], info["correct"], info["reason"]) == (3, 1, False, "out_of_turns")


def test_an_answer_in_the_turn_of_a_call_does_not_count() -> None:
    env, _ = opened(1)
    pattern = flag_item("train", 1).flag.pattern
    assert env.step(f"Answer: {pattern}\n{call(0, 0, 500, 500)}")[1] == -0.05
    assert env.step(f"Answer: {pattern}")[1] == 1


def played(env: VisionEnv, index: int, *actions: str) -> StepResult:
    env.reset(options={"index": index, "split": "test"})
    return [env.step(action) for action in actions][-1]


def test_without_a_call_a_policy_gets_six_tenths_at_most_and_a_constant_answer_a_fifth() -> None:
    """The best that sees the overview alone: it reads easy flags, and all it can do on hard ones is to guess."""
    env = rl_vlm.make("Zoom-v0")
    guess, constant = [], []
    for index in range(100):
        flag = flag_item("test", index).flag
        guess.append(played(env, index, "stairs" if flag.hard else flag.pattern)[1])
        constant.append(played(env, index, "stairs")[1])
    assert np.mean(guess) == pytest.approx(0.6) and np.mean(constant) == pytest.approx(0.2)


# --- rows, arguments, interfaces


def test_rows_of_a_data_set_are_asked_and_cropped(tmp_path: Path) -> None:
    row = {"image": png("blue", (300, 150)), "question": "What does the sign say?", "answer": "Main Street"}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "train.parquet")
    data = str(tmp_path)
    env, message = opened(0, data=data, view_size=100)
    assert message.text.startswith("What does the sign say?\nYou see")
    assert pixels_of(message.images[0]).shape == (50, 100, 3)
    observation, *_, info = env.step(call(0, 0, 250, 500))
    assert pixels_of(observation.messages[0].images[0]).shape == (100, 100, 3)
    assert "calls_easy" not in info and "calls_hard" not in info
    _, reward, *_, info = env.step("Answer: main street.")
    assert (reward, info["difficulty"], info["correct"]) == (1.0, "", True)
    assert opened(0, data=data, prompt="brief")[1].text == "What does the sign say?"
