"""`rl-vlm top`: a live table of runs, replicas and nodes."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rl_vlm.monitoring.display import duration
from rl_vlm.monitoring.overview import Overview, Sample, overview
from rl_vlm.safe_text import printable, safe
from rl_vlm.types import RLVLMError

Read = Callable[[], tuple[list[Sample], list[str]]]  # samples, and endpoints that did not answer
Row = Mapping[str, Any]
Columns = Mapping[str, Callable[[Row], str]]
_GIB = 2**30


def as_json(found: Overview, missing: Sequence[str]) -> str:
    """One line: runs, replicas, nodes, and the metrics endpoints that did not answer."""
    return json.dumps({**found._asdict(), "unreachable": list(missing)}, allow_nan=False)


def show(read: Read, console: Console, *, every_s: float, once: bool, as_lines: bool) -> None:
    """Read and show every `every_s` seconds until Ctrl-C, or `once`; as a live table, or as lines of JSON.

    Raises what `read` raises at the first reading; the table reports the errors of later ones.
    """
    samples, missing = read()
    read_at = time.monotonic()
    found = overview(samples, time.time())
    if once and not as_lines:
        console.print(table(found, missing), highlight=False, markup=False)
        return
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
        live = None
        if not as_lines:
            live = stack.enter_context(Live(table(found, missing), console=console, screen=console.is_terminal))
        while True:
            if live is not None:
                live.update(table(found, missing), refresh=True)
            else:
                console.print(as_json(found, missing), soft_wrap=True, highlight=False, markup=False)
            if once:
                return
            time.sleep(every_s)
            before, before_at = samples, read_at
            while True:
                try:
                    samples, missing = read()
                    break
                except (RLVLMError, ValueError, KeyError) as error:  # the head may come back
                    if live is not None:
                        live.update(Group(table(found, missing), Text(safe(str(error)), style="red")), refresh=True)
                    time.sleep(every_s)
            read_at = time.monotonic()
            found = overview(samples, time.time(), before, read_at - before_at)


def table(found: Overview, missing: Sequence[str] = ()) -> RenderableType:
    """The tables, one below the other. `queue` is groups being sampled and, after the plus, complete ones that wait."""
    parts: list[RenderableType] = [] if found.runs else [Text("No run reports metrics here.")]
    shown = (
        ("runs", _RUN, found.runs),
        ("learning", _LEARNING, found.runs),
        ("replicas", _REPLICA, found.replicas),
        ("nodes", _NODE, found.nodes),
    )
    for title, columns, rows in shown:
        if rows:
            made = Table(
                title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1), pad_edge=False
            )
            for name in columns:
                text = name in _TEXT
                made.add_column(name, no_wrap=True, overflow="ellipsis", justify="left" if text else "right")
            for row in rows:
                made.add_row(*(Text(printable(cell(row))) for cell in columns.values()))
            parts.append(made)
    if missing:
        parts.append(Text(printable(f"No answer from {', '.join(missing)}."), style="yellow"))
    return Group(*parts)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _whole(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _of(value: float | None, whole: float | None) -> str:
    return "" if value is None else f"{value:.0f}" + ("" if whole is None else f"/{whole:.0f}")


def _gib(value: float | None, whole: float | None) -> str:
    return "" if value is None or whole is None else f"{value / _GIB:.1f}/{whole / _GIB:.0f} GiB"


def _joined(*parts: tuple[float | None, str]) -> str:
    return " ".join(form.format(value) for value, form in parts if value is not None)


def _gpu_memory(gpu: Row) -> str:
    used = gpu["memory_used"]
    return "" if used is None else _gib(used, used + (gpu["memory_free"] or 0.0))


# Each table: its columns, and what a row shows there. Columns of text stand left, numbers right.
_TEXT = ("run", "last row", "algorithm", "environment", "replica", "node")
_RUN: Columns = {
    "run": lambda row: row["run"],
    "last row": lambda row: "ended" if row["state"] == "ended" else f"{duration(row['idle_seconds'] or 0)} ago",
    "done": lambda row: _of(row["iteration"], row["iterations"]),
    "s/row": lambda row: _number(row["iteration_seconds"]),
    "speed": lambda row: _joined((row["tokens_per_s"], "{:,.0f} tok/s"), (row["steps_per_s"], "{:,.0f} steps/s")),
    "lag": lambda row: _of(row["lag_max"], row["max_policy_lag"]),
    "queue": lambda row: "+".join(_whole(row[key]) for key in ("under_way", "waiting") if row[key] is not None),
    "version": lambda row: _whole(row["version"]),
    "lost": lambda row: _whole(sum(row["dropped"].values())),
    "restarts": lambda row: _whole(sum(row["restarts"].values())),
}
_LEARNING: Columns = {
    "run": lambda row: row["run"],
    "algorithm": lambda row: row["algorithm"] or "",
    "environment": lambda row: row["env"] or "",
    "reward": lambda row: _number(row["reward"]),
    "smoothed": lambda row: _number(row["reward_smoothed"]),
    "best": lambda row: _number(row["reward_best"]),
    "accuracy": lambda row: _number(next(iter(row["accuracy"].values()), None)),
    "mismatch": lambda row: _joined((row["mismatch_kl"], "{:.1e}"), (row["mismatch_growth"], "×{:.1f}")),
}
_REPLICA: Columns = {
    "run": lambda row: ", ".join(row["runs"]),
    "replica": lambda row: row["replica"],
    "node": lambda row: row["node"],
    "version": lambda row: _whole(row["version"]),
    "running": lambda row: _whole(row["running"]),
    "waiting": lambda row: _whole(row["waiting"]),
    "batch": lambda row: _number(row["mean_batch"]),
    "tok/s": lambda row: _whole(row["tokens_per_s"]),
    "requests": lambda row: _whole(row["requests"]),
    "errors": lambda row: _whole(row["errors"] or 0),
}
_NODE: Columns = {
    "node": lambda row: row["node"],
    "CPU": lambda row: _joined((row["cpu_percent"], "{:.0f} %")),
    "memory": lambda row: _gib(row["memory_used"], row["memory_total"]),
    "disk": lambda row: _joined((row["disk_percent"], "{:.0f} %")),
    "GPU": lambda row: _joined(*((gpu["percent"], "{:.0f} %") for gpu in row["gpus"])),
    "GPU memory": lambda row: " ".join(filter(None, map(_gpu_memory, row["gpus"]))),
}
