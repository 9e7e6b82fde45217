"""A full disk harms neither the run nor its files: simulated, by a quota, and on a tiny file system."""

import errno
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from recorder_support import evaluations, group, picture, rows, scalars, words

from rl_vlm import files
from rl_vlm.config import PolicyConfig
from rl_vlm.monitoring.recorder import RunRecorder


@pytest.fixture(autouse=True)
def _no_wandb(monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)


def test_a_full_disk_is_counted_warned_of_once_and_made_up_for(tmp_path, monkeypatch, caplog):
    full = True

    def write(real, *arguments):
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments)

    for module in ("trajectories", "recorder"):
        for name in ("write_atomic", "append_whole"):
            target = f"rl_vlm.monitoring.{module}.{name}"
            real = getattr(files, name)
            monkeypatch.setattr(target, lambda *a, real=real: write(real, *a), raising=False)
    caplog.set_level(logging.WARNING)
    recorder = RunRecorder(tmp_path, PolicyConfig())
    for iteration in (1, 2):
        recorder.log_iteration(iteration, {"reward/mean": 0.1 * iteration})
        recorder.log_evaluation(iteration, {"accuracy/default": 0.5})
        recorder.dump_trajectories(iteration, [group(0, images=(picture("red"),))], [np.zeros(3)], words)
    assert recorder.write_errors == 2 * 5  # csv, jsonl, trajectories, TensorBoard for metrics and for evaluations
    assert len(caplog.records) == 4 and all("The run goes on" in record.message for record in caplog.records)
    assert recorder.column("reward/mean") == [0.1, 0.2] and recorder.has_evaluation(2)
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
    full = False
    recorder.log_iteration(3, {"reward/mean": 0.3, "new": 1})
    recorder.log_evaluation(3, {"accuracy/default": 0.6})
    assert [row["reward/mean"] for row in rows(tmp_path)] == ["0.1", "0.2", "0.3"]
    assert [entry["iteration"] for entry in evaluations(tmp_path)] == [1, 2, 3]
    assert scalars(tmp_path)["reward/mean"] == [(1, 0.1), (2, 0.2), (3, 0.3)]
    recorder.finish({"status": "done"})
    assert recorder.write_errors == 10


# Runs on a file system that is full in truth, by a quota on file sizes or by being tiny.
REAL = """
import errno, json, resource, signal, sys
from pathlib import Path
import numpy as np
sys.path.insert(0, sys.argv[3])
from recorder_support import group, leftovers, picture, read_trajectories, rows, scalars, words, evaluations
from rl_vlm.config import PolicyConfig
from rl_vlm.monitoring.recorder import RunRecorder
from rl_vlm.plots.curves import draw_curve

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

recorder = RunRecorder(folder, PolicyConfig(), draw=draw_curve)
image = picture("red")
recorder.log_iteration(1, {"reward/mean": 0.5})
recorder.log_evaluation(1, {"accuracy/default": 0.5})
fill()
for iteration in range(2, 200):
    recorder.log_iteration(iteration, {"reward/mean": 1 / iteration})
    if iteration == 2 or iteration % 50 == 0:
        recorder.log_evaluation(iteration, {"accuracy/default": 0.5, "text": "x" * 2000})
        recorder.dump_trajectories(iteration, [group(0, images=(image,))], [np.zeros(3)], words)
recorder.finish({"status": "interrupted"})
assert recorder.write_errors > 10, recorder.write_errors
assert not leftovers(folder)
assert not (folder / "curve.png").exists()
for line in (folder / "progress.csv").read_text().splitlines():
    assert line.count(",") == 1
free()
errors = recorder.write_errors
recorder.log_iteration(200, {"reward/mean": 1 / 200, "new": 1})
recorder.log_evaluation(200, {"accuracy/default": 0.5})
recorder.dump_trajectories(200, [group(0, images=(image,))], [np.zeros(3)], words)
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
