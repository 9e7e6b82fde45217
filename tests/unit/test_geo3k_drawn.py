"""Drawn geometry: the figures say what the answers say, the text gives nothing away, and train and test never meet."""

from __future__ import annotations

import cmath
import math
import re
from collections import Counter
from random import Random
from typing import get_args

import pytest
from tables import table

from rl_vlm.envs.errors import check_step
from rl_vlm.rewards.math import grade_turns
from rl_vlm.zoo.geo3k.drawn import LEAST_SIZE, LEVELS, AngleStep, Problem, drawn_problem
from rl_vlm.zoo.geo3k.environment import Geo3kEnv
from rl_vlm.zoo.shapes.environment import format_call


def made(make, step: int, count: int = 60) -> list[Problem]:
    return [make(Random(f"{make.__name__} {number}"), step) for number in range(count)]


def opening(vertex: complex, one: complex, other: complex) -> float:
    """Degrees between two rays, measured in the figure."""
    return abs(math.degrees(cmath.phase((one - vertex) / (other - vertex))))


# Figures and answers


@pytest.mark.parametrize("step", get_args(AngleStep))
@pytest.mark.parametrize("make", [make for level in (1, 2, 4) for make in LEVELS[level]])
def test_every_labelled_angle_measures_what_its_label_says(make, step):
    for problem in made(make, step):
        assert len(problem.figure.angles) >= len(problem.figure.labels) > 0
        for one in problem.figure.labels:
            said = float(problem.answer if one.text == "x" else one.text)
            vertices = [angle for angle in problem.figure.angles if angle[0] == one.at]
            assert any(opening(*angle) == pytest.approx(said) for angle in vertices), problem
        assert [one.text for one in problem.figure.labels].count("x") == 1
        assert all(number % step == 0 for number in problem.numbers)


def test_side_labels_of_a_right_triangle_measure_its_sides():
    asked = Counter()
    for problem in made(LEVELS[3][0], 1):
        for one in problem.figure.labels:
            said = float(problem.answer if one.text == "x" else one.text)
            (line,) = [line for line in problem.figure.lines if sum(line) / 2 == one.at]
            assert abs(line[1] - line[0]) == pytest.approx(said)
            asked[one.text == "x", problem.figure.right_angles[0][0] in line] += 1
        assert opening(*problem.figure.right_angles[0]) == pytest.approx(90)
    assert asked[True, True] > 10 and asked[True, False] > 10  # legs and hypotenuses are asked


def test_areas_are_those_of_the_figures():
    triangle, circle, rectangle = LEVELS[5]
    for problem in made(triangle, 1):
        (base, height), (foot, top) = (max(problem.numbers), min(problem.numbers)), problem.figure.dashed[0]
        assert abs(top - foot) == pytest.approx(min(problem.numbers))
        assert float(problem.answer) == base * height / 2
    for problem in made(circle, 1):
        (number,) = problem.numbers
        (line,), ((_, radius),) = problem.figure.lines, problem.figure.circles
        whole = abs(line[1] - line[0]) == 2 * radius
        assert problem.answer == rf"{(number / 2 if whole else number) ** 2:.0f}\pi"
    for problem in made(rectangle, 1):
        side, diagonal = problem.numbers
        assert float(problem.answer) == pytest.approx(side * math.sqrt(diagonal**2 - side**2))
    kinds = {problem.text for make in LEVELS[5] for problem in made(make, 1, 3)}
    assert kinds == {f"Find the area of the {what}." for what in ("triangle", "circle", "rectangle")}


def test_no_constant_answer_is_right_often_and_the_text_holds_no_number():
    for level in LEVELS:
        env = Geo3kEnv(level=level, image_size=LEAST_SIZE[level], prompt="none")
        answers: Counter[str] = Counter()
        for index in range(150):
            observation, _ = env.reset(options={"index": index, "split": "train"})
            assert not re.search(r"\d", observation.messages[0].text)
            answers[check_step(env.step("?"))[4]["truth"]] += 1
        assert answers.most_common(1)[0][1] <= (30 if level in (3, 4) else 15), (level, answers)


# Items


@pytest.mark.parametrize(("level", "step"), [(level, step) for level in LEVELS for step in (1, 5, 10)])
def test_no_test_problem_is_trained_on_in_another_pose(level, step):
    size = LEAST_SIZE[level]
    drawn = {
        split: {
            (one.kind, *one.numbers, one.answer)
            for one, _ in (drawn_problem((level,), step, size, split, i) for i in range(60))
        }
        for split in ("train", "test")
    }
    assert len(drawn["train"]) > 5 and drawn["test"] and not drawn["train"] & drawn["test"]


@pytest.mark.parametrize("level", LEVELS)
def test_the_right_answer_is_paid_with_the_tool_and_without(level):
    for tool in (True, False):
        env = Geo3kEnv(level=level, scoring_tool=tool)
        for index in range(4):
            env.reset(options={"index": index, "split": "train"})
            truth = check_step(env.step("?"))[4]["truth"]
            env.reset(options={"index": index, "split": "train"})
            assert check_step(env.step(rf"Answer: \boxed{{{truth}}}"))[1] == 1.0


# Exploits of the drawn problems, whose answers are few: lists, hedges, forms that could stand for any number, forged replies

THIRD_ANGLES = tuple(range(20, 141, 20))
NOT_PAID = table("drawn_answers")["not_paid"]


@pytest.mark.parametrize("name", NOT_PAID)
def test_no_hedge_is_right_for_any_third_angle(name: str) -> None:
    assert not [angle for angle in THIRD_ANGLES if grade_turns([NOT_PAID[name]], str(angle)).correct]


def test_of_several_boxes_or_an_equation_at_most_one_value_counts() -> None:
    for text in (
        "".join(rf"\boxed{{{angle}}}" for angle in THIRD_ANGLES),
        rf"\boxed{{x = {' = '.join(map(str, THIRD_ANGLES))}}}",
        "\\boxed{20}\u200b\\boxed{40}",
        r"\boxed{20}\\boxed{60",
    ):
        assert sum(grade_turns([text], str(angle)).correct for angle in THIRD_ANGLES) <= 1, text


@pytest.mark.parametrize("form", ["{}", "{}°", r"{}^\circ", "{} degrees", "x = {}", "{}.0"])
def test_honest_forms_of_an_angle_are_right_for_it_alone(form: str) -> None:
    text = rf"So the third angle is \boxed{{{form.format(40)}}}."
    assert [angle for angle in THIRD_ANGLES if grade_turns([text], str(angle)).correct] == [40]


def test_calls_alone_pay_nothing_and_a_turn_tries_one_value() -> None:
    env = Geo3kEnv(level=1, angle_step=20, image_size=64)
    env.reset(options={"index": 0, "split": "train"})
    truth = check_step(env.step("?"))[4]["truth"]
    others = [str(angle) for angle in THIRD_ANGLES if str(angle) != truth]
    env.reset(options={"index": 0, "split": "train"})
    reply = check_step(env.step("".join(map(format_call, [truth, *others]))))[4]["reply"]
    assert reply.startswith("Score: 0.") and others[-1] in reply and truth not in reply.replace(others[-1], "")
    assert check_step(env.step(format_call(truth)))[1] == 0.0
    _, reward, _, _, info = check_step(env.step(format_call(truth)))
    assert (reward, info["correct"]) == (0.0, False)
