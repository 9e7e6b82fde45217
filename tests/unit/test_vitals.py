"""What alerts look at, by hand-computed values; names and bounds of the metrics."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from rl_vlm.monitoring.display import MismatchGrowth, MovingAverage, RewardTrend
from rl_vlm.monitoring.ray_metrics import FAMILIES, PREFIX, all_metrics, series_of

ROOT = Path(__file__).resolve().parents[2]


def test_a_moving_average_begins_at_its_first_value() -> None:
    average = MovingAverage(0.9)
    assert average.value is None
    average.add(math.nan)
    assert average.value is None
    average.add(2.0)
    assert average.value == pytest.approx(2.0)
    average.add(4.0)
    assert average.value == pytest.approx((0.9 * 0.1 * 2 + 0.1 * 4) / (0.9 * 0.1 + 0.1))


def test_growth_is_relative_to_the_first_five_values() -> None:
    growth = MismatchGrowth()
    assert [growth.add(kl) for kl in (1e-3, 2e-3, math.nan, 3e-3, 4e-3, 5e-3)] == [None] * 6
    assert growth.start.value == pytest.approx(3e-3)
    assert growth.add(3e-2) == pytest.approx(10)
    assert growth.add(math.nan) is None


def test_the_best_reward_is_a_smoothed_one_and_comes_after_the_start() -> None:
    trend = RewardTrend()
    first = [trend.add(reward) for reward in (5.0, 0.0, 0.0, 0.0, 0.0)]
    assert "reward_best" not in first[-1] and first[-1]["reward_start"] == 1.0
    rising = [trend.add(1.0) for _ in range(50)][-1]
    assert rising["reward_best"] == pytest.approx(rising["reward_smoothed"]) == pytest.approx(1.0, abs=0.1)
    fallen = [trend.add(0.0) for _ in range(50)][-1]
    assert fallen["reward_best"] == pytest.approx(rising["reward_best"])
    assert fallen["reward_smoothed"] < 0.1 and fallen["reward_start"] == 1.0


@pytest.mark.parametrize(
    ("figure", "part", "metric", "name", "found_part"),
    [
        ("reward/mean", "", "rl_vlm_reward_mean", "", "rollout"),
        ("mismatch/kl", "", "rl_vlm_mismatch_kl", "", "learner"),
        ("labels/accuracy", "", "rl_vlm_labels_accuracy", "", "preference"),
        ("weights/version", "", "rl_vlm_weights_version", "", "serving"),
        ("dropped/too_old", "", "rl_vlm_dropped", "too_old", "rollout"),
        ("time/step", "", "rl_vlm_time", "step", "train"),
        ("accuracy/default", "eval", "rl_vlm_accuracy", "default", "eval"),
        ("reward/part/format", "", "rl_vlm_reward", "part/format", "rollout"),
        ("rollout/reached_turn_2", "", "rl_vlm_rollout", "reached_turn_2", "rollout"),
        ("evaluation/seconds", "eval", "rl_vlm_evaluation", "seconds", "eval"),
        ("mine/own number", "", "rl_vlm_metric", "mine/own number", "train"),
        ("bare", "", "rl_vlm_metric", "bare", "train"),
    ],
)
def test_where_a_metric_goes(figure: str, part: str, metric: str, name: str, found_part: str) -> None:
    found = series_of(figure, part)
    assert (found.metric, found.name, found.part) == (metric, name, found_part)


def test_every_figure_that_the_code_names_has_a_metric_of_a_bounded_list() -> None:
    source = "".join(path.read_text() for path in (ROOT / "rl_vlm").rglob("*.py") if path.name != "figure_names.py")
    firsts = [*(name for name in FAMILIES if name != "metric")]
    figures = set(re.findall(rf'"((?:{"|".join(firsts)})/[a-z_]+)"', source))
    assert len(figures) > 80
    assert {series_of(figure).metric for figure in figures} <= all_metrics()
    # Those of the learner's statistics have metrics of their own.
    assert all(
        not series_of(figure).name
        for figure in figures
        if figure.startswith(("policy/", "mismatch/", "critic/", "replay/"))
    )
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", name) and name.startswith(PREFIX) for name in all_metrics())
