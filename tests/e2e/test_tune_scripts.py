"""The scripts of tune/ at their small setting: each ends in minutes, resumes after a kill, and writes a table and a figure."""

from __future__ import annotations

import csv
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import ROOT, environment

from rl_vlm.models.loading import resolve_model

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(1500)]

SWEEPS = ["grpo_asha", "grpo_pbt", "preference_sweep", "compare_losses"]


def start(name: str, out: Path, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(ROOT / f"tune/{name}.py"), "--out", str(out), *more]
    variables = environment(PYTHONPATH=os.environ.get("PYTHONPATH", str(ROOT)))
    with open(out.with_suffix(".log"), "a") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=variables, start_new_session=True)


def finish(process: subprocess.Popen[bytes], out: Path) -> None:
    try:
        assert process.wait(timeout=1300) == 0, out.with_suffix(".log").read_text()[-4000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def results(out: Path) -> list[dict[str, str]]:
    with (out / "results.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module", autouse=True)
def models() -> None:
    for name in ("tiny-labeller", "tiny-gridwalk"):
        resolve_model(name)


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_ends_with_a_table_a_figure_and_the_best(name: str, tmp_path: Path) -> None:
    out = tmp_path / name
    finish(start(name, out, "--quick"), out)
    rows = results(out)
    assert all(row["finished"] == "True" for row in rows)
    assert not any(math.isnan(float(row["best"])) for row in rows)
    assert (out / "results.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "best/config.yaml").is_file()
    if name != "preference_sweep":  # its agent is no adapter
        assert (out / "best/adapter/adapter_model.safetensors").is_file()


def test_a_killed_sweep_goes_on_and_repeats_nothing(tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    process = start("compare_losses", out, "--quick", "algorithm.iterations=16", "evaluation.every=4")
    deadline = time.monotonic() + 900

    def ended() -> list[Path]:
        return [
            path
            for path in (out / "tune").glob("trial-*/result.json")
            if path.read_text().count('"training_iteration": 16,')
        ]

    while len(ended()) < 2:
        assert process.poll() is None and time.monotonic() < deadline, out.with_suffix(".log").read_text()[-3000:]
        time.sleep(0.5)
    time.sleep(12)  # Tune saves its state every ten seconds
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)
    before = {path: path.read_bytes() for path in ended()}
    assert before and not (out / "results.csv").exists()
    finish(start("compare_losses", out, "--quick", "--resume", "algorithm.iterations=16", "evaluation.every=4"), out)
    assert {path: path.read_bytes() for path in before} == before  # nothing that was done is done again
    rows = results(out)
    assert len(rows) == 6 and all(row["finished"] == "True" and row["iterations"] == "16" for row in rows)


def test_the_tournament_compares_itself_with_one_run(tmp_path: Path) -> None:
    out = tmp_path / "tournament"
    finish(start("curriculum_tournament", out, "--quick"), out)
    assert (out / "results.md").read_text().count("\n") == 5
    assert (out / "large/best/adapter/adapter_model.safetensors").is_file()


@pytest.mark.timeout(3600)
def test_asha_finds_what_the_median_of_its_space_does_not(tmp_path: Path) -> None:
    out = tmp_path / "asha"
    finish(start("grpo_asha", out), out)
    best = sorted(float(row["best"]) for row in results(out))
    print((out / "results.md").read_text())
    assert best[-1] >= 0.9
    assert best[len(best) // 2] < 0.9
