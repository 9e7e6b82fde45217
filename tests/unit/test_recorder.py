"""RunRecorder: what a run leaves behind for people and programs, and that resuming cuts it."""

import json

import numpy as np
import pytest
from recorder_support import QUIET, evaluations, group, leftovers, rows, scalars, words

from rl_vlm.config import PolicyConfig
from rl_vlm.monitoring.recorder import RunRecorder
from rl_vlm.plots.curves import draw_curve


@pytest.fixture(autouse=True)
def _no_wandb(monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)


# progress.csv and eval.jsonl


def test_progress_begins_with_the_iteration_and_grows_by_new_columns(tmp_path):
    recorder = RunRecorder(tmp_path, QUIET)
    recorder.log_iteration(1, {"reward/mean": 0.25, "time/step": 1})
    recorder.log_iteration(2, {"reward/mean": np.float32(0.5)})
    recorder.log_iteration(3, {"dropped/a,b": 2, "reward/mean": float("nan")})
    assert (tmp_path / "progress.csv").read_text() == (
        'iteration,reward/mean,time/step,"dropped/a,b"\n1,0.25,1.0,\n2,0.5,,\n3,nan,,2.0\n'
    )
    assert recorder.column("reward/mean")[:2] == [0.25, 0.5]
    assert leftovers(tmp_path) == []


def test_an_evaluation_is_one_line_of_json(tmp_path):
    recorder = RunRecorder(tmp_path, QUIET)
    recorder.log_evaluation(0, {"accuracy/default": np.float64(0.25), "reward/default": float("nan"), "name": "x"})
    (entry,) = evaluations(tmp_path)
    assert entry.pop("time") > 1e9
    assert entry == {"iteration": 0, "accuracy/default": 0.25, "reward/default": None, "name": "x"}
    assert recorder.has_evaluation(0) and not recorder.has_evaluation(1)


def test_resuming_cuts_what_lies_beyond_the_checkpoint(tmp_path):
    recorder = RunRecorder(tmp_path, QUIET)
    for iteration in range(1, 6):
        recorder.log_iteration(iteration, {"a": iteration})
        recorder.log_evaluation(iteration, {"accuracy/default": 0.1 * iteration})
        recorder.dump_trajectories(iteration, [group(0)], [np.zeros(3)], words)
    with (tmp_path / "progress.csv").open("a") as file:
        file.write("6,0.")  # killed while it wrote
    resumed = RunRecorder(tmp_path, QUIET, resumed_iteration=3)
    assert [row["iteration"] for row in rows(tmp_path)] == ["1", "2", "3"]
    assert [entry["iteration"] for entry in evaluations(tmp_path)] == [1, 2, 3]
    assert len(list((tmp_path / "trajectories").glob("*.parquet"))) == 3
    resumed.log_iteration(4, {"a": 40, "b": 1})
    resumed.log_evaluation(4, {"accuracy/default": 0.9})
    assert [row["a"] for row in rows(tmp_path)] == ["1.0", "2.0", "3.0", "40.0"]
    assert [entry["iteration"] for entry in resumed.evaluations()] == [1, 2, 3, 4]


def test_damaged_lines_are_dropped_when_resuming(tmp_path):
    (tmp_path / "progress.csv").write_bytes(b"iteration,a\n1,1.0\n\0\0\0\0\n2,2.0\n")
    (tmp_path / "eval.jsonl").write_bytes(b'{"iteration": 1}\n{"iter\n[]\n')
    recorder = RunRecorder(tmp_path, QUIET, resumed_iteration=5)
    recorder.log_iteration(6, {"a": 6})
    assert [row["a"] for row in rows(tmp_path)] == ["1.0", "2.0", "6.0"]
    assert [entry["iteration"] for entry in recorder.evaluations()] == [1]


def test_a_new_run_begins_with_empty_files(tmp_path):
    RunRecorder(tmp_path, QUIET).log_iteration(1, {"old": 1})
    RunRecorder(tmp_path, QUIET).log_iteration(1, {"new": 1})
    assert (tmp_path / "progress.csv").read_text() == "iteration,new\n1,1.0\n"


# TensorBoard


def test_tensorboard_reads_metrics_and_evaluations(tmp_path):
    recorder = RunRecorder(tmp_path, PolicyConfig())
    recorder.log_iteration(1, {"reward/mean": 0.5, "policy/kl": 1e-3})
    recorder.log_evaluation(1, {"accuracy/default": 0.75, "seconds": 2, "name": "text", "flag": True})
    recorder.log_iteration(2, {"reward/mean": 0.6})
    assert scalars(tmp_path) == {  # without closing anything: it is on the disk at once
        "reward/mean": [(1, 0.5), (2, 0.6)],
        "policy/kl": [(1, 1e-3)],
        "accuracy/default": [(1, 0.75)],
        "evaluation/seconds": [(1, 2.0)],
    }


def test_tensorboard_shows_no_duplicates_after_resuming(tmp_path):
    first = RunRecorder(tmp_path, PolicyConfig())
    for iteration in range(1, 5):
        first.log_iteration(iteration, {"a": iteration})
    second = RunRecorder(tmp_path, PolicyConfig(), resumed_iteration=2)
    second.log_iteration(3, {"a": 30})
    assert scalars(tmp_path) == {"a": [(1, 1.0), (2, 2.0), (3, 30.0)]}


# The end


def test_result_json_has_all_keys_and_the_extra_ones(tmp_path):
    recorder = RunRecorder(tmp_path, QUIET, draw=draw_curve)
    recorder.finish({"status": "done", "iterations": 3, "accuracy_after": np.float64(0.5), "startup_seconds": 1.5})
    result = json.loads((tmp_path / "result.json").read_text())
    assert list(result) == [
        "status", "iterations", "train_seconds", "accuracy_before", "accuracy_after", "reward_before", "reward_after",
        "policy_version", "trajectories", "dropped", "restarts", "startup_seconds",
    ]  # fmt: skip
    assert (result["status"], result["accuracy_before"], result["accuracy_after"]) == ("done", None, 0.5)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert recorder.write_errors == 0
    recorder.close()


def test_each_kind_of_failure_is_told_once_and_all_are_kept(tmp_path, monkeypatch):
    recorder = RunRecorder(tmp_path, QUIET)
    assert recorder.log_failures(1, {"a": "KeyError: 'x' (dots.py, line 3)", "b": "no result within 60 s"}) == [
        "KeyError: 'x' (dots.py, line 3)",
        "no result within 60 s",
    ]
    assert recorder.log_failures(2, {"c": "no result within 61 s", "d": "another"}) == ["another"]
    monkeypatch.setattr("rl_vlm.monitoring.recorder.MAX_FAILURES", 5)
    recorder.log_failures(3, {"e": "another", "f": "another"})
    kept = [json.loads(line) for line in (tmp_path / "failures.jsonl").read_text().splitlines()]
    assert [entry["group"] for entry in kept] == ["a", "b", "c", "d", "e"]
    assert kept[2] == {"iteration": 2, "group": "c", "reason": "no result within 61 s"}
