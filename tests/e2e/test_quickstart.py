"""The first thing that a user does: `rl-vlm train configs/quickstart.yaml`. It must learn, and end cleanly."""

from __future__ import annotations

import csv
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from runs import QUICKSTART, ROOT, TrainingProcess, environment, rl_vlm

import rl_vlm as rl_vlm_package
from rl_vlm.models.loading import resolve_model
from rl_vlm.ownership import files_in, run_files

pytestmark = pytest.mark.real


def test_counting_is_learned_from_chance_to_nine_in_ten(quickstart_run: Path) -> None:
    result = json.loads((quickstart_run / "result.json").read_text())
    assert result["status"] == "done"
    assert result["accuracy_before"] <= 0.35
    assert result["accuracy_after"] >= 0.90
    evaluations = [json.loads(line) for line in (quickstart_run / "eval.jsonl").read_text().splitlines()]
    assert all(evaluation["items/default"] >= 512 for evaluation in evaluations)


def test_both_replicas_serve_a_quarter_or_more(quickstart_run: Path) -> None:
    requests = json.loads((quickstart_run / "result.json").read_text())["requests_by_replica"]
    assert len(requests) == 2
    assert min(requests.values()) >= 0.25 * sum(requests.values())


def test_every_update_started_at_ratio_one_and_engine_and_learner_agree(quickstart_run: Path) -> None:
    rows = list(csv.DictReader((quickstart_run / "progress.csv").open()))
    assert [int(row["iteration"]) for row in rows] == list(range(1, len(rows) + 1))
    assert all(float(row["policy/first_ratio_error"]) == 0 for row in rows)
    assert all(abs(float(row["mismatch/kl"])) < 1e-6 for row in rows)
    assert all(float(row["rollout/lag_max"]) == 0 for row in rows)


def test_the_run_is_read_from_python_as_its_files_say(quickstart_run: Path) -> None:
    run = rl_vlm_package.load_run(quickstart_run)
    assert run.metrics == json.loads((quickstart_run / "result.json").read_text())
    rows = list(csv.DictReader((quickstart_run / "progress.csv").open()))
    assert run.progress["reward/mean"].tolist() == pytest.approx([float(row["reward/mean"]) for row in rows])
    assert run.evaluations["accuracy/default"].iloc[-1] == run.metrics["accuracy_after"]
    episodes = run.trajectories
    assert set(episodes["iteration"]) <= set(run.progress["iteration"])
    first = episodes.iloc[0]
    assert run.image(first["images"][0]).size == (64, 64)
    assert first["reward"] == float(first["messages"][1]["parts"] == [f"<answer>{first['info']['answer']}</answer>"])


def test_the_run_folder_holds_what_it_should(quickstart_run: Path) -> None:
    names = {path.name for path in quickstart_run.iterdir()}
    assert {"config.yaml", "progress.csv", "eval.jsonl", "checkpoints", "adapter", "curve.png", "result.json"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert list((quickstart_run / "trajectories").glob("*.parquet"))
    assert len(list((quickstart_run / "checkpoints").iterdir())) <= 3
    assert run_files(quickstart_run) == files_in(quickstart_run)  # --overwrite would leave nothing behind


def test_plain_transformers_and_peft_see_the_same_accuracy(quickstart_run: Path) -> None:
    script = [
        sys.executable,
        str(ROOT / "tests/e2e/plain_eval.py"),
        str(resolve_model("tiny")),
        str(quickstart_run / "adapter"),
    ]
    done = subprocess.run(script, capture_output=True, text=True, timeout=300, env=environment(), check=True)
    plain = json.loads(done.stdout.splitlines()[-1])["accuracy"]
    assert plain == pytest.approx(
        json.loads((quickstart_run / "result.json").read_text())["accuracy_after"], abs=2 / 512
    )


def test_eval_of_the_run(quickstart_run: Path, tmp_path: Path) -> None:
    done = rl_vlm(
        "eval",
        QUICKSTART,
        "evaluation.num_items=128",
        "serving.num_replicas=1",
        "--run-dir",
        quickstart_run,
        "--out",
        tmp_path / "e.json",
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "e.json").read_text())["accuracy/default"] >= 0.85


def test_show_draws_the_run_and_its_episodes(quickstart_run: Path) -> None:
    done = rl_vlm("show", quickstart_run, "--json", "--episodes", 2)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert len(shown["episodes"]) == 2


def last_row(run: TrainingProcess) -> dict[str, str]:
    return list(csv.DictReader((run.run_dir / "progress.csv").open()))[-1]


def test_the_run_goes_on_where_it_ended_and_a_signal_saves_it(quickstart_run: Path, tmp_path: Path) -> None:
    shutil.copytree(quickstart_run, tmp_path / "run")
    before = json.loads((quickstart_run / "result.json").read_text())
    more = ("evaluation.num_items=64", "serving.num_replicas=1", "rollout.num_env_runners=1", "--resume")
    with TrainingProcess(tmp_path / "run", "algorithm.iterations=10000", *more) as run:
        run.wait_for_iteration(before["iterations"] + 2)
        run.process.send_signal(signal.SIGINT)
        assert run.wait(timeout=120) == 128 + signal.SIGINT, run.output()[-3000:]
        assert run.survivors() == []
    assert f"Resumed from iteration {before['iterations']}" in run.output()
    after = run.result()
    assert (after["status"], after["iterations"]) == ("interrupted", run.iterations())
    assert [path.name for path in sorted((tmp_path / "run/checkpoints").iterdir())][-1].endswith(f"{run.iterations()}")
    assert after["accuracy_before"] == before["accuracy_before"] and float(last_row(run)["reward/mean"]) >= 0.8


@pytest.mark.acceptance
def test_the_exported_folder_plays_as_well(quickstart_run: Path, tmp_path: Path) -> None:
    done = rl_vlm("export", quickstart_run, tmp_path / "merged")
    assert done.returncode == 0, done.stderr
    done = rl_vlm("rollout", QUICKSTART, f"model.path={tmp_path / 'merged'}", "--episodes", 64, "--temperature", 0)
    assert done.returncode == 0, done.stderr
    *episodes, summary = map(json.loads, done.stdout.splitlines())
    assert len(episodes) == 64
    assert summary["summary"]["correct"] >= 0.85
