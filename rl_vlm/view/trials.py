"""A trial of a sweep as a run: Tune keeps its settings and results, and no run folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from rl_vlm.runs.api import Run

# Groups of Tune's and RLlib's own.
_THEIRS = {"config", "timers", "fault_tolerance", "env_runner_group", "held_out", "held_out_before"}


class TrialRun(Run):
    """Reads `params.json` and `result.json` of a trial's folder."""

    @property
    def config(self) -> dict[str, Any]:
        """The run's settings; the sweep's choices have their dotted keys."""
        chosen: dict[str, Any] = json.loads(self.read("params.json") or b"{}")
        run = chosen.pop("run_config", {})
        return {**run, "name": Path(self.folder).name, **chosen}

    @property
    def metrics(self) -> dict[str, Any]:
        """What `result.json` of a run would say."""
        rows = self.lines("result.json")
        if error := self.read("error.txt").decode(errors="replace").strip():
            return {"status": "failed", "error": error.splitlines()[-1]}
        ended = bool(rows) and (rows[-1].get("done") or (Path(self.folder).parents[1] / "results.csv").exists())
        return {"status": "done", "train_seconds": rows[-1]["time_total_s"]} if ended else {}

    @property
    def progress(self) -> pd.DataFrame:
        """A row of metrics per iteration."""
        return pd.DataFrame([
            {"iteration": row["training_iteration"]}
            | dict(_numbers({name: group for name, group in row.items() if isinstance(group, Mapping)}))
            for row in self.lines("result.json")
        ])  # fmt: skip

    @property
    def evaluations(self) -> pd.DataFrame:
        """The held-out accuracy, before training and whenever it was measured anew."""
        rows = self.lines("result.json")
        known = [(0, row["held_out_before"]) for row in rows[:1] if "held_out_before" in row]
        known += [
            (row["training_iteration"], row["held_out"])
            for row in rows
            if row.get("should_checkpoint") and "held_out" in row
        ]
        return pd.DataFrame([
            {"iteration": iteration, **{f"{name}/default": value for name, value in found.items()}}
            for iteration, found in known
        ])  # fmt: skip


def _numbers(groups: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in groups.items():
        if isinstance(value, Mapping) and (prefix or name not in _THEIRS):
            yield from _numbers(value, f"{prefix}{name}/")
        elif prefix and isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}", float(value)
