"""`rl-vlm top`: a live table of runs, replicas and nodes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
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
_GIB = 2**30


def as_json(found: Overview, missing: Sequence[str]) -> str:
    """One line: runs, replicas, nodes, and the metrics endpoints that did not answer."""
    return json.dumps({**found._asdict(), "unreachable": list(missing)}, allow_nan=False)


def show(read: Read, console: Console, *, every_s: float, once: bool, as_lines: bool) -> None:
    """Read and show again every `every_s` seconds until Ctrl-C, or `once`; as a live table, or as lines of JSON.

    Raises what `read` raises, at the first reading; later ones say in the table that they failed.
    """
    samples, missing = read()
    read_at = time.monotonic()
    found = overview(samples, time.time())
    if as_lines or once:
        console.print(as_json(found, missing) if as_lines else table(found, missing), soft_wrap=as_lines, highlight=False, markup=False)  # fmt: skip
        if once:
            return
    live = None if as_lines else Live(table(found, missing), console=console, screen=console.is_terminal)
    try:
        if live is not None:
            live.start()
        while True:
            time.sleep(every_s)
            before, before_at = samples, read_at
            try:
                samples, missing = read()
            except (RLVLMError, ValueError, KeyError) as error:  # the head may come back
                if live is not None:
                    live.update(Group(table(found, missing), Text(safe(str(error)), style="red")), refresh=True)
                continue
            read_at = time.monotonic()
            found = overview(samples, time.time(), before, read_at - before_at)
            if live is not None:
                live.update(table(found, missing), refresh=True)
            else:
                console.print(as_json(found, missing), soft_wrap=True, highlight=False, markup=False)
    except KeyboardInterrupt:
        return
    finally:
        if live is not None:
            live.stop()


def table(found: Overview, missing: Sequence[str] = ()) -> RenderableType:
    """The tables, one below the other. `queue` is groups being sampled and, after the plus, complete ones that wait."""
    parts: list[RenderableType] = [Text("No run reports figures here.")]
    if found.runs:
        parts = [_runs(found.runs), _learning(found.runs)]
    if found.replicas:
        parts.append(_replicas(found.replicas))
    if found.nodes:
        parts.append(_nodes(found.nodes))
    if missing:
        parts.append(Text(printable(f"No answer from {', '.join(missing)}."), style="yellow"))
    return Group(*parts)


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    made = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1), pad_edge=False)
    for name in left:
        made.add_column(name, overflow="ellipsis", no_wrap=True)
    for name in right:
        made.add_column(name, justify="right", no_wrap=True)
    return made


def _runs(rows: Sequence[dict[str, Any]]) -> Table:
    made = _table(
        "runs", ("run", "last row"), ("done", "s/row", "speed", "lag", "queue", "version", "lost", "restarts")
    )  # fmt: skip
    for row in rows:
        made.add_row(
            Text(printable(row["run"])),
            Text("ended" if row["state"] == "ended" else f"{duration(row['idle_seconds'] or 0)} ago"),
            _of(row["iteration"], row["iterations"]),
            _number(row["iteration_seconds"]),
            _joined((row["tokens_per_s"], "{:,.0f} tok/s"), (row["steps_per_s"], "{:,.0f} steps/s")),
            _of(row["lag_max"], row["max_policy_lag"]),
            "+".join(_whole(one) for one in (row["under_way"], row["waiting"]) if one is not None),
            _whole(row["version"]),
            _whole(sum(row["dropped"].values())), _whole(sum(row["restarts"].values())),
        )  # fmt: skip
    return made


def _learning(rows: Sequence[dict[str, Any]]) -> Table:
    made = _table(
        "learning", ("run", "algorithm", "environment"), ("reward", "smoothed", "best", "accuracy", "mismatch")
    )
    for row in rows:
        made.add_row(
            Text(printable(row["run"])), Text(printable(row["algorithm"] or "")), Text(printable(row["env"] or "")),
            _number(row["reward"]), _number(row["reward_smoothed"]), _number(row["reward_best"]),
            _number(next(iter(row["accuracy"].values()), None)),
            _joined((row["mismatch_kl"], "{:.1e}"), (row["mismatch_growth"], "×{:.1f}")),
        )  # fmt: skip
    return made


def _replicas(rows: Sequence[dict[str, Any]]) -> Table:
    made = _table(
        "replicas", ("run", "replica", "node"),
        ("version", "running", "waiting", "batch", "tok/s", "requests", "errors"),
    )  # fmt: skip
    for row in rows:
        made.add_row(
            Text(printable(", ".join(row["runs"]))), Text(printable(row["replica"])), Text(printable(row["node"])),
            _whole(row["version"]), _whole(row["running"]), _whole(row["waiting"]), _number(row["mean_batch"]),
            _whole(row["tokens_per_s"]), _whole(row["requests"]), _whole(row["errors"] or 0),
        )  # fmt: skip
    return made


def _nodes(rows: Sequence[dict[str, Any]]) -> Table:
    made = _table("nodes", ("node",), ("CPU", "memory", "disk", "GPU", "GPU memory"))
    for row in rows:
        gpus = row["gpus"]
        used = [(one["memory_used"], one["memory_free"]) for one in gpus if one["memory_used"] is not None]
        made.add_row(
            Text(printable(row["node"])),
            _joined((row["cpu_percent"], "{:.0f} %")),
            _gib(row["memory_used"], row["memory_total"]),
            _joined((row["disk_percent"], "{:.0f} %")),
            " ".join(f"{one['percent']:.0f} %" for one in gpus if one["percent"] is not None),
            " ".join(_gib(own, own + (free or 0.0)) for own, free in used),
        )  # fmt: skip
    return made


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
