"""How fast each way of giving credit learns to walk: `configs/gridwalk_tiny.yaml`, several algorithms, equal episodes.

    python benchmarks/gridwalk.py --run GRPO= --run RLOO=algorithm.estimator=rloo [--seeds N] [--set KEY=VALUE ...] \
        [--quick] [--folder DIR] [--figure FILE] [--out FILE]

`--run NAME=OVERRIDES` names a contender and what it changes (`key=value`, separated by spaces); `--set` changes all of them alike.
Runs take turns by seed, each is `rl-vlm train` in a process of its own. The table shows success of greedy walks on held-out grids
before and after, turns, training time and the episodes until 80 % of an evaluation succeeded (NaN if none did); the figure shows
success over episodes, mean and range of the seeds. A run folder that is finished is not run again, so an interrupted comparison
goes on where it was.
"""

from __future__ import annotations

import argparse
import csv
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from report import Report

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "gridwalk_tiny.yaml"
GOAL = 0.8
_QUICK = ("algorithm.iterations=4", "evaluation.every=2", "evaluation.num_items=16", "rollout.prompts_per_iteration=4")
_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run: training seconds, and by evaluation (the first is before training) episodes so far, success, mean turns."""

    seconds: float
    episodes: list[int]
    success: list[float]
    turns: list[float]

    @property
    def episodes_to_goal(self) -> float:
        """The episodes before the first evaluation with a success of at least GOAL; NaN without one."""
        reached = [count for count, success in zip(self.episodes, self.success, strict=True) if success >= GOAL]
        return float(reached[0]) if reached else float("nan")


def train(folder: Path, overrides: list[str], seed: int) -> Outcome:
    """Train in a process of its own, unless the folder holds a finished run. Raises RuntimeError if the command fails."""
    if not _finished(folder):
        command = [sys.executable, "-m", "rl_vlm.cli", "train", str(CONFIG), "--run-dir", str(folder), f"seed={seed}"]
        again = ["--overwrite"] if folder.exists() else []
        done = subprocess.run(
            [*command, *again, *overrides], cwd=ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{folder.name} ended with code {done.returncode}:\n{done.stderr[-2000:]}")
    return read(folder)


def _finished(folder: Path) -> bool:
    path = folder / "result.json"
    return path.is_file() and json.loads(path.read_text())["status"] == "done"


def read(folder: Path) -> Outcome:
    """The outcome of a finished run folder."""
    evaluations = [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]
    evaluations.sort(key=lambda entry: int(entry["iteration"]))
    with (folder / "progress.csv").open() as file:
        rows = {int(row["iteration"]): row for row in csv.DictReader(file)}
    group_size = int(_group_size(folder))
    played = np.cumsum([0, *(float(rows[i]["rollout/groups"]) * group_size for i in sorted(rows))]).astype(int)
    return Outcome(
        json.loads((folder / "result.json").read_text())["train_seconds"],
        [int(played[min(int(entry["iteration"]), len(played) - 1)]) for entry in evaluations],
        [entry["accuracy/default"] for entry in evaluations],
        [entry["turns/default"] for entry in evaluations],
    )


def _group_size(folder: Path) -> int:
    from rl_vlm.config import load_config

    return load_config(folder / "config.yaml").rollout.group_size


def draw(outcomes: dict[str, list[Outcome]], path: Path) -> None:
    """Success over episodes: a line for the mean of the seeds, a band from the least to the best of them."""
    from rl_vlm.reporting.style import COLORS, MARKERS, new_figure, save_figure, style_panel

    figure = new_figure(8.0, 4.6)
    panel = figure.add_axes((0.1, 0.14, 0.87, 0.8))
    style_panel(panel)
    for (name, runs), color, marker in zip(outcomes.items(), COLORS * 9, MARKERS * 9, strict=False):
        length = min(len(run.success) for run in runs)
        episodes = runs[0].episodes[:length]
        success = np.array([run.success[:length] for run in runs])
        panel.fill_between(episodes, success.min(0), success.max(0), color=color, alpha=0.15, linewidth=0)
        panel.plot(episodes, success.mean(0), color=color, marker=marker, markersize=5, label=f"{name} ({len(runs)})")
    panel.set(xlabel="episodes", ylabel="success on held-out grids", ylim=(0, 1))
    panel.legend(frameon=False, loc="upper left")
    save_figure(figure, [path])


def measure(
    contenders: dict[str, list[str]], shared: list[str], seeds: int, folder: Path, figure: Path | None
) -> Report:
    """Run everything, seed by seed, and draw the figure."""
    outcomes: dict[str, list[Outcome]] = {name: [] for name in contenders}
    for seed in range(seeds):
        for name, overrides in contenders.items():
            outcomes[name].append(train(folder / f"{name}-{seed}", [*shared, *overrides], seed))
            print(f"{name}, seed {seed}: {outcomes[name][-1].success[-1]:.2f}", flush=True)
    report = Report("GridWalk-v0, success after training")
    for name, runs in outcomes.items():
        report.add(
            name,
            [run.success[-1] for run in runs],
            unit="",
            before=statistics.mean(run.success[0] for run in runs),
            turns=statistics.mean(run.turns[-1] for run in runs),
            train_s=statistics.median(run.seconds for run in runs),
            episodes=runs[0].episodes[-1],
            episodes_to_goal=statistics.median(run.episodes_to_goal for run in runs),
        )
    if figure is not None:
        draw(outcomes, figure)
    return report


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="append", metavar="NAME=OVERRIDES", help="default: GRPO and RLOO")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for all runs alike")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="four short iterations of one seed")
    parser.add_argument("--folder", type=Path, help="where the run folders go; default: a temporary folder")
    parser.add_argument("--figure", type=Path, help="draw success over episodes here (.png, .svg or .pdf)")
    parser.add_argument("--out", type=Path, help="write JSON here")
    args = parser.parse_args()
    runs = args.run or ["GRPO=", "RLOO=algorithm.estimator=rloo"]
    contenders = {name: shlex.split(overrides) for name, _, overrides in (run.partition("=") for run in runs)}
    shared = [*(_QUICK if args.quick else ()), *args.set]
    folder = (args.folder or Path(tempfile.mkdtemp(prefix="gridwalk-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    measure(contenders, shared, 1 if args.quick else args.seeds, folder, args.figure).finish(args.out)


if __name__ == "__main__":
    main()
