"""ProgressDisplay: plain lines without a terminal, a panel that fits any terminal."""

import io
import re

import pytest
from rich.console import Console

from rl_vlm.monitoring.display import MovingAverage, ProgressDisplay

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


def test_fast_iterations_print_every_tenth_and_the_last():
    display, clock, out = plain(total=25)
    with display:
        for iteration in range(1, 26):
            clock.now += 0.1
            display.update(iteration, METRICS)
    assert [line.split(" |")[0] for line in lines(out)] == ["iteration 10/25", "iteration 20/25", "iteration 25/25"]


def test_slow_iterations_print_at_most_every_five_seconds():
    display, clock, out = plain()
    with display:
        for iteration in range(1, 10):
            clock.now += 2.0
            display.update(iteration, METRICS)
    assert [line.split(" |")[0] for line in lines(out)] == ["iteration 3/100", "iteration 6/100", "iteration 9/100"]


def test_a_line_says_what_matters():
    display, clock, out = plain()
    with display:
        display.evaluation(0, {"accuracy/default": 0.25, "seconds": 3})
        clock.now += 60.0  # the next iteration takes a minute
        display.update(10, METRICS)
    first, second = lines(out)
    assert first == "evaluation at iteration 0: accuracy 0.250"
    assert second == (
        "iteration 10/100 | reward 0.500, smoothed 0.500 | accuracy 0.250 greedy | 12,346 tokens/s, 6.00 s/iteration | "
        "version 7, 1.5 turns, mismatch KL 1.0e-05 | dropped 2 env_crash | 9m 00s left"
    )


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


def test_time_spent_in_an_evaluation_is_no_iteration_time():
    display, clock, out = plain(total=20)
    with display:
        for iteration in range(1, 11):
            clock.now += 1.0
            display.update(iteration, {})
            clock.now += 100.0
            display.evaluation(iteration, {"accuracy/default": 0.5})
    assert "1.00 s/iteration | 10s left" in out.getvalue()


def test_accuracy_before_and_latest_are_shown_for_every_variant():
    display, _, out = plain(total=10)
    with display:
        display.evaluation(0, {"accuracy/default": 0.25, "accuracy/no tool": 0.1, "accuracy/lost": None})
        display.evaluation(10, {"accuracy/default": 0.9, "accuracy/no tool": 0.6})
        display.update(10, METRICS)
    assert "accuracy 0.250 → 0.900 greedy | no tool 0.100 → 0.600 greedy" in lines(out)[-1]


def test_a_resumed_run_counts_from_where_it_was():
    display, clock, out = plain(total=100, start=50)
    with display:
        clock.now += 2.0
        display.update(51, {})
        clock.now += 4.0
        display.update(52, METRICS)
    assert lines(out)[0].startswith("iteration 52/100") and "left" in lines(out)[0]


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


def test_an_error_inside_stops_the_panel():
    display, out = terminal()
    with pytest.raises(ZeroDivisionError), display:
        display.update(1, METRICS)
        raise ZeroDivisionError
    assert out.getvalue().rstrip().endswith("\x1b[?25h")  # the cursor is back


def test_a_dumb_terminal_gets_plain_lines():
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, _environ={"TERM": "dumb"})
    with ProgressDisplay(1, 0, console) as display:
        display.update(1, METRICS)
    assert len(lines(out)) == 1 and "\x1b" not in out.getvalue()


# Figures


def test_the_moving_average_has_no_bias_and_ignores_nan():
    average = MovingAverage(0.9)
    assert average.value is None
    average.add(2.0)
    assert average.value == pytest.approx(2.0)
    average.add(float("nan"))
    average.add(4.0)
    assert average.value == pytest.approx((0.9 * 2 + 4) / 1.9)
