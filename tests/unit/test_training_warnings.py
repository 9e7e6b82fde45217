"""What a run says about figures that usually mean a mistake."""

from __future__ import annotations

import pytest

from rl_vlm.runs.policy import EqualRewards, NotFiniteError, SkippedSteps, blind


@pytest.mark.parametrize(
    ("unseen", "gap", "high", "said"),
    [
        (0.25, 0.0, 0.05, "0.25 are right with blank ones, +0.00 with the true ones"),
        (0.25, 0.5, 0.7, ""),
        (0.0, 0.05, 0.09, "0.00 are right with blank ones, +0.05"),
        (0.0, 0.0, 0.0, ""),  # all wrong: that says nothing of images
    ],
)
def test_answers_that_do_not_need_images(unseen: float, gap: float, high: float, said: str) -> None:
    results = {"sight/accuracy_blank": unseen, "sight/accuracy_gap": gap, "sight/accuracy_gap_high": high}
    assert said in blind(results) and bool(said) == bool(blind(results))


def told(shares: list[float], first: int = 1) -> list[int]:
    start = EqualRewards()
    return [
        iteration
        for iteration, share in enumerate(shares, first)
        if start.look(iteration, {"reward/zero_advantage_groups": share, "reward/mean": 0.0})
    ]


def test_a_start_without_differences_is_told_once() -> None:
    assert told([1.0] * 12) == [5]
    assert told([1.0, 1.0, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]) == []  # something was learned from
    assert told([1.0] * 12, first=21) == []  # a resumed run: its task may be solved


def steps(skipped: int, taken: int) -> dict[str, float]:
    return {"policy/skipped_steps": float(skipped), "policy/optimizer_steps": float(taken)}


def test_a_skipped_step_is_told_once_and_ten_in_a_row_end_the_run() -> None:
    watch = SkippedSteps()
    assert [bool(watch.look(k, steps(*each))) for k, each in enumerate([(0, 4), (1, 3), (4, 0), (4, 0)])] == [
        False, True, False, False,
    ]  # fmt: skip
    with pytest.raises(NotFiniteError):
        watch.look(5, steps(4, 0))
    watch = SkippedSteps()
    for k in range(20):  # each iteration takes one
        watch.look(k, steps(3, 1))


def test_a_run_without_a_single_finite_step_is_no_success() -> None:
    watch = SkippedSteps()
    watch.look(1, steps(4, 0))
    with pytest.raises(NotFiniteError):
        watch.check()
    watch.look(2, steps(0, 4))
    watch.check()
