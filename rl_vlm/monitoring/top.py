"""`rl-vlm top`: runs, replicas and nodes of a cluster, read from the metrics pages of its nodes."""

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

from rl_vlm.monitoring.cluster_metrics import default_dashboard, overview, read_cluster
from rl_vlm.monitoring.display import duration, filled
from rl_vlm.safe_text import printable, safe
from rl_vlm.types import RLVLMError

_GIB = 2**30
Row = Mapping[str, Any]
Columns = Mapping[str, str | Callable[[Row], str]]


def show(dashboard: str | None, console: Console, *, every_s: float, once: bool, as_json: bool) -> None:
    """Show a cluster every `every_s` seconds until Ctrl-C, or once, as tables or JSON. Raises UserInputError
    at the first reading."""

    def read() -> dict[str, list[Any]]:
        samples, missing = read_cluster(dashboard or default_dashboard())
        return {**overview(samples, time.time()), "unreachable": missing}

    found = read()
    if as_json:
        console.print(json.dumps(found, allow_nan=False), soft_wrap=True, highlight=False, markup=False)
    elif once:
        console.print(table(found), highlight=False, markup=False)
    else:
        with contextlib.suppress(KeyboardInterrupt), Live(table(found), console=console, screen=True) as live:
            while True:
                time.sleep(every_s)
                try:
                    found = read()
                    live.update(table(found), refresh=True)
                except (RLVLMError, ValueError, KeyError) as error:  # the head may come back
                    live.update(Group(table(found), Text(safe(str(error)), style="red")), refresh=True)


def table(found: Mapping[str, Sequence[Any]]) -> RenderableType:
    parts: list[RenderableType] = [] if found["runs"] else [Text("No run reports metrics here.")]
    for title, rows, columns in _TABLES:
        if not found[rows]:
            continue
        made = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1), pad_edge=False)
        for name in columns:
            made.add_column(name, no_wrap=True, overflow="ellipsis", justify="left" if name in _TEXT else "right")
        for row in found[rows]:
            cells = (filled((cell,), row) if isinstance(cell, str) else cell(row) for cell in columns.values())
            made.add_row(*(Text(printable(cell)) for cell in cells))
        parts.append(made)
    if found.get("unreachable"):
        parts.append(Text(printable(f"No answer from {', '.join(found['unreachable'])}."), style="yellow"))
    return Group(*parts)


def _gib(used: float | None, whole: float | None) -> str:
    return "" if used is None or whole is None else f"{used / _GIB:.1f}/{whole / _GIB:.0f} GiB"


# Title, rows, and columns with what a row shows there. Columns of text stand left, numbers right.
_TEXT = ("run", "last row", "algorithm", "environment", "replica", "node")
_TABLES: tuple[tuple[str, str, Columns], ...] = (
    ("runs", "runs", {
        "run": "{run}",
        "last row": lambda row: "ended" if row["state"] == "ended" else f"{duration(row['idle_seconds'] or 0)} ago",
        "done": "{iteration:.0f}/{iterations:.0f}",
        "s/row": "{iteration_seconds:.3g}",
        "speed": lambda row: filled(("{tokens_per_s:,.0f} tok/s", "{steps_per_s:,.0f} steps/s"), row, " "),
        "lag": "{lag_max:.0f}/{max_policy_lag:.0f}",
        "queue": lambda row: filled(("{under_way:,.0f}", "{waiting:,.0f}"), row, "+"),
        "version": "{version:,.0f}",
        "lost": lambda row: f"{sum(row['dropped'].values()):,.0f}",
        "restarts": lambda row: f"{sum(row['restarts'].values()):,.0f}",
    }),
    ("learning", "runs", {
        "run": "{run}",
        "algorithm": "{algorithm}",
        "environment": "{env}",
        "reward": "{reward:,.4g}",
        "smoothed": "{reward_smoothed:,.4g}",
        "best": "{reward_best:,.4g}",
        "accuracy": lambda row: "".join(f"{value:.3g}" for value in list(row["accuracy"].values())[:1]),
        "mismatch": lambda row: filled(("{mismatch_kl:.1e}", "×{mismatch_growth:.1f}"), row, " "),
    }),
    ("replicas", "replicas", {
        "run": lambda row: ", ".join(row["runs"]),
        "replica": "{replica}",
        "node": "{node}",
        "version": "{version:,.0f}",
        "running": "{running:,.0f}",
        "waiting": "{waiting:,.0f}",
        "batch": "{mean_batch:.3g}",
        "requests": "{requests:,.0f}",
        "errors": lambda row: f"{row['errors'] or 0:,.0f}",
    }),
    ("nodes", "nodes", {
        "node": "{node}",
        "CPU": "{cpu_percent:.0f} %",
        "memory": lambda row: _gib(row["memory_used"], row["memory_total"]),
        "disk": "{disk_percent:.0f} %",
        "GPU": lambda row: " ".join(filled(("{percent:.0f} %",), gpu) for gpu in row["gpus"]),
        "GPU memory": lambda row: " ".join(
            _gib(gpu["memory_used"], (gpu["memory_used"] or 0.0) + (gpu["memory_free"] or 0.0)) for gpu in row["gpus"]
        ),
    }),
)  # fmt: skip
