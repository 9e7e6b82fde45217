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

from rl_vlm.config import PolicyConfig, load_config

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


def submit(tmp_path: Path, *arguments: str, **changes: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the script with stand-ins for `rl-vlm` and `apptainer`; returns how it ended and the command that it gave."""
    for name in ("rl-vlm", "apptainer"):
        stand_in = tmp_path / name
        stand_in.write_text(
            f'#!/bin/sh\nprintf "%s\\n" {name} "$@" "root=$ARTIFACT_ROOT" "hub=$HF_HOME" > {tmp_path}/command\n'
        )
        stand_in.chmod(0o755)
    submitted = tmp_path / "submitted"  # a checkout without .venv
    submitted.mkdir()
    (submitted / "configs").symlink_to(ROOT / "configs")
    known = variables(tmp_path, **changes) | {"SLURM_SUBMIT_DIR": str(submitted)}
    known = {
        name: value for name, value in known.items() if name not in ("ARTIFACT_ROOT", "HF_HOME") or name in changes
    }
    done = subprocess.run(
        ["bash", SCRIPT, *arguments], env=known, capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip
    noted = tmp_path / "command"
    return done, noted.read_text().splitlines() if noted.is_file() else []


def run_of(command: list[str]) -> PolicyConfig:
    """The configuration of a command that the script gave."""
    config = next(part for part in command if part.endswith(".yaml"))
    return load_config(ROOT / config, [part for part in command[command.index(config) :] if "=" in part][:-2])


@pytest.mark.parametrize(
    ("changes", "source"),
    [
        ({"SERVER_PORT": "8001"}, "vlm"),  # the fork's own command
        ({"SERVER_PORT": "8001", "SERVER_HOST": "0.0.0.0"}, "vlm"),  # the address to which the fork binds its server
        ({"SERVER_PORT": "8001", "SERVER_HOST": "localhost"}, "vlm"),
        ({"SERVER_PORT": "8001", "SERVER_HOST": "gpu7"}, "generate"),
        ({"SERVER_URL": "http://localhost:8001/generate", "SERVER_HOST": "0.0.0.0"}, "generate"),
        ({}, "vlm"),
    ],
)
def test_only_a_server_elsewhere_is_asked(changes: dict[str, str], source: str, tmp_path: Path) -> None:
    done, command = submit(tmp_path, TASK_ENV="metaworld_soccer-v2", **changes)
    assert done.returncode == 0, done.stderr
    assert run_of(command).preference.labels.source == source
    assert ("not used: the run serves its model itself" in done.stderr) == (source == "vlm" and bool(changes))


def test_an_explicit_source_wins_over_the_variables(tmp_path: Path) -> None:
    done, command = submit(tmp_path, "preference.labels.source=generate", SERVER_PORT="8001")
    assert run_of(command).preference.labels.source == "generate" and not done.stderr


@pytest.mark.parametrize("task", ["assembly", "box_close", "coffee_push", "stick_pull"])
def test_the_forks_later_tasks_have_its_settings_without_variables(task: str) -> None:
    run = load_config(ROOT / "configs" / "rl_vlm_f" / f"{task}.yaml")
    evaluation, model = run.preference.evaluation, run.preference.reward_model
    assert (evaluation.every, evaluation.episodes, evaluation.end_on_success) == (5000, 20, True)
    assert (model.lr, model.epochs) == (1e-4, 5) and run.env.kwargs == {"camera": "corner2", "horizon": 100}


def test_the_forks_variables_of_its_later_tasks_become_settings(tmp_path: Path) -> None:
    done, command = submit(
        tmp_path, TASK_ENV="metaworld_assembly-v2", SERVER_PORT="8001", METAWORLD_CAMERA="corner2",
        MAX_EPISODE_STEPS="100", NUM_EVAL_EPISODES="20", EVAL_TERM_SUCCESS="true", EVAL_FREQUENCY="5000",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = run_of(command)
    evaluation = run.preference.evaluation
    assert (evaluation.every, evaluation.episodes, evaluation.end_on_success) == (5000, 20, True)
    assert run.env.kwargs == {"camera": "corner2", "horizon": 100}


def test_false_and_zero_leave_episodes_whole(tmp_path: Path) -> None:
    _, command = submit(tmp_path, TASK_ENV="assembly", EVAL_TERM_SUCCESS="false", MAX_EPISODE_STEPS="0")
    run = run_of(command)
    assert not run.preference.evaluation.end_on_success and run.env.kwargs["horizon"] == 100


def test_scratch_holds_artifacts_and_the_hubs_cache(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    done, command = submit(tmp_path, SCRATCH_DIR=str(scratch), SERVER_LOG="logs/server.log")
    assert command[-2:] == [f"root={scratch}/rl_vlm", f"hub={scratch}/hf_cache"]
    assert "SERVER_LOG is not used" in done.stderr


def test_what_is_named_for_artifacts_and_cache_wins_over_scratch(tmp_path: Path) -> None:
    _, command = submit(tmp_path, SCRATCH_DIR=str(tmp_path), ARTIFACT_ROOT="/a", HF_HOME="/b")
    assert command[-2:] == ["root=/a", "hub=/b"]


def test_a_job_that_was_killed_before_its_run_had_begun_can_be_requeued(tmp_path: Path) -> None:
    """The run folder has its marker then, and no configuration yet."""
    (tmp_path / "rl_vlm.sif").touch()
    done, command = submit(tmp_path, APPTAINER_IMAGE=str(tmp_path / "rl_vlm.sif"))
    assert done.returncode == 0, done.stderr
    assert command[command.index("--run-dir") + 2] == "--resume"


@pytest.mark.parametrize("variable", ["APPTAINER_IMAGE", "CONTAINER"])
def test_a_job_runs_inside_the_image(variable: str, tmp_path: Path) -> None:
    (tmp_path / "rl_vlm.sif").touch()
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    done, command = submit(tmp_path, SCRATCH_DIR=str(scratch), **{variable: str(tmp_path / "rl_vlm.sif")})
    assert done.returncode == 0, done.stderr
    run_dir = tmp_path / "submitted" / command[command.index("--run-dir") + 1]
    binds = (
        f"{tmp_path / 'submitted'},{run_dir},{scratch / 'rl_vlm'},{scratch / 'hf_cache'}"  # made where they were not
    )
    assert command[:8] == [
        "apptainer",
        "exec",
        "--nv",
        "--bind",
        binds,
        str(tmp_path / "rl_vlm.sif"),
        "rl-vlm",
        "train",
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"CONTAINER": "/no/such/image.sif"}, "There is no image /no/such/image.sif"),
        ({"SCRATCH_DIR": "/no/such/scratch"}, "SCRATCH_DIR=/no/such/scratch is not a folder"),
    ],
)
def test_places_that_do_not_exist_are_refused(changes: dict[str, str], words: str, tmp_path: Path) -> None:
    done, command = submit(tmp_path, **changes)
    assert done.returncode == 2 and words in done.stderr and not command


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
