"""The scripts of tune/ at their small setting: each ends in minutes, resumes after a kill, and writes a table and a figure."""

from __future__ import annotations

import csv
import math
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from runs import ROOT, CommandProcess

from rl_vlm.models.loading import resolve_model

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(1500)]

SWEEPS = ["grpo_asha", "grpo_pbt", "preference_sweep", "compare_losses"]


class TuneProcess(CommandProcess):
    """A script of tune/ in the background."""

    program = (sys.executable,)

    def __init__(self, name: str, out: Path, *more: str) -> None:
        super().__init__(ROOT / f"tune/{name}.py", "--out", out, *more)


def finish(name: str, out: Path, *more: str) -> None:
    with TuneProcess(name, out, *more) as process:
        assert process.wait(timeout=1300) == 0, process.output()[-4000:]


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
    finish(name, out, "--quick")
    rows = results(out)
    assert all(row["finished"] == "True" for row in rows)
    assert not any(math.isnan(float(row["best"])) for row in rows)
    assert (out / "results.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "best/config.yaml").is_file()
    if name != "preference_sweep":  # its agent is no adapter
        assert (out / "best/adapter/adapter_model.safetensors").is_file()


def test_a_killed_sweep_goes_on_and_repeats_nothing(tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    short = ("--quick", "algorithm.iterations=16", "evaluation.every=4")

    def ended() -> list[Path]:
        found = (out / "tune").glob("trial-*/result.json")
        return [path for path in found if path.read_text().count('"training_iteration": 16,')]

    with TuneProcess("compare_losses", out, *short) as process:
        process.wait_until(lambda: len(ended()) >= 2, "the end of two trials", timeout=900)
        time.sleep(12)  # Tune saves its state every ten seconds
        os.killpg(process.process.pid, signal.SIGKILL)
        process.process.wait(30)
    before = {path: path.read_bytes() for path in ended()}
    assert before and not (out / "results.csv").exists()
    finish("compare_losses", out, *short, "--resume")
    assert {path: path.read_bytes() for path in before} == before  # nothing that was done is done again
    rows = results(out)
    assert len(rows) == 6 and all(row["finished"] == "True" and row["iterations"] == "16" for row in rows)


def test_the_tournament_compares_itself_with_one_run(tmp_path: Path) -> None:
    out = tmp_path / "tournament"
    finish("curriculum_tournament", out, "--quick")
    assert (out / "results.md").read_text().count("\n") == 5
    assert (out / "large/best/adapter/adapter_model.safetensors").is_file()


@pytest.mark.timeout(3600)
def test_asha_finds_what_the_median_of_its_space_does_not(tmp_path: Path) -> None:
    out = tmp_path / "asha"
    finish("grpo_asha", out)
    best = sorted(float(row["best"]) for row in results(out))
    print((out / "results.md").read_text())
    assert best[-1] >= 0.9
    assert best[len(best) // 2] < 0.9
