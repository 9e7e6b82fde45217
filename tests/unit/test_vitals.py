"""What alerts look at, by hand-computed values; names and bounds of the metrics."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from tables import table

from rl_vlm.config import PolicyConfig
from rl_vlm.monitoring import ray_metrics
from rl_vlm.monitoring.display import Trend
from rl_vlm.monitoring.ray_metrics import FAMILIES, OWN, RunMetrics, series_of
from rl_vlm.runs.hints import NotFiniteError, SkippedSteps, blind, equal_rewards
from rl_vlm.serving import counters as serving
from rl_vlm.serving.ray_metrics import PREFIX

TABLES = table("vitals")

ROOT = Path(__file__).resolve().parents[2]


def test_the_best_value_is_a_smoothed_one_and_comes_after_the_start() -> None:
    trend = Trend()
    trend.add(math.nan)
    assert (trend.start, trend.smoothed, trend.best) == (None, None, None)
    for reward, smoothed in ((5.0, 5.0), (0.0, 2.5), (0.0, 5 / 3), (0.0, 1.25), (0.0, 1.0)):
        trend.add(reward)
        assert trend.start == trend.smoothed == pytest.approx(smoothed) and trend.best is None
    for _ in range(50):
        trend.add(1.0)
    assert trend.best == trend.smoothed == pytest.approx(1.0)
    trend.add(0.0)
    assert (trend.start, trend.smoothed, trend.best) == pytest.approx((1.0, 0.9, 1.0))


@pytest.mark.parametrize(("figure", "part", "metric", "name", "found_part"), TABLES["where_a_metric_goes"])
def test_where_a_metric_goes(figure: str, part: str, metric: str, name: str, found_part: str) -> None:
    found = series_of(figure, part)
    assert (PREFIX + found.metric, found.name, found.part) == (metric, name, found_part)


OWN_METRICS = {f"{PREFIX}{first}_{rest}" for first, names in OWN.items() for rest in names.split()}
FAMILY_METRICS = {PREFIX + first for first in FAMILIES}


def test_every_figure_that_the_code_names_has_a_metric_of_a_bounded_list() -> None:
    source = "".join(path.read_text() for path in (ROOT / "rl_vlm").rglob("*.py"))
    firsts = [*(name for name in FAMILIES if name != "metric")]
    figures = set(re.findall(rf'"((?:{"|".join(firsts)})/[a-z_]+)"', source))
    assert len(figures) > 80
    assert {PREFIX + series_of(figure).metric for figure in figures} <= OWN_METRICS | FAMILY_METRICS
    # Those of the learner's statistics have metrics of their own.
    assert all(
        not series_of(figure).name
        for figure in figures
        if figure.startswith(("policy/", "mismatch/", "critic/", "replay/"))
    )
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in OWN_METRICS | FAMILY_METRICS)


# --- Rules and dashboard ask for metrics that the code has, and the dashboard's file is the one that its script writes


FOLDER = Path(__file__).resolve().parents[2] / "cluster" / "monitoring"
DOCS = FOLDER.parents[1] / "docs" / "monitoring.md"
RULES = [rule for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
DASHBOARD = json.loads((FOLDER / "grafana_dashboard.json").read_text())
QUERIES = {
    (panel["title"], target["refId"]): target["expr"]
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", [])
}


@pytest.fixture
def known(shown: dict[str, float], tmp_path: Path) -> set[str]:
    """The names of all series as Prometheus sees them."""
    figures = RunMetrics(PolicyConfig(), tmp_path, 10)
    for iteration in range(6):
        figures.add(iteration, {"reward/mean": 0.5, "mismatch/kl": 1e-3})
    figures.close()
    histograms = {f"{name}_{part}" for name in serving.HISTOGRAMS for part in ("bucket", "sum", "count")}
    replicas = {f"rl_vlm_{name}" for name in {*serving.GAUGES, *serving.COUNTERS} | histograms}
    return {f"ray_{name}" for name in OWN_METRICS | FAMILY_METRICS | replicas | {PREFIX + name for name in shown}}


@pytest.mark.parametrize("expr", [*QUERIES.values(), *(rule["expr"] for rule in RULES)])
def test_queries_name_metrics_that_exist(expr: str, known: set[str]) -> None:
    named = set(re.findall(r"\bray_rl_vlm_[a-z0-9_]+", expr))
    recorded = {rule["record"] for rule in RULES if "record" in rule}
    assert named <= known
    assert set(re.findall(r"\brl_vlm:[a-z_]+", expr)) <= recorded
    assert named or "rl_vlm:" in expr or "ray_node_" in expr


def test_names_of_the_tag_name_are_logged() -> None:
    source = "".join(path.read_text() for path in (FOLDER.parents[1] / "rl_vlm").rglob("*.py"))
    for expr in (*QUERIES.values(), *(rule["expr"] for rule in RULES)):
        for name in re.findall(r'name="(\w+)"', expr):
            assert f'"{name}"' in source or f"/{name}" in source, name


def test_every_alert_says_what_to_do_and_is_in_the_docs_and_has_a_test() -> None:
    page, tests = DOCS.read_text(), (FOLDER / "alerts_test.yml").read_text()
    assert len(ALERTS) == 9
    for name, rule in ALERTS.items():
        assert len(rule["annotations"]["description"]) > 40 and rule["labels"]["severity"] in ("warning", "critical")
        assert f"`{name}`" in page, name
        assert f'alertname="{name}"' in tests, name


# --- A run's figures as Ray metrics, with gauges that only remember


class Clock:
    """A wall clock that can be set, beside one that only goes forward."""

    wall, forward = 1e9, 0.0

    def advance(self, seconds: float) -> None:
        self.wall, self.forward = self.wall + seconds, self.forward + seconds


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    values: dict[str, float] = {}

    class Gauge:
        def __init__(self, name: str, description: str, tag_keys: Any) -> None:
            self._name = name.removeprefix("rl_vlm_")

        def set(self, value: float, tags: Any) -> None:
            values[self._name] = value

        def set_default_tags(self, tags: Any) -> None:
            pass

    monkeypatch.setattr(ray_metrics, "Gauge", Gauge)
    return values


def test_a_clock_that_is_set_does_not_change_what_an_iteration_took(
    shown: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour per iteration would silence the alert about a run without progress for ten hours."""
    clock = Clock()
    time = SimpleNamespace(time=lambda: clock.wall, monotonic=lambda: clock.forward)
    monkeypatch.setattr(ray_metrics, "time", time)
    figures = RunMetrics(PolicyConfig(), tmp_path, 10)
    for iteration, jump in ((1, 0.0), (2, 3600.0), (3, -7200.0)):
        clock.advance(2.0)
        clock.wall += jump
        figures.add(iteration, {"reward/mean": 0.5})
    assert shown["iteration_seconds"] == pytest.approx(2.0)
    assert shown["last_progress_timestamp_seconds"] == clock.wall
    figures.close()


# --- What a run says about figures that usually mean a mistake


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


@pytest.mark.parametrize(
    ("shares", "told"),
    [
        ([1.0] * 5, True),
        ([1.0] * 4, False),
        ([1.0] * 6, False),  # it was told before
        ([1.0, 1.0, 0.75, 1.0, 1.0], False),  # something was learned from
    ],
)
def test_a_start_without_differences_is_told_once(shares: list[float], told: bool) -> None:
    assert bool(equal_rewards(shares, 0.0)) is told


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
