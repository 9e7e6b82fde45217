"""Several ways to train with one configuration: held-out accuracy or reward over episodes, seed by seed.

    python benchmarks/compare.py CONFIG --run NAME=OVERRIDES --run NAME=OVERRIDES [--seeds N] [--set KEY=VALUE ...] \
        [--of accuracy|reward] [--goal X] [--folder DIR] [--figure FILE] [--out FILE]
    python benchmarks/compare.py configs/gridwalk_tiny.yaml --run GRPO= --run RLOO=algorithm.estimator=rloo

`--run` names a contender and what it changes (`key=value`, separated by spaces); `--set` changes all contenders. They
take turns by seed, and each run is `rl-vlm train` in a process of its own. A finished run folder is not run again, so
an interrupted comparison can go on.

Episodes are all that were sampled, including those that were replaced for want of a gradient or dropped as too old.
The table shows the score before and after, turns, training time, and the episodes until an evaluation reached the
goal (NaN if none did). The figure shows the score over episodes: mean and range of the seeds.
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from report import Report

ROOT = Path(__file__).resolve().parents[1]
# Episodes that were sampled and not learned from, as progress.csv counts them.
_NOT_LEARNED = ("dropped/no_gradient", "dropped/too_old")
_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Training seconds of a run, and its episodes, score and mean turns by evaluation; the first is before training."""

    seconds: float
    episodes: list[int]
    score: list[float]
    turns: list[float]

    def episodes_to(self, goal: float) -> float:
        """The episodes before the first evaluation with a score of at least `goal`; NaN without one."""
        reached = [count for count, score in zip(self.episodes, self.score, strict=True) if score >= goal]
        return float(reached[0]) if reached else float("nan")


def train(config: Path, folder: Path, overrides: Sequence[str]) -> None:
    """Train in a process of its own, unless the folder holds a finished run. Raises RuntimeError on failure."""
    if not _finished(folder):
        command = [sys.executable, "-m", "rl_vlm.cli", "train", str(config), "--run-dir", str(folder)]
        again = ["--overwrite"] if folder.exists() else []
        done = subprocess.run(
            [*command, *again, *overrides], cwd=ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{folder.name} ended with code {done.returncode}:\n{done.stderr[-2000:]}")


def _finished(folder: Path) -> bool:
    path = folder / "result.json"
    return path.is_file() and json.loads(path.read_text())["status"] == "done"


def read(folder: Path, of: str) -> Outcome:
    """The outcome of a finished run folder; the score is its `of`, `accuracy` or `reward`."""
    evaluations = [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]
    evaluations.sort(key=lambda entry: int(entry["iteration"]))
    with (folder / "progress.csv").open() as file:
        rows = {int(row["iteration"]): row for row in csv.DictReader(file)}
    learned = np.cumsum([0, *(float(rows[i]["rollout/groups"]) for i in sorted(rows))])
    other = np.array([0, *(sum(float(rows[i].get(key) or 0) for key in _NOT_LEARNED) for i in sorted(rows))])
    sampled = (learned + other) * _group_size(folder)
    return Outcome(
        json.loads((folder / "result.json").read_text())["train_seconds"],
        [int(sampled[min(int(entry["iteration"]), len(sampled) - 1)]) for entry in evaluations],
        [entry[f"{of}/default"] for entry in evaluations],
        [entry["turns/default"] for entry in evaluations],
    )


def _group_size(folder: Path) -> int:
    from rl_vlm.config import load_config

    return load_config(folder / "config.yaml").rollout.group_size


def draw(outcomes: dict[str, list[Outcome]], of: str, path: Path) -> None:
    """The score over episodes: a line for the mean of the seeds, a band from the least to the best of them."""
    from rl_vlm.plots.figures import COLORS, MARKERS, add_legend, new_figure, save_figure

    figure, (panel,) = new_figure(8.0, 4.6)
    for (name, runs), color, marker in zip(outcomes.items(), COLORS * 9, MARKERS * 9, strict=False):
        length = min(len(run.score) for run in runs)
        episodes = np.mean([run.episodes[:length] for run in runs], axis=0)
        score = np.array([run.score[:length] for run in runs])
        panel.fill_between(episodes, score.min(0), score.max(0), color=color, alpha=0.15, linewidth=0)
        panel.plot(episodes, score.mean(0), color=color, marker=marker, markersize=4, label=f"{name} ({len(runs)})")
    panel.set(xlabel="episodes sampled", ylabel=f"held-out {of}", ylim=(0, 1.02))
    add_legend(panel)
    save_figure(figure, [path])


def measure(
    config: Path,
    contenders: dict[str, list[str]],
    shared: list[str],
    seeds: int,
    of: str,
    goal: float,
    folder: Path,
    figure: Path | None,
) -> Report:
    """Run everything, seed by seed, and draw the figure."""
    outcomes: dict[str, list[Outcome]] = {name: [] for name in contenders}
    for seed in range(seeds):
        for name, overrides in contenders.items():
            train(config, folder / f"{name}-{seed}", [*shared, *overrides, f"seed={seed}"])
            outcomes[name].append(read(folder / f"{name}-{seed}", of))
            print(f"{name}, seed {seed}: {outcomes[name][-1].score[-1]:.3f}", flush=True)
    report = Report(f"{config.stem}: held-out {of} after training")
    for name, runs in outcomes.items():
        report.add(
            name, [run.score[-1] for run in runs], unit="", before=statistics.mean(run.score[0] for run in runs),
            turns=statistics.mean(run.turns[-1] for run in runs),
            train_s=statistics.median(run.seconds for run in runs),
            episodes=statistics.median(run.episodes[-1] for run in runs),
            episodes_to_goal=statistics.median(run.episodes_to(goal) for run in runs),
        )  # fmt: skip
    if figure is not None:
        draw(outcomes, of, figure)
    return report


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--run", action="append", metavar="NAME=OVERRIDES", required=True)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for all runs alike")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--of", choices=("accuracy", "reward"), default="accuracy", help="the score (default accuracy)")
    parser.add_argument("--goal", type=float, default=0.9, help="of the held-out score (default 0.9)")
    parser.add_argument("--folder", type=Path, help="where the run folders go; default: a temporary folder")
    parser.add_argument("--figure", type=Path, help="draw the score over episodes here (.png, .svg or .pdf)")
    parser.add_argument("--out", type=Path, help="write JSON here")
    args = parser.parse_args()
    contenders = {name: shlex.split(overrides) for name, _, overrides in (run.partition("=") for run in args.run)}
    folder = (args.folder or Path(tempfile.mkdtemp(prefix="compare-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    report = measure(args.config.absolute(), contenders, args.set, args.seeds, args.of, args.goal, folder, args.figure)
    report.finish(args.out)


if __name__ == "__main__":
    main()
