"""Benchmarks run and write what they promise. Their times are not judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import QUICKSTART, ROOT, environment

from rl_vlm.config.learner import PRESETS
from rl_vlm.models.loading import resolve_model

Report, Rows = dict[str, Any], dict[str, dict[str, Any]]
# Seconds, arguments, and what holds of the report and of its rows by their labels.
REPORTS: dict[str, tuple[int, tuple[str, ...], Callable[[Report, Rows], list[bool]]]] = {
    "loop": (
        2300, (),
        lambda report, rows: [
            {"name", "machine", "versions", "rows", "ratios"} <= report.keys(),
            {"floor / rl_vlm at 16×8", "floor / rl_vlm at 64×8", "TRL / rl_vlm at 16×8"} <= report["ratios"].keys(),
            *(row["runs"] >= 15 and row["min"] <= row["median"] <= row["max"] for row in report["rows"]),
        ],
    ),
    "learner": (  # it ends with an error where loss or gradient differ from TRL's
        880, ("--quick",),
        lambda report, rows: [
            {"peak memory, rl_vlm / TRL (lower is better)", "seconds, rl_vlm / TRL (lower is better)"} <= report["ratios"].keys(),
            {"rl_vlm", "rl_vlm, no entropies", "TRL", "rl_vlm, 4 x the tokens"} <= rows.keys(),
            *(row["peak_mib"] >= row["base_mib"] > 0 for row in report["rows"]),
        ],
    ),
    "never_wait": (
        1100, ("--quick",),
        lambda report, rows: [
            set(report["ratios"]) == {"lag 2 / lag 0"}, rows["lag 0"]["oldest"] == 0, rows["lag 2"]["oldest"] <= 2,
            rows["lag 2"]["dropped"] == 0,
        ],
    ),
    "scale": (
        880, ("--quick",),
        lambda report, rows: [
            *(rows[label]["median"] > 0 for label in (
                "router, 20 replicas, new work", "registry, 20 replicas", "rounds, 100 runners", "groups, 100 runners",
            )),
            not [note for note in report["notes"] if "acknowledged" in note],  # all replicas were reached
        ],
    ),
    "strangers": (
        880, ("--quick", "--only", "doors", "--seconds", "20"),
        lambda report, rows: [
            set(rows) == {"doors, after SFT", "doors, directly"}, len(report["notes"]) == 2,
            rows["doors, after SFT"]["well_formed"] >= 0.95,  # fine-tuning taught the form ...
            rows["doors, after SFT"]["accuracy"] <= 0.5,  # ... and not the task
            *(0 <= row[key] <= 1 for row in report["rows"] for key in ("first", "median", "after", "share", "sampled_formed")),
        ],
    ),
    "against": (  # this checkout is the other one, too
        880, (str(ROOT), "--quick"),
        lambda report, rows: [len(report["ratios"]) == 3, *(row["median"] > 0 for row in report["rows"])],
    ),
    "host_memory": (  # it stays flat on episodes full of images
        1150, (),
        lambda report, rows: [
            {"driver", "learner", "env runners", "replicas", "shared memory", "all"} <= rows.keys(),
            report["ratios"]["growth after the fifth iteration (goal: at most 0.02)"] <= 0.02,
        ],
    ),
}  # fmt: skip


@pytest.mark.acceptance
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", REPORTS)
def test_a_benchmark_writes_what_it_promises(name: str, tmp_path: Path) -> None:
    seconds, arguments, check = REPORTS[name]
    resolve_model("tiny-gridwalk")
    command = [sys.executable, str(ROOT / f"benchmarks/{name}.py"), *arguments, "--out", str(tmp_path / "report.json")]
    subprocess.run(command, env=environment(), timeout=seconds, check=True, cwd=ROOT)
    report = json.loads((tmp_path / "report.json").read_text())
    held = check(report, {row["label"]: row for row in report["rows"]})
    assert all(held), (held, report)


@pytest.mark.acceptance
@pytest.mark.timeout(600)
def test_ways_to_train_are_compared_at_equal_episodes(tmp_path: Path) -> None:
    resolve_model("tiny-gridwalk")
    out, figure = tmp_path / "gridwalk.json", tmp_path / "gridwalk.png"
    few = ["algorithm.iterations=4", "evaluation.every=2", "evaluation.num_items=16", "rollout.prompts_per_iteration=4"]
    command = [
        sys.executable, str(ROOT / "benchmarks/compare.py"), str(ROOT / "configs/gridwalk_tiny.yaml"), "--seeds", "1",
        "--run", "GRPO=", "--run", "RLOO=algorithm.estimator=rloo", "--folder", str(tmp_path / "runs"),
        *(part for one in few for part in ("--set", one)), "--out", str(out), "--figure", str(figure),
    ]  # fmt: skip
    subprocess.run(command, env=environment(), timeout=580, check=True)
    rows = json.loads(out.read_text())["rows"]
    assert [row["label"] for row in rows] == ["GRPO", "RLOO"]
    assert {row["episodes"] for row in rows} == {4 * 4 * 12}
    assert all(0 <= row["median"] <= 1 and row["turns"] >= 1 and row["train_s"] > 0 for row in rows)
    assert figure.stat().st_size > 10_000


@pytest.mark.acceptance
@pytest.mark.timeout(7200)
def test_every_preset_learns_the_quickstart_and_none_learns_from_shuffled_rewards(tmp_path: Path) -> None:
    shuffled = "algorithm.shuffle_rewards=true"
    # At the quickstart's rate one of two seeds of dr_grpo unlearned an answer at the start.
    changes = {name: f"algorithm.preset={name}" + " learner.lr=1e-3" * (name == "dr_grpo") for name in PRESETS}
    for seeds, control in (("2", ""), ("1", shuffled)):
        runs = [part for name, change in changes.items() for part in ("--run", f"{name}={change} {control}")]
        out = tmp_path / f"{seeds}.json"
        command = [sys.executable, str(ROOT / "benchmarks/compare.py"), str(QUICKSTART), "--seeds", seeds, *runs]
        subprocess.run([*command, "--out", str(out)], env=environment(), timeout=7000, check=True, cwd=ROOT)
        for row in json.loads(out.read_text())["rows"]:
            assert row["before"] <= 0.35
            assert row["max"] <= 0.35 if control else row["min"] >= 0.90, row
