"""ProgressDisplay: plain lines without a terminal, a panel that fits any terminal."""

import io
import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from rich.console import Console

from rl_vlm.monitoring.display import ProgressDisplay
from rl_vlm.plots.run_curve import curve_figure, draw_curve, smooth

METRICS = {
    "reward/mean": 0.5,
    "rollout/tokens_per_s": 12345.6,
    "rollout/turns": 1.5,
    "weights/version": 7.0,
    "mismatch/kl": 1e-5,
    "dropped/env_crash": 2.0,
    "dropped/too_old": 0.0,
}


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def plain(total=100, start=0):
    clock, out = Clock(), io.StringIO()
    return ProgressDisplay(total, start, Console(file=out, width=80), clock), clock, out


def terminal(width=100, height=30, total=100):
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, force_terminal=True, _environ={"TERM": "xterm"})
    return ProgressDisplay(total, 0, console, Clock()), out


def lines(out):
    return out.getvalue().splitlines()


# Plain lines


def test_a_line_says_what_matters():
    display, clock, out = plain()
    with display:
        display.evaluation(0, {"accuracy/default": 0.25, "accuracy/no tool": 0.1, "accuracy/lost": None, "seconds": 3})
        display.evaluation(5, {"accuracy/default": 0.9, "accuracy/no tool": 0.6})
        clock.now += 60.0  # the next ten iterations take a minute
        display.update(10, METRICS)
        clock.now += 100.0
        display.evaluation(10, {"accuracy/default": 0.9})  # whose time is no iteration's
        clock.now += 60.0
        display.update(20, METRICS)
    said = lines(out)[-1]
    for part in ("20/100", "reward 0.500", "0.250 → 0.900", "no tool 0.100 → 0.600", "12,346 tokens/s", "6.00 s/iteration",
                 "version 7", "1.5 turns", "1.0e-05", "dropped 2 env_crash", "8m 00s left"):  # fmt: skip
        assert part in said, said


@pytest.mark.parametrize(
    ("values", "alarms"),
    [
        ([1e-3] * 8 + [9e-3, 1.1e-2, 5e-2], 1),  # told once
        ([1e-9, 1e-12, 0.0, 1e-9, 1e-10, 1e-7, 9e-4], 0),  # far more than at the start, and still nothing
        ([0.0] * 6 + [1.1e-3], 1),
        ([1e-3, 5e-2, 1e-3, 1e-3, 1e-3, 5e-2], 0),  # the mean of the first five counts
        ([float("nan")] * 9, 0),
        ([1e-3] * 6 + [float("nan"), 2e-2], 1),
    ],
)
def test_a_mismatch_that_grows_tenfold_is_told_once(values, alarms):
    display, _clock, out = plain()
    with display:
        for iteration, value in enumerate(values, start=1):
            display.update(iteration, {"mismatch/kl": value})
    assert out.getvalue().count("Engine and learner disagree") == alarms
    assert out.getvalue().count("algorithm.mismatch=mask") == alarms


def test_accuracy_before_and_latest_are_shown_for_every_variant():
    display, _, out = plain(total=10)
    with display:
        display.evaluation(0, {"accuracy/default": 0.25, "accuracy/no tool": 0.1, "accuracy/lost": None})
        display.evaluation(
            10,
            {
                "accuracy/default": 0.9, "accuracy_low/default": 0.85, "accuracy_high/default": 0.94,
                "accuracy/no tool": 0.6,
            },
        )  # fmt: skip
        display.update(10, METRICS)
    assert "accuracy 0.250 → 0.900 (0.85 to 0.94) greedy at 10 | no tool 0.100 → 0.600 greedy at 10" in lines(out)[-1]


# The panel


@pytest.mark.parametrize("width", [1, 3, 10, 23, 24, 30, 40, 60, 80, 200])
@pytest.mark.parametrize("height", [2, 30])
def test_the_panel_fits_any_terminal(width, height):
    display, out = terminal(width, height)
    with display:
        display.evaluation(0, {"accuracy/default": 0.25, "accuracy/a variant with a long name": 0.1})
        display.update(1, METRICS)
        display.evaluation(1, {"accuracy/default": 0.5, "accuracy/a variant with a long name": 0.1})
        display.message("a message")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert max(len(part.rstrip()) for part in re.split(r"[\r\n]+", text)) <= width


# --- curve.png: what is read from a run folder, and what the figure shows of it


def evaluation(iteration: int, value: float | None, variant: str = "default", **more) -> dict:
    if value is None:
        return {"iteration": iteration, f"accuracy/{variant}": None, **more}
    margins = {f"accuracy_low/{variant}": value - 0.1, f"accuracy_high/{variant}": value + 0.1}
    return {"iteration": iteration, f"accuracy/{variant}": value, **margins, **more}


def drawn(rewards: list[float], *evaluations: dict) -> Figure:
    progress = pd.DataFrame({"reward/mean": rewards}, index=range(1, len(rewards) + 1))
    return curve_figure(progress, pd.DataFrame(evaluations), "my-run: $5")


def points(figure: Figure, label: str) -> list[tuple[float, float]]:
    (line,) = [line for panel in figure.axes for line in panel.lines if label in str(line.get_label())]
    return list(zip(*line.get_data(), strict=True))


def test_the_figure_shows_rewards_accuracies_their_intervals_and_chance() -> None:
    figure = drawn(
        [0.2, np.nan, np.inf, 0.8],
        evaluation(4, 0.75),
        evaluation(0, 0.25, chance=0.25),
        evaluation(4, 0.875),  # measured twice: the later one counts
        {"iteration": 2, "accuracy/blind": 0.5, "accuracy/default": None},
    )
    said = " ".join(text.get_text() for text in figure.findobj(Text) if text.get_visible())
    for words in ("my-run: $5", "iteration", "reward", "accuracy: 0.25 → 0.88", "95 % interval", "chance 0.25", "blind: 0.50"):  # fmt: skip
        assert words in said, said
    assert [step for step, _ in points(figure, "reward")] == [1, 4]
    assert points(figure, "accuracy") == [(0, 0.25), (4, 0.875)] and points(figure, "blind") == [(2, 0.5)]
    bars, _ = figure.axes[0].collections
    assert [[tuple(end) for end in bar] for bar in bars.get_segments()] == [[(0, 0.15), (0, 0.35)], [(4, 0.775), (4, 0.975)]]  # fmt: skip


@pytest.mark.parametrize("rewards", [(), (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)])
def test_short_runs_are_drawn(tmp_path: Path, rewards: tuple[float, ...]) -> None:
    (tmp_path / "config.yaml").write_text("name: my-run\n")
    lines = [f"{number},{value}" for number, value in enumerate(rewards, 1)]
    (tmp_path / "progress.csv").write_text("\n".join(["iteration,reward/mean", *lines]) + "\n3,0.")  # cut short
    for evaluations in ([], [evaluation(0, None), evaluation(1, 0.5)]):
        (tmp_path / "eval.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in evaluations))
        assert draw_curve(tmp_path).stat().st_size > 10_000


def test_smoothing_is_a_gaussian_average():
    values = np.zeros(21)
    values[10] = 1.0
    weights = np.exp(-0.5 * np.arange(-3, 4) ** 2.0)  # width 1 below 40 values
    np.testing.assert_allclose(smooth(pd.Series(values))[7:14], weights / weights.sum())
    noise = pd.Series(np.random.default_rng(0).normal(size=400))
    assert smooth(noise).std() < 0.3 * noise.std()
