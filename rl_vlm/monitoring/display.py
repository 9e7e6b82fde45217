"""Terminal output of a run: a live panel in a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rl_vlm.safe_text import printable, safe
from rl_vlm.types import Trajectory

_NEGLIGIBLE_KL = 1e-4  # nats per token: in float32 engine and learner agree to 1e-9
_ALARM_GROWTH = 10.0


class Trend:
    """A metric's `start` (mean of its first five values), moving average and best average, each None at first. nan and
    infinity are ignored."""

    start: float | None = None
    smoothed: float | None = None
    best: float | None = None
    _count = 0

    def add(self, value: float) -> None:
        if not math.isfinite(value):
            return
        self._count += 1
        before = self.smoothed or 0.0
        self.smoothed = before + max(1 / self._count, 0.1) * (value - before)
        if self._count <= 5:
            self.start = self.smoothed
        else:  # a lucky first iteration is no peak to fall from
            self.best = self.smoothed if self.best is None else max(self.best, self.smoothed)

    def growth(self, kl: float) -> float | None:
        """Take in mismatch/kl: how many times larger it is than at the start (or 1e-4); None at first, and for nan."""
        self.add(kl)
        known = self.start is not None and self._count > 5 and math.isfinite(kl)
        return kl / max(self.start or 0.0, _NEGLIGIBLE_KL) if known else None


# Plain lines: one per PLAIN_EVERY iterations, and one when nothing was printed for PLAIN_SECONDS.
PLAIN_EVERY = 10
PLAIN_SECONDS = 5.0
_SHOWN = 100  # characters of a message

# The rows of the panel: a name, and what it shows of the metrics that an iteration has. Speed and policy need no name.
Rows = Sequence[tuple[str, Sequence[str]]]
_NAMELESS = ("speed", "policy")
_JUDGE = (
    "wins {judge/win_rate:.2f}", "order bias {judge/order_bias:.2f}", "first {judge/first_rate:.2f}",
    "{judge/requests:.0f} questions", "{judge/tokens:,.0f} tokens", "{judge/seconds:.1f} s",
)  # fmt: skip
POLICY_ROWS: Rows = (
    ("reward", ("{reward/mean:.3f}", "smoothed {reward smoothed:.3f}")),
    ("stage", ("{stage:.0f}/{curriculum/stages:.0f}", "{solved:.0f} % solved")),
    ("judge", _JUDGE),
    ("speed", ("{rollout/tokens_per_s:,.0f} tokens/s", "{seconds per iteration:.2f} s/iteration")),
    ("policy", ("version {weights/version:.0f}", "{rollout/turns:.1f} turns", "mismatch KL {mismatch/kl:.1e}")),
)
PREFERENCE_ROWS: Rows = (
    ("return", ("{reward/mean:.4g} true", "{reward/learned:.4g} learned")),
    ("training success", ("{rollout/success:.2f}",)),
    ("labels", ("{labels/total:.0f}",)),
    ("speed", ("{rollout/steps_per_s:.0f} steps/s",)),
    ("policy", ("alpha {policy/alpha:.3g}", "q {critic/q:.3g}")),
)
SFT_ROWS: Rows = (
    ("loss", ("{sft/loss:.4f}",)),
    ("epoch", ("{sft/epoch:.2f}",)),
    ("speed", ("{sft/tokens_per_s:,.0f} tokens/s",)),
    ("policy", ("lr {sft/lr:.2e}",)),
)
_BOUNDS = ("accuracy_low/", "accuracy_high/")
# What an evaluation shows beside its accuracies.
_HELD_OUT = {"eval/loss": "held-out loss", "reward/success": "held-out return"}


def filled(forms: Sequence[str], values: Mapping[str, Any], between: str = ", ") -> str:
    """The format strings whose values are all known (None is not), joined."""
    parts = []
    for form in forms:
        with contextlib.suppress(KeyError, TypeError):
            parts.append(form.format_map(values))
    return between.join(parts)


def episode_line(trajectory: Trajectory) -> str:
    """The last answer of an episode, what it replies to, and the reward."""
    said = next((k for k in reversed(range(len(trajectory.messages))) if trajectory.messages[k].role == "assistant"), 0)
    texts = [" ".join(message.text.split()) for message in trajectory.messages[max(said - 1, 0) : said + 1]]
    shown = " → ".join(text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..." for text in texts)
    turns = f", {len(trajectory.turns)} turns" if len(trajectory.turns) > 1 else ""
    return f"  an episode: {shown} | reward {trajectory.reward:.4g}{turns}"


class ProgressDisplay:
    """Shows a run of `total` iterations (or what `unit` names) of which `start` are done. A context manager."""

    def __init__(
        self,
        total: int,
        start: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        rows: Rows = POLICY_ROWS,
        unit: str = "iteration",
    ) -> None:
        self._console = console or Console()
        self.keep: Callable[[str], object] = lambda text: None  # takes the text of each `message`
        self._clock = clock
        self.total, self._done = total, start
        self._rows, self._unit = rows, unit
        self._metrics: Mapping[str, float] = {}
        self._reward, self._seconds, self._mismatch = Trend(), Trend(), Trend()
        self._warned_of_mismatch = False
        self._before: dict[str, float] = {}  # by the name of the evaluation's metric
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
        """Training begins: the time before counts for no iteration."""
        self._updated = self._clock()

    def update(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of an iteration that has just ended; `dropped/*` are counts since the start of the run."""
        now = self._clock()
        # Wall time and not time/step, because the remaining time includes evaluation and checkpoints.
        self._seconds.add((now - self._updated) / max(iteration - self._done, 1))
        self._updated, self._done, self._metrics = now, iteration, dict(metrics)
        self._reward.add(metrics.get("reward/mean", math.nan))
        kl = metrics.get("mismatch/kl", math.nan)
        growth = self._mismatch.growth(kl)
        if growth is not None and growth >= _ALARM_GROWTH and not self._warned_of_mismatch:
            self._warned_of_mismatch = True
            self.message(
                f"Engine and learner disagree more and more: mismatch/kl is {kl:.1e}, and was "
                f"{self._mismatch.start or 0.0:.1e} at first. Watch the reward; a lower learner.lr, "
                "algorithm.mismatch=mask or an engine in the learner's precision helps."
            )
        if self._live is not None:
            self._live.refresh()
        elif iteration % PLAIN_EVERY == 0 or iteration >= self.total or now - self._printed >= PLAIN_SECONDS:
            self._printed = now
            facts = [value if name in _NAMELESS else f"{name} {value}" for name, value in self._facts()]
            parts = [f"{self._unit} {iteration}/{self.total}", *facts, self._remaining()]
            self.line(" | ".join(filter(None, parts)))

    def recall(self, evaluations: Iterable[Mapping[str, Any]]) -> None:
        """Take over the evaluations (entries of eval.jsonl) of a run that is resumed."""
        for entry in evaluations:
            self._remember(int(entry["iteration"]), entry)

    def _remember(self, iteration: int, results: Mapping[str, Any]) -> dict[str, float]:
        shown = {
            name: float(value)
            for name, value in results.items()
            if (name in _HELD_OUT or name.startswith(("accuracy/", *_BOUNDS))) and value is not None
        }
        self._before = {**shown, **self._before}
        self._latest.update(shown)
        self._latest_iteration = iteration
        return {name: value for name, value in shown.items() if not name.startswith(_BOUNDS)}

    def evaluation(self, iteration: int, results: Mapping[str, Any]) -> None:
        """Show held-out accuracy, `accuracy/<variant>` of `results`, loss and return."""
        shown = self._remember(iteration, results)
        # The time of an evaluation counts for no iteration.
        self._updated = self._clock()
        if self._live is not None:
            self._live.refresh()
        elif shown:
            values = ", ".join(f"{_label(name)} {_number(name, value)}" for name, value in shown.items())
            lost = f" ({results['lost']} answers were lost, and count as wrong)" if results.get("lost") else ""
            self.line(f"evaluation at {self._unit} {iteration}: {values}{lost}")

    def message(self, text: str) -> None:
        """Show the user a text that is worth keeping with the run."""
        self.keep(text)
        self.line(text)

    def line(self, text: str) -> None:
        # Text is printed without markup and emoji; soft_wrap keeps lines whole for log files.
        self._console.print(Text(safe(text)), soft_wrap=self._live is None)

    def _remaining(self) -> str:
        seconds, rest = self._seconds.smoothed, self.total - self._done
        return f"{duration(seconds * rest)} left" if seconds is not None and rest > 0 else ""

    def _facts(self) -> list[tuple[str, str]]:
        values = {"reward smoothed": self._reward.smoothed, "seconds per iteration": self._seconds.smoothed}
        values |= self._metrics
        if "curriculum/stage" in values:  # counted from 1
            solved = self._metrics.get("curriculum/solve_rate")
            values |= {"stage": self._metrics["curriculum/stage"] + 1, "solved": solved and 100 * solved}
        first, *rest = [(name, filled(parts, values)) for name, parts in self._rows]
        lost = [(name[8:], count) for name, count in self._metrics.items() if name.startswith("dropped/") and count]
        dropped = ", ".join(f"{count:.0f} {reason}" for reason, count in lost)
        return [(name, value) for name, value in (first, *self._held_out(), *rest, ("dropped", dropped)) if value]

    def _held_out(self) -> Iterable[tuple[str, str]]:
        """The newest evaluation, with its iteration and interval."""
        at = f" at {self._latest_iteration}" if self._latest_iteration else ""
        for name, latest in self._latest.items():
            if name.startswith(_BOUNDS):
                continue
            before = f"{_number(name, self._before[name])} → " if self._latest_iteration else ""
            greedy = " greedy" if name not in _HELD_OUT else ""
            bounds = [self._latest.get(f"{bound}{name.removeprefix('accuracy/')}") for bound in _BOUNDS]
            between = "" if None in bounds else f" ({bounds[0]:.2f} to {bounds[1]:.2f})"
            yield _label(name), f"{before}{_number(name, latest)}{between}{greedy}{at}"

    def _render(self) -> RenderableType:
        width = self._console.width
        top = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=max(self.total, 1), completed=self._done, width=min(width // 2, 50))
        done, left = f"{self._done}/{self.total}", self._remaining()
        top.add_row(Text(done, style="bold", no_wrap=True), bar, Text(left, no_wrap=True, overflow="ellipsis"))
        table = Table.grid(padding=(0, 1))
        table.add_column(no_wrap=True, overflow="ellipsis", style="dim", min_width=8, max_width=max(width // 3, 8))
        table.add_column(no_wrap=True, overflow="ellipsis")
        for name, value in self._facts():
            table.add_row(Text(printable(name)), Text(printable(value)))
        return Group(top, table)


def _label(name: str) -> str:
    variant = name.removeprefix("accuracy/")
    return _HELD_OUT.get(name) or ("accuracy" if variant == "default" else variant)


def _number(name: str, value: float) -> str:
    return f"{value:.4g}" if name in _HELD_OUT else f"{value:.3f}"


def duration(seconds: float) -> str:
    """Seconds as 45s, 3m 20s, 2h 05m."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s" if minutes else f"{rest}s"
    return f"{minutes // 60}h {minutes % 60:02d}m"
