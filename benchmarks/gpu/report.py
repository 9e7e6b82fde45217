"""The report of one check, as JSON in a file. Without torch, so that a failing import of it is a result too."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_vlm.files import write_atomic


class SkippedError(Exception):
    """This check cannot be made here; says why."""


@dataclass(slots=True)
class Report:
    """The figures of one check by name, in the order in which they came; `file` has those so far at all times."""

    file: Path
    status: str = "running"  # then ok, failed or skipped
    reason: str = ""
    figures: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, **figures: Any) -> None:
        """Keep and print the figures of one measurement."""
        self.figures[name] = figures
        shown = ", ".join(f"{key} {_shown(value)}" for key, value in figures.items() if not isinstance(value, list))
        print(f"  {name}: {shown}", flush=True)
        self._write()

    def hold(self, name: str, value: float, threshold: float) -> None:
        """Keep a value that must not exceed its threshold; the check fails where it does."""
        passed = value <= threshold  # not for NaN
        self.add(name, value=value, threshold=threshold, passed=passed)
        if not passed:
            self.reason = f"{self.reason}, {name}" if self.reason else f"beyond the threshold: {name}"

    def run(self, method: Callable[[], Iterator[tuple[str, float, float]] | None]) -> None:
        """Make the check: `method` adds figures itself, or yields values with their thresholds."""
        self._write()
        status = ""
        try:
            for name, value, threshold in method() or ():
                self.hold(name, value, threshold)
        except SkippedError as reason:
            status, self.reason = "skipped", str(reason)
        except Exception as error:
            traceback.print_exc()
            self.reason = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        self.status = status or ("failed" if self.reason else "ok")
        self._write()

    def _write(self) -> None:
        write_atomic(self.file, json.dumps({"status": self.status, "reason": self.reason, "figures": self.figures}))


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
