"""Held-out accuracy of configs/quickstart.yaml with every preset: a table, its JSON and a figure.

    python benchmarks/presets.py --out FOLDER [--presets grpo gspo] [--seeds 0 1] [--controls] [--set section.key=value ...]

Each run is `rl-vlm train` in a process of its own, one after the other; its folder is kept in FOLDER, so that a run that
is done is not repeated. `--controls` also trains each preset on shuffled rewards with the first seed, which must teach nothing
(chance is 0.25).
`LR` holds the learning rate of each preset, where it is not the quickstart's: the presets' published constants stay as they are.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compare import train
from report import Report

from rl_vlm.config.learner import PRESETS
from rl_vlm.files import write_atomic
from rl_vlm.plots.curves import COLORS, MUTED, Series, new_figure, read_curves, save_figure, style_panel

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
QUICKSTART_LR = 2e-3
LR: dict[str, float] = {"dr_grpo": 1e-3}  # at 2e-3 one of two seeds lost an answer at the start and ended at .742


@dataclass(frozen=True, slots=True)
class Run:
    """One training run: its preset, seed, and whether its rewards were shuffled."""

    preset: str
    seed: int
    shuffled: bool

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.preset}-seed{self.seed}" + ("-shuffled" if self.shuffled else "")


def result_of(run: Run, folder: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Train, unless that is done already; returns result.json. Raises RuntimeError with the end of the output."""
    changes = (
        f"algorithm.preset={run.preset}", f"seed={run.seed}", f"algorithm.shuffle_rewards={str(run.shuffled).lower()}",
        f"learner.lr={LR.get(run.preset, QUICKSTART_LR)}", f"name={run.name}",
    )  # fmt: skip
    train(CONFIG, folder / run.name, [*changes, *overrides])
    return json.loads((folder / run.name / "result.json").read_text())  # type: ignore[no-any-return]


def summarize(results: dict[Run, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per preset and kind of reward: held-out accuracy before and after, over its seeds."""
    rows = []
    for preset, shuffled in dict.fromkeys((run.preset, run.shuffled) for run in results):
        found = [result for run, result in results.items() if (run.preset, run.shuffled) == (preset, shuffled)]
        after = [result["accuracy_after"] for result in found]
        rows.append(
            {
                "preset": preset,
                "rewards": "shuffled" if shuffled else "own",
                "lr": LR.get(preset, QUICKSTART_LR),
                "before": statistics.mean(result["accuracy_before"] for result in found),
                "after": after,
                "mean": statistics.mean(after),
                "train_seconds": statistics.mean(result["train_seconds"] for result in found),
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = ["| preset | rewards | lr | before | after, per seed | mean |", "|---|---|---|---|---|---|"]
    for row in rows:
        after = " / ".join(f"{value:.3f}" for value in row["after"])
        lines.append(
            f"| `{row['preset']}` | {row['rewards']} | {row['lr']:g} | {row['before']:.3f} | {after} | {row['mean']:.3f} |"
        )
    return "\n".join(lines) + "\n"


def draw(curves: dict[Run, Series], path: Path) -> None:
    """Held-out accuracy by iteration: the mean over seeds, dashed with shuffled rewards."""
    figure = new_figure()
    panel = figure.add_subplot()
    style_panel(panel)
    colors = {preset: COLORS[k % len(COLORS)] for k, preset in enumerate(dict.fromkeys(run.preset for run in curves))}
    # One more marker than colours, so that no two presets have both in common.
    marker = {preset: "os^DvpX"[k % 7] for k, preset in enumerate(colors)}
    for preset, shuffled in dict.fromkeys((run.preset, run.shuffled) for run in curves):
        series = [curve for run, curve in curves.items() if (run.preset, run.shuffled) == (preset, shuffled)]
        steps = [step for step, _ in series[0]]
        means = [statistics.mean(dict(one)[step] for one in series if step in dict(one)) for step in steps]
        panel.plot(
            steps, means, color=colors[preset], marker=marker[preset], markersize=4, linewidth=1.6,
            linestyle="--" if shuffled else "-", alpha=0.5 if shuffled else 1.0, label=None if shuffled else preset,
        )  # fmt: skip
    panel.axhline(0.25, color=MUTED, linewidth=0.8, linestyle=":")
    panel.set(xlabel="iteration", ylabel="held-out accuracy", ylim=(0, 1.02))
    panel.legend(frameon=False, ncols=2)
    save_figure(figure, [path])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs, table and figure")
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--controls", action="store_true", help="also train on shuffled rewards, with the first seed")
    parser.add_argument("--set", nargs="+", default=[], dest="overrides", help="section.key=value for every run")
    args = parser.parse_args()
    args.out = args.out.absolute()
    args.out.mkdir(parents=True, exist_ok=True)
    results: dict[Run, dict[str, Any]] = {}
    for shuffled in [False, True] if args.controls else [False]:
        for preset in args.presets:
            for seed in args.seeds[:1] if shuffled else args.seeds:
                run = Run(preset, seed, shuffled)
                results[run] = result_of(run, args.out, args.overrides)
                print(f"{run.name}: {results[run]['accuracy_after']:.3f}", flush=True)
                rows = summarize(results)
                report = Report("Presets: held-out accuracy of the quickstart", rows, notes=args.overrides)
                write_atomic(args.out / "presets.json", json.dumps(report.as_dict(), indent=2) + "\n")
                write_atomic(args.out / "presets.md", table(rows))
    curves = {run: read_curves(args.out / run.name).accuracy["default"] for run in results}
    draw(curves, args.out / "presets.png")
    print(table(summarize(results)))


if __name__ == "__main__":
    main()
