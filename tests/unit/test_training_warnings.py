"""What a run says about figures that usually mean a mistake."""

from __future__ import annotations

import pytest

from rl_vlm.runs.policy import EqualRewards, blind


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
