"""Benchmarks run and write what they promise. Their times are not judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from runs import ROOT, environment

from rl_vlm.models.loading import resolve_model


def report_of(name: str, folder: Path, timeout_s: float, *arguments: str) -> dict[str, Any]:
    """The JSON that a benchmark writes into `folder`."""
    out = folder / f"{name}.json"
    command = [sys.executable, str(ROOT / f"benchmarks/{name}.py"), *arguments, "--out", str(out)]
    subprocess.run(command, env=environment(), timeout=timeout_s, check=True, cwd=ROOT)
    return json.loads(out.read_text())  # type: ignore[no-any-return]


@pytest.mark.acceptance
@pytest.mark.timeout(2400)
def test_the_loop_benchmark_compares_floor_system_and_peer(tmp_path: Path) -> None:
    report = report_of("loop", tmp_path, 2300)
    assert {"name", "machine", "versions", "rows", "ratios"} <= report.keys()
    assert {"floor / rl_vlm at 16×8", "floor / rl_vlm at 64×8", "TRL / rl_vlm at 16×8"} <= report["ratios"].keys()
    assert all(row["runs"] >= 15 and row["min"] <= row["median"] <= row["max"] for row in report["rows"])


@pytest.mark.acceptance
@pytest.mark.timeout(600)
def test_ways_to_train_are_compared_at_equal_episodes(tmp_path: Path) -> None:
    resolve_model("tiny-gridwalk")
    out, figure = tmp_path / "gridwalk.json", tmp_path / "gridwalk.png"
    short = [
        "algorithm.iterations=4",
        "evaluation.every=2",
        "evaluation.num_items=16",
        "rollout.prompts_per_iteration=4",
    ]
    command = [
        sys.executable, str(ROOT / "benchmarks/compare.py"), str(ROOT / "configs/gridwalk_tiny.yaml"), "--seeds", "1",
        "--run", "GRPO=", "--run", "RLOO=algorithm.estimator=rloo", "--folder", str(tmp_path / "runs"),
        *(part for one in short for part in ("--set", one)), "--out", str(out), "--figure", str(figure),
    ]  # fmt: skip
    subprocess.run(command, env=environment(), timeout=580, check=True)
    rows = json.loads(out.read_text())["rows"]
    assert [row["label"] for row in rows] == ["GRPO", "RLOO"]
    assert {row["episodes"] for row in rows} == {4 * 4 * 12}
    assert all(0 <= row["median"] <= 1 and row["turns"] >= 1 and row["train_s"] > 0 for row in rows)
    assert figure.stat().st_size > 10_000


@pytest.mark.acceptance
@pytest.mark.timeout(300)
def test_the_benchmark_of_full_weights_compares_with_safetensors(tmp_path: Path) -> None:
    report = report_of("full_weights", tmp_path, 280, "--quick")
    assert {"rl_vlm: pack", "safetensors.save and hashlib", "copy of the bytes"} <= {
        row["label"] for row in report["rows"]
    }
    assert all(row["runs"] == 2 and 0 < row["min"] <= row["median"] for row in report["rows"])


@pytest.mark.acceptance
@pytest.mark.timeout(600)
def test_the_startup_benchmark_compares_with_a_bare_process(tmp_path: Path) -> None:
    report = report_of("startup", tmp_path, 580, "--quick")
    assert {"bare process / quickstart, wall", "5 s / dry run, wall"} <= report["ratios"].keys()
    assert {"bare process", "quickstart", "dry run"} <= {row["label"] for row in report["rows"]}


@pytest.mark.acceptance
@pytest.mark.timeout(900)
def test_the_learner_benchmark_finds_equal_gradients(tmp_path: Path) -> None:
    """It ends with an error where loss or gradient differ from TRL's."""
    report = report_of("learner", tmp_path, 880, "--quick")
    assert {"peak memory, rl_vlm / TRL (lower is better)", "seconds, rl_vlm / TRL (lower is better)"} <= set(
        report["ratios"]
    )
    rows = {row["label"]: row for row in report["rows"]}
    assert {"rl_vlm", "rl_vlm, no entropies", "TRL", "rl_vlm, 4 x the tokens"} <= rows.keys()
    assert all(row["peak_mib"] >= row["base_mib"] > 0 for row in rows.values())


@pytest.mark.acceptance
@pytest.mark.timeout(7200)
def test_every_preset_learns_the_quickstart_and_none_learns_from_shuffled_rewards(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks/presets.py"), "--out", str(tmp_path), "--controls"]
    subprocess.run(command, env=environment(), timeout=7000, check=True, cwd=ROOT)
    rows = json.loads((tmp_path / "presets.json").read_text())["rows"]
    for row in rows:
        assert row["before"] <= 0.35
        if row["rewards"] == "own":
            assert len(row["after"]) == 2 and min(row["after"]) >= 0.90, row
        else:
            assert len(row["after"]) == 1 and max(row["after"]) <= 0.35, row
    assert len((tmp_path / "presets.md").read_text().splitlines()) == 2 + len(rows)
    assert (tmp_path / "presets.png").stat().st_size > 10_000


@pytest.mark.acceptance
@pytest.mark.timeout(1200)
def test_the_benchmark_of_waiting_compares_lags_and_whole_rounds(tmp_path: Path) -> None:
    report = report_of("never_wait", tmp_path, 1100, "--quick")
    assert set(report["ratios"]) == {"lag 2 / lag 0", "lag 2 / lag 1, whole rounds"}
    rows = {row["label"]: row for row in report["rows"]}
    assert [rows[label]["oldest"] for label in ("lag 0", "lag 1, whole rounds")] == [0, 1]
    assert rows["lag 2"]["oldest"] <= 2 and rows["lag 2"]["dropped"] == 0


@pytest.mark.acceptance
@pytest.mark.timeout(900)
def test_the_benchmark_of_the_environments_writes_a_table_and_a_panel_for_each(tmp_path: Path) -> None:
    command = [
        sys.executable, str(ROOT / "benchmarks/environments.py"), "--out", str(tmp_path), "--configs", "nlvr2", "--seeds", "0", "--set",
        "algorithm.iterations=2", "evaluation.num_items=8",
    ]  # fmt: skip
    subprocess.run(command, env=environment(), timeout=800, check=True, cwd=ROOT)
    runs = json.loads((tmp_path / "environments.json").read_text())
    assert set(runs["nlvr2"]) == {"seed-0", "shuffled"}
    assert [step for step, _ in runs["nlvr2"]["seed-0"]["curve"]] == [0, 2]
    assert len((tmp_path / "environments.md").read_text().splitlines()) == 3
    assert (tmp_path / "environments.png").stat().st_size > 10_000


@pytest.mark.acceptance
@pytest.mark.timeout(900)
def test_the_scale_benchmark_drives_registry_router_and_samplers(tmp_path: Path) -> None:
    report = report_of("scale", tmp_path, 880, "--quick")
    medians = {row["label"]: row["median"] for row in report["rows"]}
    assert medians["router, 20 replicas, new work"] > 0
    assert 0 < medians["registry, 20 replicas, in process"] < medians["registry, 20 replicas, over Ray"]
    assert medians["rounds, 100 runners"] > 0 and medians["groups, 100 runners"] > 0
    assert not [note for note in report["notes"] if "acknowledged" in note]  # all replicas were reached


@pytest.mark.acceptance
@pytest.mark.timeout(1200)
def test_host_memory_stays_flat_on_episodes_full_of_images(tmp_path: Path) -> None:
    resolve_model("tiny-gridwalk")
    report = report_of("host_memory", tmp_path, 1150)
    assert {"driver", "learner", "env runners", "replicas", "shared memory", "all"} <= {
        row["label"] for row in report["rows"]
    }
    assert report["ratios"]["growth after the fifth iteration (goal: at most 0.02)"] <= 0.02


@pytest.mark.acceptance
@pytest.mark.timeout(300)
def test_the_check_of_resting_replicas_runs_without_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "resting.json"
    command = [
        sys.executable, str(ROOT / "benchmarks/gpu_resting.py"), "--cpu", "--size", "6m", "--rounds", "2", "--out", str(out),
    ]  # fmt: skip
    done = subprocess.run(command, env=environment(), timeout=280, check=True, cwd=ROOT, capture_output=True, text=True)
    assert "ERROR" not in done.stderr  # nor does vLLM report its own end as one
    assert {row["label"] for row in json.loads(out.read_text())["rows"]} == {"rest", "wake", "freed"}
