"""The reward as a weighted sum of parts: by hand values, from the environment, built in, and registered for whole groups."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from task_support import episode

from rl_vlm.config import RewardSection
from rl_vlm.envs.errors import EnvError, reward_parts
from rl_vlm.rollout.env_pool import GroupFailedError
from rl_vlm.rollout.reward_parts import REWARD_PARTS, AnsweredGroup, register_reward_part
from rl_vlm.rollout.scoring import score_group, try_parts
from rl_vlm.types import Trajectory, TrajectoryGroup, TrajectoryStatus, UserInputError

TEXT: Any = SimpleNamespace(codec=SimpleNamespace(decode=lambda ids: "-".join(map(str, ids))))
POLICY: Any = SimpleNamespace()


def score(*members: Trajectory, length_budget: int = 0, **weights: float) -> TrajectoryGroup:
    settings = RewardSection(weights=weights, length_budget=length_budget)
    return asyncio.run(score_group(TrajectoryGroup("g", 0, list(members)), settings, POLICY, TEXT))


def with_parts(one: Trajectory, *parts: dict[str, float], well_formed: tuple[bool, ...] = ()) -> Trajectory:
    forms = well_formed or (True,) * len(one.turns)
    turns = [
        replace(turn, parts=tuple(given.items()), well_formed=form)
        for turn, given, form in zip(one.turns, parts, forms, strict=True)
    ]
    return replace(one, turns=tuple(turns))


@pytest.fixture
def registered() -> Iterator[None]:
    before = dict(REWARD_PARTS)
    yield
    REWARD_PARTS.clear()
    REWARD_PARTS.update(before)


def test_without_weights_a_group_stays_as_it_is() -> None:
    group = TrajectoryGroup("g", 0, [episode("a")])
    assert asyncio.run(score_group(group, RewardSection(), POLICY, TEXT)) is group


def test_the_environments_parts_are_paid_at_their_turns() -> None:
    one = with_parts(episode("a", (0.0, 1.0)), {"answer": 0.0, "style": 2.0}, {"answer": 1.0, "style": -1.0})
    (scored,) = score(one, answer=1.0, style=0.1).trajectories
    assert [turn.reward for turn in scored.turns] == pytest.approx([0.2, 0.9])
    (both,) = score(one, answer=1.0, env=0.5).trajectories
    assert [turn.reward for turn in both.turns] == pytest.approx([0.0, 1.5])


def test_format_is_the_share_of_well_formed_turns_and_paid_once() -> None:
    one = with_parts(episode("a", (0.0, 1.0, 0.0, 0.0)), {}, {}, {}, {}, well_formed=(True, False, True, True))
    (scored,) = score(one, env=1.0, format=0.4).trajectories
    assert [turn.reward for turn in scored.turns] == pytest.approx([0.0, 1.0, 0.0, 0.3])


def test_length_counts_tokens_over_the_budget() -> None:
    scored = score(episode("a", tokens=12), episode("b", tokens=3), env=1.0, length=-0.01, length_budget=10)
    assert scored.rewards == pytest.approx([0.98, 1.0])


def test_relative_length_equals_the_formula_of_its_paper() -> None:
    # Lengths 2, 4, 6: λ = 0.5, 0, -0.5; wrong answers get at most 0.
    right = score(*(episode(str(n), (1.0,), n) for n in (2, 4, 6)), relative_length=1.0)
    wrong = score(*(episode(str(n), (0.0,), n) for n in (2, 4, 6)), relative_length=1.0)
    assert right.rewards == pytest.approx([0.5, 0.0, -0.5]) and wrong.rewards == pytest.approx([0.0, 0.0, -0.5])
    assert score(episode("a"), episode("b"), relative_length=1.0).rewards == pytest.approx([0.0, 0.0])


def test_what_was_correct_stays_so_under_any_weights() -> None:
    scored = score(episode("a", (1.0,), 5), episode("b", (0.0,), 5), episode("c", (0.0,), 5, correct=True), length=2.0)
    assert scored.rewards == pytest.approx([10.0, 10.0, 10.0])
    assert [one.correct for one in scored.trajectories] == [True, False, True]


@pytest.mark.usefixtures("registered")
def test_a_group_reward_sees_all_answers_and_may_wait() -> None:
    seen: list[AnsweredGroup] = []

    @register_reward_part("rank")
    async def rank(answered: AnsweredGroup) -> list[float]:
        await asyncio.sleep(0)
        seen.append(answered)
        return [float(place) for place in np.argsort(np.argsort([len(a[-1]) for a in answered.answers]))]

    scored = score(episode("a", (0.0, 1.0), 3), episode("b", (1.0,), 2), env=1.0, rank=0.5)
    assert seen[0].answers == (("1-2-3", "5-6-7"), ("1-2",)) and seen[0].policy is POLICY
    assert scored.rewards == pytest.approx([1.5, 1.0])
    assert [turn.reward for turn in scored.trajectories[0].turns] == pytest.approx([0.0, 1.5])


@pytest.mark.usefixtures("registered")
def test_the_environments_part_wins_over_a_registered_one_of_its_name() -> None:
    one = with_parts(episode("a"), {"format": 0.25}, well_formed=(False,))
    assert score(one, format=1.0).rewards == pytest.approx([0.25])


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (lambda answered: [1.0], r"gave \[1.0\] for 2 answers: it must give one finite number for each"),
        (lambda answered: [1.0, float("nan")], "one finite number"),
        (lambda answered: 1 / 0, "The reward part broken raised ZeroDivisionError"),
        (lambda answered: ["a", "b"], r"gave \['a', 'b'\] for 2 answers"),
    ],
)
def test_a_broken_group_reward_costs_the_group_and_says_why(answer: Any, sentence: str) -> None:
    register_reward_part("broken")(answer)
    with pytest.raises(GroupFailedError, match=sentence) as failed:
        score(episode("a"), episode("b"), broken=1.0)
    assert failed.value.reason == "reward_part"


@pytest.mark.usefixtures("registered")
def test_parts_are_tried_before_a_run_and_what_only_an_episode_has_is_no_fault() -> None:
    settings = RewardSection(weights={"tried": 1.0, "format": 1.0})
    register_reward_part("tried")(lambda answered: [len(one) for one in answered.group])  # it is no list
    with pytest.raises(UserInputError, match=r"tried does not run: .*test_scoring.py, line"):
        try_parts(settings, TEXT)
    register_reward_part("tried")(lambda answered: [one.info["colour"] for one in answered.group.trajectories])
    try_parts(settings, TEXT)


def test_a_part_that_nobody_gives_is_an_error_and_no_silent_zero() -> None:
    with pytest.raises(GroupFailedError, match="answr"):
        score(with_parts(episode("a"), {"answer": 1.0}), answr=1.0)
    cut_off = replace(episode("a"), status=TrajectoryStatus.TRUNCATED)  # before the environment could say anything
    assert score(cut_off, answer=1.0).rewards == pytest.approx([0.0])


def test_parts_that_an_environment_gives_are_checked() -> None:
    assert reward_parts({"reward_parts": {"a": np.float32(0.5), "b": True}}) == (("a", 0.5), ("b", 1.0))
    assert reward_parts({}) == ()
    for wrong in ([("a", 1.0)], {"a": "x"}, {"a": float("inf")}, {"a": None}):
        with pytest.raises(EnvError, match="reward"):
            reward_parts({"reward_parts": wrong})
