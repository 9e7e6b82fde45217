"""What the tiny models learn in the drawn environments: a table and a panel of curves for each, with a control that must not learn.

    python benchmarks/environments.py --out FOLDER [--configs nlvr2 caption ...] [--seeds 0 1] [--no-controls]

Each run is `rl-vlm train configs/NAME_tiny.yaml` in a process of its own, one after the other; its folder is kept in FOLDER, so that a
run that is done is not repeated. The curves are mean rewards of greedy answers on the test split; controls train on shuffled rewards.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compare import train

from rl_vlm.files import write_atomic
from rl_vlm.plots.curves import COLORS, MUTED, new_figure, save_figure, style_panel

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ("nlvr2", "caption", "zoom", "geo3k_offline", "minigrid", "geospot")

Curve = list[tuple[int, float]]


def trained(config: str, folder: Path, name: str, overrides: Sequence[str]) -> dict[str, Any]:
    """One run: seconds of training and its curve, (iteration, held-out reward)."""
    train(ROOT / f"configs/{config}_tiny.yaml", folder / f"{config}-{name}", overrides)
    evaluations = [json.loads(line) for line in (folder / f"{config}-{name}/eval.jsonl").read_text().splitlines()]
    curve = {int(entry["iteration"]): float(entry["reward/default"]) for entry in evaluations}
    seconds = json.loads((folder / f"{config}-{name}/result.json").read_text())["train_seconds"]
    return {"curve": sorted(curve.items()), "seconds": seconds}


def table(runs: dict[str, dict[str, dict[str, Any]]]) -> str:
    """A row per environment: the reward before and after, run by run."""
    lines = [
        "| configuration | before | after, per seed | shuffled rewards | seconds of training |",
        "|---|---|---|---|---|",
    ]
    for config, found in runs.items():
        own = [one for name, one in found.items() if name != "shuffled"]
        after = " / ".join(f"{one['curve'][-1][1]:.3f}" for one in own)
        control = f"{found['shuffled']['curve'][-1][1]:.3f}" if "shuffled" in found else "not run"
        seconds = " / ".join(f"{one['seconds']:.0f}" for one in own)
        lines.append(f"| `{config}_tiny` | {own[0]['curve'][0][1]:.3f} | {after} | {control} | {seconds} |")
    return "\n".join(lines) + "\n"


def draw(runs: dict[str, dict[str, dict[str, Any]]], path: Path) -> None:
    """A panel per environment: a line per seed, the control dashed."""
    columns = min(len(runs), 3)
    rows = -(-len(runs) // columns)
    figure = new_figure(4.2 * columns, 3.1 * rows)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for panel in panels[len(runs) :]:
        panel.set_visible(False)
    for panel, (config, found) in zip(panels, runs.items(), strict=False):
        style_panel(panel)
        for place, (name, one) in enumerate(found.items()):
            control = name == "shuffled"
            panel.plot(
                *zip(*one["curve"], strict=True), color=MUTED if control else COLORS[place % len(COLORS)], marker="o", markersize=3,
                linestyle="--" if control else "-", label="shuffled rewards" if control else name.replace("-", " "),
            )  # fmt: skip
        panel.set_title(f"{config}_tiny", fontsize=10)
        panel.set_ylim(-0.25 if config == "zoom" else -0.03, 1.03)
    for panel in panels[max(len(runs) - columns, 0) : len(runs)]:
        panel.set_xlabel("iteration")
    for panel in panels[::columns]:
        panel.set_ylabel("held-out reward, greedy")
    names = panels[0].get_legend_handles_labels()
    figure.legend(*names, frameon=False, fontsize=8, ncols=len(names[0]), loc="lower center")
    figure.tight_layout(rect=(0, 0.25 / figure.get_figheight(), 1, 1))
    save_figure(figure, [path])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs, table and figure")
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--no-controls", action="store_true", help="do not train on shuffled rewards")
    parser.add_argument("--set", nargs="+", default=[], dest="overrides", help="section.key=value for every run")
    args = parser.parse_args()
    folder = args.out.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    runs: dict[str, dict[str, dict[str, Any]]] = {}
    for config in args.configs:
        runs[config] = {}
        plans = {f"seed-{seed}": [f"seed={seed}"] for seed in args.seeds}
        if not args.no_controls:
            plans["shuffled"] = [f"seed={args.seeds[0]}", "algorithm.shuffle_rewards=true"]
        for name, changes in plans.items():
            runs[config][name] = trained(config, folder, name, [*changes, *args.overrides])
            print(f"{config}, {name}: {runs[config][name]['curve'][-1][1]:.3f}", flush=True)
        write_atomic(folder / "environments.json", json.dumps(runs, indent=2) + "\n")
        write_atomic(folder / "environments.md", table(runs))
        draw(runs, folder / "environments.png")
    print(table(runs))


if __name__ == "__main__":
    main()
