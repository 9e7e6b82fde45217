"""The Slurm script of preference runs, run by bash as Slurm runs it; `scontrol` is a stand-in that notes its calls."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import ROOT, environment

SCRIPT = ROOT / "cluster" / "slurm" / "preference.sbatch"


def variables(tmp_path: Path, **changes: str) -> dict[str, str]:
    """A job's environment, with this Python's `rl-vlm` and a stand-in for `scontrol` on the path."""
    stand_in = tmp_path / "scontrol"
    stand_in.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/scontrol.log\n')
    stand_in.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**environment(**changes), "PATH": path, "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "42"}


@pytest.mark.parametrize(
    ("task", "config"),
    [("metaworld_drawer-open-v2", "drawer-open"), ("CartPole-v1", "cartpole"), ("metaworld_sweep-into-v2", "sweep-into")],
)  # fmt: skip
def test_the_forks_variables_become_settings(task: str, config: str, tmp_path: Path) -> None:
    changes = {"TASK_ENV": task, "NUM_EVAL_EPISODES": "5", "EVAL_FREQUENCY": "100", "RUN_DIR": str(tmp_path / "run")}
    if task.startswith("metaworld"):
        changes |= {"METAWORLD_CAMERA": "corner", "MAX_EPISODE_STEPS": "123"}
    offline = "preference.labels.source=scripted"  # its default asks a model that is not here
    done = subprocess.run(
        ["bash", SCRIPT, offline, "learner.gpus_per_learner=0", "--dry-run"],
        env=variables(tmp_path, **changes), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "nothing is wrong" in done.stdout
    assert ("horizon: 123" in done.stdout) == task.startswith("metaworld")
    assert (ROOT / "configs" / "rl_vlm_f" / f"{config.replace('-', '_')}.yaml").is_file()


def test_an_unknown_task_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", SCRIPT], env=variables(tmp_path, TASK_ENV="metaworld_juggle-v2"), capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "juggle" in done.stderr and "drawer_open" in done.stderr


@pytest.mark.acceptance
def test_a_job_that_ends_early_saves_requeues_and_goes_on(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = ["preference.labels.source=scripted", "preference.steps_per_iteration=100"]
    changes = {"TASK_ENV": "cartpole_tiny", "RUN_DIR": str(run_dir), "ARTIFACT_ROOT": str(tmp_path / "scratch")}
    job = subprocess.Popen(["bash", SCRIPT, *arguments], env=variables(tmp_path, **changes), start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while not (run_dir / "progress.csv").is_file() or len((run_dir / "progress.csv").read_text().splitlines()) < 8:
            assert job.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        job.send_signal(signal.SIGTERM)
        assert job.wait(120) == 0
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert (tmp_path / "scontrol.log").read_text() == "requeue 42\n"
    assert len(list((run_dir / "checkpoints").glob("step-*"))) == 1
    done = subprocess.run(
        ["bash", SCRIPT, *arguments, "preference.total_steps=1500"],
        env=variables(tmp_path, **changes), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Resumed at step" in done.stdout
    assert len(list((tmp_path / "scratch" / "run" / "checkpoints").glob("step-*"))) >= 2
