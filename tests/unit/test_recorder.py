"""RunRecorder: what a run leaves behind for people and programs, and that resuming cuts it."""

import errno
import json
import os
import stat
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import MagicMock, call

import numpy as np
import pytest
from recorder_support import (
    QUIET,
    WORDS,
    evaluations,
    group,
    leftovers,
    picture,
    read_trajectories,
    rows,
    scalars,
    trajectory,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rl_vlm import files
from rl_vlm.config import PolicyConfig
from rl_vlm.files import to_jsonable, write_atomic
from rl_vlm.learning.plan import TokenRecord
from rl_vlm.monitoring.recorder import RunRecorder
from rl_vlm.plots.run_curve import draw_curve
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.types import Message, TrajectoryGroup


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
        recorder.dump_trajectories(iteration, [group(0)], TokenRecord(), WORDS)
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
    RunRecorder(tmp_path, QUIET).log_iteration(1, {"new": 1})
    assert (tmp_path / "progress.csv").read_text() == "iteration,new\n1,1.0\n"


def test_damaged_lines_are_dropped_when_resuming(tmp_path):
    (tmp_path / "progress.csv").write_bytes(b"iteration,a\n1,1.0\n\0\0\0\0\n2,2.0\n")
    (tmp_path / "eval.jsonl").write_bytes(b'{"iteration": 1}\n{"iter\n[]\n')
    recorder = RunRecorder(tmp_path, QUIET, resumed_iteration=5)
    recorder.log_iteration(6, {"a": 6})
    assert [row["a"] for row in rows(tmp_path)] == ["1.0", "2.0", "6.0"]
    assert [entry["iteration"] for entry in recorder.evaluations()] == [1]


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


def test_the_end_writes_the_result_and_draws_the_curve(tmp_path):
    (tmp_path / "config.yaml").write_text("name: short")
    recorder = RunRecorder(tmp_path, QUIET, draw=draw_curve)
    recorder.finish({"status": "done", "accuracy_before": float("nan"), "accuracy_after": np.float64(0.5)})
    result = json.loads((tmp_path / "result.json").read_text())
    assert result == {"status": "done", "accuracy_before": None, "accuracy_after": 0.5}
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert recorder.write_errors == 0
    recorder.close()


# The end


def test_each_kind_of_failure_is_told_once_and_all_are_kept(tmp_path):
    recorder = RunRecorder(tmp_path, QUIET)
    assert recorder.log_failures(1, {"a": "KeyError: 'x' (dots.py, line 3)", "b": "no result within 60 s"}) == [
        "KeyError: 'x' (dots.py, line 3)",
        "no result within 60 s",
    ]
    assert recorder.log_failures(2, {"c": "no result within 61 s", "d": "another"}) == ["another"]
    kept = [json.loads(line) for line in (tmp_path / "failures.jsonl").read_text().splitlines()]
    assert [entry["group"] for entry in kept] == ["a", "b", "c", "d"]
    assert kept[2] == {"iteration": 2, "group": "c", "reason": "no result within 61 s"}


# --- Writing whole files, appending whole lines, values as JSON


def test_an_atomic_write_replaces_the_file_and_is_readable_by_others(tmp_path):
    old_mask = os.umask(0o022)
    try:
        write_atomic(tmp_path / "a.txt", "first")
        write_atomic(tmp_path / "a.txt", b"second")
    finally:
        os.umask(old_mask)
    assert (tmp_path / "a.txt").read_text() == "second"
    assert stat.S_IMODE((tmp_path / "a.txt").stat().st_mode) == 0o644
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failed_atomic_write_keeps_the_old_file_and_leaves_nothing(tmp_path, monkeypatch, step):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    write_atomic(tmp_path / "a.txt", "old")
    monkeypatch.setattr(files.os, step, fail)
    with pytest.raises(OSError, match="No space"):
        write_atomic(tmp_path / "a.txt", "new")
    assert (tmp_path / "a.txt").read_text() == "old"
    assert leftovers(tmp_path) == []


def test_json_values_are_plain_and_finite():
    value = {"a": np.float32(0.5), 2: np.arange(2), "c": (float("nan"), np.inf), "d": "\ud800", "e": {3, 1}}
    value |= {"f": np.bool_(True), "g": np.longdouble(1), "h": Path("x"), "i": np.int64(7)}
    plain = to_jsonable(value)
    assert plain == {
        "a": 0.5, "2": [0, 1], "c": [None, None], "d": "?", "e": [1, 3], "f": True, "g": 1.0, "h": "x", "i": 7,
    }  # fmt: skip
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain


# --- Dumps of sampled trajectories: they come back as they were, whole groups, images once


def test_trajectories_come_back_as_they_were(tmp_path):
    red, blue = picture("red"), picture("blue")
    one = trajectory(
        "g0/0",
        reward=0.5,
        images=(red,),
        info={"correct": np.bool_(True), "score": np.float32(0.5), "bad": "\udc80"},
        messages=(
            Message.of("user", red, "How many?"),
            Message.of("assistant", "3"),
            Message.of("tool", blue.to_pil()),
        ),
        replica_ids=("r1", "r2"),
    )
    two = trajectory("g0/1", reward=0.0, images=(red,))
    recorder = RunRecorder(tmp_path, QUIET)
    one.turns = (replace(one.turns[0], parts=(("answer", 1.0), ("format", 0.5))),)
    tokens = TokenRecord(
        advantages={"g0/0": np.float32([0.5, 1.5]), "g0/1": np.float32([-1, -1])},
        values={"g0/0": np.float32([0.25, 0.75]), "g0/1": np.float32([0, 0])},
        logprobs={"g0/0": np.float32([-0.5, -0.125])},  # the learner skipped the other one
    )
    recorder.dump_trajectories(10, [TrajectoryGroup("g0", 7, [one, two], "count", 2)], tokens, WORDS)
    path = tmp_path / "trajectories" / "iteration-000010.parquet"
    first, second = read_trajectories(path)
    assert (first["iteration"], first["group_id"], first["trajectory_id"], first["index"]) == (10, "g0", "g0/0", 7)
    assert (first["env"], first["stage"]) == ("count", 2)
    for name in ("token_ids", "loss_mask", "logprobs"):
        np.testing.assert_array_equal(first[name], getattr(one, name))
    parts = [{"name": "answer", "value": 1.0}, {"name": "format", "value": 0.5}]
    assert first["turns"] == [asdict(one.turns[0]) | {"stop_reason": "end_of_turn", "parts": parts, "pieces": []}]
    assert (first["turns"][0]["start"], first["turns"][0]["state_id"]) == (2, "shown")
    assert (first["reward"], first["advantage"], second["advantage"]) == (0.5, 1.0, -1.0)
    assert (first["status"], first["error"], first["replica_ids"]) == ("completed", "", ["r1", "r2"])
    assert first["info"] == {"correct": True, "score": 0.5, "bad": "?"}
    assert first["images"] == [red.sha256]
    assert first["messages"] == [
        {"role": "user", "parts": [{"image": red.sha256}, "How many?"]},
        {"role": "assistant", "parts": ["3"]},
        {"role": "tool", "parts": [{"image": blue.sha256}]},
    ]
    assert first["text"] == "5 6 7 8" and first["tokens"] == [" 5", "", " 7", " 8"]
    assert first["learner_logprobs"] == [0, 0, -0.5, -0.125] and second["learner_logprobs"] is None
    assert first["advantages"] == [0, 0, 0.5, 1.5] and first["values"] == [0, 0, 0.25, 0.75]
    assert first["entropies"] is None and first["correct"] is True
    assert first["image_spans"] == [{"start": 1, "stop": 2, "rows": 1, "columns": 1}]
    images = tmp_path / "trajectories" / "images"
    assert {path.stem for path in images.iterdir()} == {red.sha256, blue.sha256}
    assert (images / f"{red.sha256}.png").read_bytes() == red.png
    before = (images / f"{red.sha256}.png").stat().st_ino
    recorder.dump_trajectories(11, [group(0, images=(red,))], TokenRecord(), WORDS)
    assert (images / f"{red.sha256}.png").stat().st_ino == before  # written once
    assert leftovers(tmp_path) == []


def test_tensorboard_gets_one_episode_of_an_evaluation_with_its_pictures(tmp_path):
    red = picture("red")
    recorder = RunRecorder(tmp_path, PolicyConfig())
    messages = (Message.of("user", red, "How <b>many</b>?"), Message.of("assistant", "3"))
    items = [
        (
            RolloutTask(name, k, "test", 0, 0, 1, 0.0, 0, variant="default"),
            TrajectoryGroup(name, k, [trajectory(name, k, (red,), messages=messages)]),
        )
        for k, name in enumerate("ab")
    ]
    recorder.dump_evaluation(5, items, WORDS)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (text,) = events.Tensors("episode/text_summary")
    said = text.tensor_proto.string_val[0].decode()
    assert text.step == 5 and "[user] How <b>many</b>?" in said and said.rstrip().endswith("reward 1")
    assert all(line.startswith("    ") for line in said.splitlines())  # a block of code: nothing in it is markup
    (shown,) = events.Images("episode/picture_1")
    assert shown.encoded_image_string == red.png
    kept = read_trajectories(tmp_path / "evaluations" / "iteration-000005.parquet")
    assert [(row["index"], row["variant"], row["view"], row["advantage"]) for row in kept] == [
        (0, "default", "true", None),
        (1, "default", "true", None),
    ]


# --- Weights & Biases: used when its key is set, never in the way of a run


@pytest.fixture
def wandb(monkeypatch) -> MagicMock:
    """Stands in for wandb, whose run is `wandb.init.return_value`."""
    fake = MagicMock()
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_metrics_go_to_wandb_when_its_key_is_set(tmp_path, wandb):
    recorder = RunRecorder(tmp_path, QUIET)
    recorder.log_iteration(1, {"reward/mean": 0.5})
    recorder.finish({"status": "done"})
    recorder.close()
    started = wandb.init.return_value
    assert started.log.call_args_list == [call({"iteration": 1, "reward/mean": 0.5})] and started.finish.call_count == 1
    RunRecorder(tmp_path, QUIET, resumed_iteration=1)
    first, second = (one.kwargs for one in wandb.init.call_args_list)
    assert first["id"] == second["id"] and "secret" not in str(first)


def test_a_failing_wandb_does_not_fail_the_run(tmp_path, wandb, caplog):
    wandb.init.side_effect = [ConnectionError("no network"), wandb.init.return_value]
    RunRecorder(tmp_path, QUIET).log_iteration(1, {"a": 1})
    assert "Weights & Biases is off" in caplog.text
    wandb.init.return_value.log.side_effect = ZeroDivisionError
    recorder = RunRecorder(tmp_path, QUIET)
    recorder.log_iteration(1, {"a": 1})
    assert recorder.write_errors == 1 and rows(tmp_path)


# --- A full disk harms neither the run nor its files: simulated, by a quota, and on a tiny file system


# Runs on a file system that is full in truth, by a quota on file sizes or by being tiny.
REAL = """
import errno, json, resource, signal, sys
from pathlib import Path
import numpy as np
sys.path.insert(0, sys.argv[3])
sys.dont_write_bytecode = True  # what is imported under the quota would be cut off, and break every later process
from recorder_support import group, leftovers, picture, read_trajectories, rows, scalars, WORDS, evaluations
from rl_vlm.config import PolicyConfig
from rl_vlm.learning.plan import TokenRecord
from rl_vlm.monitoring.recorder import RunRecorder
from rl_vlm.plots.run_curve import draw_curve

folder, how = Path(sys.argv[1]), sys.argv[2]
ballast = folder / "ballast"
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

def fill():
    if how == "quota":
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, resource.RLIM_INFINITY))
        return
    with ballast.open("ab", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 1024)
        except OSError as error:
            assert error.errno == errno.ENOSPC

def free():
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    ballast.unlink(missing_ok=True)

(folder / "config.yaml").write_text("name: full-disk")
recorder = RunRecorder(folder, PolicyConfig(), draw=draw_curve)
image = picture("red")
recorder.log_iteration(1, {"reward/mean": 0.5})
recorder.log_evaluation(1, {"accuracy/default": 0.5})
fill()
for iteration in range(2, 200):
    recorder.log_iteration(iteration, {"reward/mean": 1 / iteration})
    if iteration == 2 or iteration % 50 == 0:
        recorder.log_evaluation(iteration, {"accuracy/default": 0.5, "text": "x" * 2000})
        recorder.dump_trajectories(iteration, [group(0, images=(image,))], TokenRecord(), WORDS)
recorder.finish({"status": "interrupted"})
assert recorder.write_errors > 10, recorder.write_errors
assert len(recorder.column("reward/mean")) == 199 and recorder.has_evaluation(150)
assert not leftovers(folder)
assert not (folder / "curve.png").exists()
for line in (folder / "progress.csv").read_text().splitlines():
    assert line.count(",") == 1
free()
errors = recorder.write_errors
recorder.log_iteration(200, {"reward/mean": 1 / 200, "new": 1})
recorder.log_evaluation(200, {"accuracy/default": 0.5})
recorder.dump_trajectories(200, [group(0, images=(image,))], TokenRecord(), WORDS)
recorder.finish({"status": "done"})
assert recorder.write_errors == errors
assert [int(row["iteration"]) for row in rows(folder)] == list(range(1, 201))
assert [entry["iteration"] for entry in evaluations(folder)] == [1, 2, *range(50, 200, 50), 200]
assert [step for step, _ in scalars(folder)["reward/mean"]] == list(range(1, 201))
assert len(read_trajectories(folder / "trajectories" / "iteration-000200.parquet")) == 3
assert (folder / "trajectories" / "images" / f"{image.sha256}.png").read_bytes() == image.png
assert json.loads((folder / "result.json").read_text())["status"] == "done"
assert (folder / "curve.png").stat().st_size > 10_000
print("all well")
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["quota", "tiny"])
def test_a_disk_that_is_really_full_harms_nothing(tmp_path, how):
    command = [sys.executable, "-c", REAL, str(tmp_path), how, str(Path(__file__).parent)]
    if how == "tiny":
        mount = f"mount -t tmpfs -o size=1m none {tmp_path}"
        # In a mount namespace of its own, so that the mount ends with the process; root there needs no root here.
        own = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"]), "sh", "-c"]
        if subprocess.run([*own, mount], capture_output=True).returncode:
            pytest.skip("this container may not mount; the quota's case needs no mount")
        command = [*own, f'{mount} && exec "$@"', "sh", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert "all well" in done.stdout
    assert "Free some space" in done.stderr or how == "quota"
    assert done.stderr.count("Cannot write progress.csv") == 1
