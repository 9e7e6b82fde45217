"""A run's figures as Ray metrics, with gauges that only remember."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_vlm.config import PolicyConfig
from rl_vlm.monitoring import ray_metrics
from rl_vlm.monitoring.ray_metrics import RayMetrics


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

    monkeypatch.setattr("ray.util.metrics.Gauge", Gauge)
    return values


def test_a_clock_that_is_set_does_not_change_what_an_iteration_took(
    shown: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour per iteration would silence the alert about a run without progress for ten hours."""
    clock = Clock()
    time = SimpleNamespace(time=lambda: clock.wall, monotonic=lambda: clock.forward)
    monkeypatch.setattr(ray_metrics, "time", time)
    figures = RayMetrics(PolicyConfig(), tmp_path, 10)
    for iteration, jump in ((1, 0.0), (2, 3600.0), (3, -7200.0)):
        clock.advance(2.0)
        clock.wall += jump
        figures.add(iteration, {"reward/mean": 0.5})
    assert shown["iteration_seconds"] == pytest.approx(2.0)
    assert shown["last_progress_timestamp_seconds"] == clock.wall
    figures.close()
