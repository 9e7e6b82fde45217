"""The first thing that a user does: `rl-vlm train configs/quickstart.yaml`. It must learn, and end cleanly."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs import QUICKSTART, ROOT, TrainingProcess, environment, rl_vlm

import rl_vlm as rl_vlm_package
from rl_vlm.models.loading import resolve_model
from rl_vlm.ownership import files_in, run_files


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished quickstart run: the one that CI has just made as a user does, else one of its own."""
    if given := os.environ.get("RL_VLM_QUICKSTART_RUN"):
        return Path(given)
    folder = tmp_path_factory.mktemp("quickstart") / "run"
    with TrainingProcess(folder) as run:
        code = run.wait(timeout=540)
        print(run.output())
        assert code == 0, run.output()[-3000:]
        assert run.survivors() == []
    return folder


def test_counting_is_learned_from_chance_to_nine_in_ten(run_dir: Path) -> None:
    result = json.loads((run_dir / "result.json").read_text())
    assert result["status"] == "done"
    assert result["accuracy_before"] <= 0.35
    assert result["accuracy_after"] >= 0.90
    evaluations = [json.loads(line) for line in (run_dir / "eval.jsonl").read_text().splitlines()]
    assert all(evaluation["items/default"] >= 512 for evaluation in evaluations)


def test_both_replicas_serve_a_quarter_or_more(run_dir: Path) -> None:
    requests = json.loads((run_dir / "result.json").read_text())["requests_by_replica"]
    assert len(requests) == 2
    assert min(requests.values()) >= 0.25 * sum(requests.values())


def test_every_update_started_at_ratio_one_and_engine_and_learner_agree(run_dir: Path) -> None:
    rows = list(csv.DictReader((run_dir / "progress.csv").open()))
    assert [int(row["iteration"]) for row in rows] == list(range(1, len(rows) + 1))
    assert all(float(row["policy/first_ratio_error"]) == 0 for row in rows)
    assert all(abs(float(row["mismatch/kl"])) < 1e-6 for row in rows)
    assert all(float(row["rollout/lag_max"]) == 0 for row in rows)


def test_the_run_is_read_from_python_as_its_files_say(run_dir: Path) -> None:
    run = rl_vlm_package.load_run(run_dir)
    assert run.metrics == json.loads((run_dir / "result.json").read_text())
    rows = list(csv.DictReader((run_dir / "progress.csv").open()))
    assert run.progress["reward/mean"].tolist() == pytest.approx([float(row["reward/mean"]) for row in rows])
    assert run.evaluations["accuracy/default"].iloc[-1] == run.metrics["accuracy_after"]
    episodes = run.trajectories
    assert set(episodes["iteration"]) <= set(run.progress["iteration"])
    first = episodes.iloc[0]
    assert run.image(first["images"][0]).size == (64, 64)
    assert first["reward"] == float(first["messages"][1]["parts"] == [f"<answer>{first['info']['answer']}</answer>"])


def test_the_run_folder_holds_what_it_should(run_dir: Path) -> None:
    names = {path.name for path in run_dir.iterdir()}
    assert {"config.yaml", "progress.csv", "eval.jsonl", "checkpoints", "adapter", "curve.png", "result.json"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert list((run_dir / "trajectories").glob("*.parquet"))
    assert len(list((run_dir / "checkpoints").iterdir())) <= 3
    assert run_files(run_dir) == files_in(run_dir)  # --overwrite would leave nothing behind


def test_plain_transformers_and_peft_see_the_same_accuracy(run_dir: Path) -> None:
    script = [
        sys.executable,
        str(ROOT / "tests/e2e/plain_eval.py"),
        str(resolve_model("tiny")),
        str(run_dir / "adapter"),
    ]
    done = subprocess.run(script, capture_output=True, text=True, timeout=300, env=environment(), check=True)
    plain = json.loads(done.stdout.splitlines()[-1])["accuracy"]
    assert plain == pytest.approx(json.loads((run_dir / "result.json").read_text())["accuracy_after"], abs=2 / 512)


def test_eval_of_the_run(run_dir: Path, tmp_path: Path) -> None:
    done = rl_vlm("eval", QUICKSTART, "evaluation.num_items=128", "--run-dir", run_dir, "--out", tmp_path / "e.json")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "e.json").read_text())["accuracy/default"] >= 0.85


@pytest.mark.acceptance
def test_the_exported_folder_plays_as_well(run_dir: Path, tmp_path: Path) -> None:
    done = rl_vlm("export", run_dir, tmp_path / "merged")
    assert done.returncode == 0, done.stderr
    done = rl_vlm("rollout", QUICKSTART, f"model.path={tmp_path / 'merged'}", "--episodes", 64, "--temperature", 0)
    assert done.returncode == 0, done.stderr
    *episodes, summary = map(json.loads, done.stdout.splitlines())
    assert len(episodes) == 64
    assert summary["summary"]["correct"] >= 0.85
