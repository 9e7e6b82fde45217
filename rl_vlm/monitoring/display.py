"""Terminal output of a run: a live panel in a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rl_vlm.safe_text import printable, safe

# What alerts look at, computed once per iteration: iterations differ in length, so a window of minutes says little.

_SMOOTHING = 0.9
_FIRST = 5  # iterations that make the start
_FLOOR = 1e-4  # nats per token: a mismatch below this is nothing


class MovingAverage:
    """An exponential moving average without a bias to zero in its first values."""

    def __init__(self, decay: float = _SMOOTHING) -> None:
        self._decay = decay
        self._sum = self._weight = 0.0

    def add(self, value: float) -> None:
        """Add a value; nan and infinity are ignored."""
        if math.isfinite(value):
            self._sum = self._decay * self._sum + (1 - self._decay) * value
            self._weight = self._decay * self._weight + (1 - self._decay)

    @property
    def value(self) -> float | None:
        """The average, or None before the first value."""
        return self._sum / self._weight if self._weight else None


class Start:
    """The mean of the first values of a figure."""

    def __init__(self) -> None:
        self._first: list[float] = []

    def add(self, value: float) -> bool:
        """Take a value; False once the start is complete and the value belongs to what comes after. nan is ignored."""
        if len(self._first) >= _FIRST:
            return False
        if math.isfinite(value):
            self._first.append(value)
        return True

    @property
    def value(self) -> float | None:
        """The mean, or None before the first value."""
        return sum(self._first) / len(self._first) if self._first else None


class MismatchGrowth:
    """How many times larger mismatch/kl is than at the start.

    The start is the mean of the first five values, or 1e-4 where that is less: in float32 engine and learner agree to 1e-9 or
    better, and ten times as much is still nothing.
    """

    def __init__(self) -> None:
        self._start = Start()

    @property
    def start(self) -> float:
        """The mean of the first values; 0 before them."""
        return self._start.value or 0.0

    def add(self, kl: float) -> float | None:
        """The factor, or None while the start is being measured and for nan."""
        if self._start.add(kl) or not math.isfinite(kl):
            return None
        return kl / max(self.start, _FLOOR)


class RewardTrend:
    """The reward's start, moving average, and the best that this average was since the start."""

    def __init__(self) -> None:
        self._start, self._average = Start(), MovingAverage()
        self._best = -math.inf

    def add(self, reward: float) -> dict[str, float]:
        """`reward_start`, `reward_smoothed` and `reward_best`, those that are known."""
        early = self._start.add(reward)
        self._average.add(reward)
        start, smoothed = self._start.value, self._average.value
        if start is None or smoothed is None:
            return {}
        if not early:  # a lucky first iteration is no peak to fall from
            self._best = max(self._best, smoothed)
        known = {"reward_start": start, "reward_smoothed": smoothed}
        return known if self._best == -math.inf else known | {"reward_best": self._best}


# Plain lines: one per PLAIN_EVERY iterations, and one when nothing was printed for PLAIN_SECONDS.
PLAIN_EVERY = 10
PLAIN_SECONDS = 5.0
_ALARM_GROWTH = 10.0


class MismatchAlarm:
    """Watches for engine and learner drifting apart; tells once."""

    def __init__(self) -> None:
        self._growth = MismatchGrowth()
        self._told = False

    def check(self, kl: float) -> str:
        """A sentence where this value is the first that is ten times the start, else an empty string."""
        growth = self._growth.add(kl)
        if self._told or growth is None or growth < _ALARM_GROWTH:
            return ""
        self._told = True
        return (
            f"Engine and learner disagree more and more: mismatch/kl is {kl:.1e}, and was {self._growth.start:.1e} at first. Watch the reward; "
            "a lower learner.lr, algorithm.mismatch=mask or an engine in the learner's precision helps."
        )


class ProgressDisplay:
    """Shows a run of `total` iterations of which `start` are done already.

    Use it as a context manager; other output of the process (warnings, prints) appears above the live panel.
    """

    unit = "iteration"

    def __init__(
        self, total: int, start: int = 0, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console or Console()
        self._clock = clock
        self.total, self._done = total, start
        self._metrics: Mapping[str, float] = {}
        self._reward, self._seconds = MovingAverage(), MovingAverage()
        self._alarm = MismatchAlarm()
        self._before: dict[str, float] = {}
        self._latest: dict[str, float] = {}
        self._latest_iteration = start
        self._updated = self._printed = clock()
        live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=4) if live else None

    def __enter__(self) -> Self:
        self._updated = self._printed = self._clock()
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def begins(self) -> None:
        """Training begins here: the time of what came before, such as the start of Ray, counts for no iteration."""
        self._updated = self._clock()

    def update(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of an iteration that has just ended; `dropped/*` are counts since the start of the run."""
        now = self._clock()
        # Wall time and not time/step, because the remaining time includes evaluation and checkpoints.
        self._seconds.add((now - self._updated) / max(iteration - self._done, 1))
        self._updated, self._done, self._metrics = now, iteration, dict(metrics)
        if "reward/mean" in metrics:
            self._reward.add(metrics["reward/mean"])
        if warning := self._alarm.check(metrics.get("mismatch/kl", math.nan)):
            self.message(warning)
        if self._live is not None:
            self._live.refresh()
        elif iteration % PLAIN_EVERY == 0 or iteration >= self.total or now - self._printed >= PLAIN_SECONDS:
            self._printed = now
            facts = [value if name in ("speed", "policy") else f"{name} {value}" for name, value in self._facts()]
            self._plain(
                " | ".join([f"{self.unit} {iteration}/{self.total}", *facts, *filter(None, [self._remaining()])])
            )

    def recall(self, evaluations: Iterable[Mapping[str, Any]]) -> None:
        """Know the evaluations that a run made before it was resumed, entries of eval.jsonl, without showing each."""
        for entry in evaluations:
            self._remember(int(entry["iteration"]), entry)

    def _remember(self, iteration: int, results: Mapping[str, Any]) -> dict[str, float]:
        found = {
            name.removeprefix("accuracy/"): float(value)
            for name, value in results.items()
            if name.startswith("accuracy/") and value is not None
        }
        self._before = {**found, **self._before}
        self._latest.update(found)
        self._latest_iteration = iteration
        return found

    def evaluation(self, iteration: int, results: Mapping[str, Any]) -> None:
        """Show held-out accuracy, `accuracy/<variant>` of `results`."""
        found = self._remember(iteration, results)
        # The time of an evaluation counts for no iteration.
        self._updated = self._clock()
        if self._live is not None:
            self._live.refresh()
        elif found:
            accuracies = "  ".join(f"{variant} {value:.3f}" for variant, value in found.items())
            self._plain(f"held-out accuracy at iteration {iteration}: {accuracies}")

    def message(self, text: str) -> None:
        """Print a line above the panel."""
        if self._live is not None:
            self._console.print(Text(safe(text)))
        else:
            self._plain(text)

    def _plain(self, line: str) -> None:
        # Text is printed without markup and emoji; soft_wrap keeps lines whole for log files.
        self._console.print(Text(safe(line)), soft_wrap=True)

    def _remaining(self) -> str:
        seconds, rest = self._seconds.value, self.total - self._done
        return f"{duration(seconds * rest)} left" if seconds is not None and rest > 0 else ""

    def _facts(self) -> list[tuple[str, str]]:
        """Name and value of each known figure, the most important first."""

        def listed(*pairs: tuple[str, float | None]) -> str:
            return ", ".join(form.format(value) for form, value in pairs if value is not None)

        known = self._metrics.get
        dropped = [(name[8:], count) for name, count in self._metrics.items() if name.startswith("dropped/") and count]
        rows = [
            ("reward", listed(("{:.3f}", known("reward/mean")), ("smoothed {:.3f}", self._reward.value))),
            *self._accuracies(),
            (
                "judge",
                listed(
                    ("wins {:.2f}", known("judge/win_rate")),
                    ("order bias {:.2f}", known("judge/order_bias")),
                    ("first {:.2f}", known("judge/first_rate")),
                    ("{:.0f} questions", known("judge/requests")),
                    ("{:,.0f} tokens", known("judge/tokens")),
                    ("{:.1f} s", known("judge/seconds")),
                ),
            ),
            ("stage", self._stage()),
            (
                "speed",
                listed(
                    ("{:,.0f} tokens/s", known("rollout/tokens_per_s")), ("{:.2f} s/iteration", self._seconds.value)
                ),
            ),
            (
                "policy",
                listed(
                    ("version {:.0f}", known("weights/version")),
                    ("{:.1f} turns", known("rollout/turns")),
                    ("mismatch KL {:.1e}", known("mismatch/kl")),
                ),
            ),
            ("dropped", ", ".join(f"{count:.0f} {reason}" for reason, count in dropped)),
        ]
        return [(name, value) for name, value in rows if value]

    def _stage(self) -> str:
        """The stage of a curriculum, counted from 1."""
        stage, solved = self._metrics.get("curriculum/stage"), self._metrics.get("curriculum/solve_rate")
        if stage is None:
            return ""
        rate = "" if solved is None else f", {100 * solved:.0f} % solved"
        return f"{stage + 1:.0f}/{self._metrics['curriculum/stages']:.0f}{rate}"

    def _accuracies(self) -> list[tuple[str, str]]:
        rows = []
        for variant, latest in self._latest.items():
            name = "accuracy" if variant == "default" else variant
            before = f"{self._before[variant]:.3f} → " if self._latest_iteration else ""
            rows.append((name, f"{before}{latest:.3f} greedy"))
        return rows

    def _render(self) -> RenderableType:
        width = self._console.width
        head = f"{self._done}/{self.total}"
        if width < 24:
            return Text(head, no_wrap=True, overflow="crop")
        left = self._remaining()
        room = min(width - len(head) - len(left) - 4, 50)
        bar = ProgressBar(total=max(self.total, 1), completed=self._done, width=room) if room >= 4 else Text("")
        top = Table.grid(padding=(0, 1))
        top.add_row(Text(head, style="bold", no_wrap=True), bar, Text(left, no_wrap=True, overflow="ellipsis"))
        table = Table.grid(padding=(0, 1))
        table.add_column(no_wrap=True, overflow="ellipsis", style="dim", min_width=8, max_width=max(width // 3, 8))
        table.add_column(no_wrap=True, overflow="ellipsis")
        for name, value in self._facts():
            table.add_row(Text(printable(name)), Text(printable(value)))
        return Group(top, table)


def duration(seconds: float) -> str:
    """Seconds as 45s, 3m 20s, 2h 05m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


# Terminal output of a preference run: steps, returns by the true reward, labels.


class PreferenceDisplay(ProgressDisplay):
    """A ProgressDisplay that counts environment steps and shows the evaluation's true return beside success."""

    unit = "step"

    def evaluation(self, iteration: int, results: Mapping[str, Any]) -> None:
        """Show the evaluation episodes' success rate and mean true return."""
        super().evaluation(iteration, {})
        self._success, self._return = float(results["accuracy/success"]), float(results["reward/success"])
        self.message(
            f"Step {iteration}: true return {self._return:.4g} ± {results['evaluation/reward_std']:.3g} over "
            f"{results['items/success']:.0f} episodes, success {self._success:.2f}."
        )

    _success: float | None = None
    _return: float | None = None

    def _facts(self) -> list[tuple[str, str]]:
        known = self._metrics.get

        def shown(form: str, *names: str) -> str:
            values = [known(name) for name in names]
            return form.format(*values) if None not in values else ""

        rows = [
            ("return", shown("{:.4g} true, {:.4g} learned", "reward/mean", "reward/learned")),
            ("success", shown("{:.2f} in training", "rollout/success")),
            ("evaluation", f"{self._return:.4g}, success {self._success:.2f}" if self._return is not None else ""),
            ("labels", shown("{:.0f}", "labels/total")),
            ("speed", shown("{:.0f} steps/s", "rollout/steps_per_s")),
            ("policy", shown("alpha {:.3g}, q {:.3g}", "policy/alpha", "critic/q")),
        ]
        return [(name, value) for name, value in rows if value]


# Terminal output of supervised fine-tuning: steps, losses, greedy answers.


class SFTDisplay(ProgressDisplay):
    """A ProgressDisplay that counts optimiser steps and shows losses in nats per token."""

    unit = "step"

    def evaluation(self, iteration: int, results: Mapping[str, Any]) -> None:
        """Show the held-out loss and, where answers were written, how many were right."""
        super().evaluation(iteration, {})
        self._held_out = f"loss {results['eval/loss']:.4f}"
        if "accuracy/default" in results:
            self._held_out += f", exact answers {results['accuracy/default']:.3f}"
        self.message(f"Step {iteration}: held-out {self._held_out}.")

    _held_out = ""

    def _facts(self) -> list[tuple[str, str]]:
        known = self._metrics.get

        def shown(form: str, name: str) -> str:
            value = known(name)
            return form.format(value) if value is not None else ""

        rows = [
            ("loss", shown("{:.4f}", "sft/loss")),
            ("held out", self._held_out),
            ("epoch", shown("{:.2f}", "sft/epoch")),
            ("speed", shown("{:,.0f} tokens/s", "sft/tokens_per_s")),
            ("policy", shown("lr {:.2e}", "sft/lr")),
        ]
        return [(name, value) for name, value in rows if value]
