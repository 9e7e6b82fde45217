"""The Slurm script of preference runs, run by bash as Slurm runs it; `scontrol` is a stand-in that notes its calls."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from ports import free_ports
from runs import ROOT, CommandProcess, environment, iterations_done

from rl_vlm.config import PolicyConfig, load_config

SCRIPT = ROOT / "cluster" / "slurm" / "preference.sbatch"


class BashProcess(CommandProcess):
    """A script in the background, in the environment of a job."""

    program = ("bash",)


def bash(env: dict[str, str], *command: Any, patience: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", *command], env=env, capture_output=True, text=True, timeout=patience, check=False)


def checkout(tmp_path: Path) -> Path:
    """A checkout without .venv, from which a job is submitted."""
    folder = tmp_path / "submitted"
    if not folder.exists():
        folder.mkdir()
        (folder / "configs").symlink_to(ROOT / "configs")
    return folder


def variables(tmp_path: Path, **changes: str) -> dict[str, str]:
    """A job's environment, with this Python's `rl-vlm` and a stand-in for `scontrol` on the path."""
    stand_in = tmp_path / "scontrol"
    stand_in.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/scontrol.log\n')
    stand_in.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**environment(**changes), "PATH": path, "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "42"}


def test_an_unknown_task_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    done = bash(variables(tmp_path, TASK_ENV="metaworld_juggle-v2"), SCRIPT)
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
    known = {name: value for name, value in variables(tmp_path).items() if name not in ("ARTIFACT_ROOT", "HF_HOME")}
    known |= {"SLURM_SUBMIT_DIR": str(checkout(tmp_path)), **changes}
    done = bash(known, SCRIPT, *arguments)
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


@pytest.mark.parametrize(
    ("task", "config"),
    [
        ("metaworld_drawer-open-v2", "drawer_open"), ("CartPole-v1", "cartpole"), ("metaworld_sweep-into-v2", "sweep_into"),
        ("metaworld_assembly-v2", "assembly"),
    ],
)  # fmt: skip
def test_the_forks_variables_become_settings(task: str, config: str, tmp_path: Path) -> None:
    changes = {
        "NUM_EVAL_EPISODES": "7",
        "EVAL_FREQUENCY": "70",
        "EVAL_TERM_SUCCESS": "true",
        "RUN_DIR": str(tmp_path / "run"),
    }
    view = {"METAWORLD_CAMERA": "corner", "MAX_EPISODE_STEPS": "123"} if task.startswith("metaworld") else {}
    done, command = submit(tmp_path, TASK_ENV=task, **changes, **view)
    assert done.returncode == 0, done.stderr
    assert (
        f"configs/rl_vlm_f/{config}.yaml" in command and command[command.index("--run-dir") + 1] == changes["RUN_DIR"]
    )
    run = run_of(command)
    evaluation = run.preference.evaluation
    assert (evaluation.every, evaluation.episodes, evaluation.end_on_success) == (70, 7, True)
    assert not view or (run.env.kwargs["camera"], run.env.kwargs["horizon"]) == ("corner", 123)


def test_false_and_zero_leave_episodes_whole(tmp_path: Path) -> None:
    _, command = submit(tmp_path, TASK_ENV="assembly", EVAL_TERM_SUCCESS="false", MAX_EPISODE_STEPS="0")
    run = run_of(command)
    assert not run.preference.evaluation.end_on_success and run.env.kwargs["horizon"] == 100


def test_scratch_holds_artifacts_and_the_hubs_cache_unless_others_are_named(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    done, command = submit(tmp_path, SCRATCH_DIR=str(scratch), SERVER_LOG="logs/server.log")
    assert command[-2:] == [f"root={scratch}/rl_vlm", f"hub={scratch}/hf_cache"]
    assert "SERVER_LOG is not used" in done.stderr
    _, command = submit(tmp_path, SCRATCH_DIR=str(scratch), ARTIFACT_ROOT="/a", HF_HOME="/b")
    assert command[-2:] == ["root=/a", "hub=/b"]


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
    assert command[:8] == ["apptainer", "exec", "--nv", "--bind", binds, f"{tmp_path}/rl_vlm.sif", "rl-vlm", "train"]
    # A job that was killed before its run had begun has a folder with a marker, and no configuration yet.
    assert command[command.index("--run-dir") + 2] == "--resume"


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
    with BashProcess(SCRIPT, *arguments, **variables(tmp_path, **changes)) as job:
        job.wait_until(lambda: iterations_done(run_dir) >= 7, "iterations", timeout=120)
        job.process.send_signal(signal.SIGTERM)
        assert job.wait(120) == 0, job.output()[-3000:]
    assert (tmp_path / "scontrol.log").read_text() == "requeue 42\n"
    assert len(list((run_dir / "checkpoints").glob("step-*"))) == 1
    done = bash(variables(tmp_path, **changes), SCRIPT, *arguments, "preference.total_steps=1500", patience=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Resumed from step" in done.stdout
    assert len(list((tmp_path / "scratch" / "run" / "checkpoints").glob("step-*"))) >= 2


# --- The Slurm script of runs over several nodes, run by bash as Slurm runs it; `srun` and `scontrol` are stand-ins


NODES_SCRIPT = ROOT / "cluster" / "slurm" / "grpo.sbatch"
SRUN = """#!/bin/bash
where=
while [[ "$1" == --* ]]; do [[ "$1" == --nodelist=* ]] && where="${1#*=}"; shift; done
printf '%s\\n' "$where: $*" >> "$NOTES/steps"
exec "$@"
"""
SCONTROL = """#!/bin/bash
if [[ "$1 $2" == "show hostnames" ]]; then printf 'node1\\nnode2\\n'; else echo "$@" >> "$NOTES/scontrol"; fi
"""
# In place of Ray and the run, where only commands matter: a node that lives until it is told to end.
RAY = """#!/bin/bash
trap 'echo ended >> "$NOTES/ended"; kill "$!"; exit 0' TERM
[[ "$RAY_AUTH_MODE" == token && ${#RAY_AUTH_TOKEN} == 64 ]] && echo "$RAY_AUTH_TOKEN" >> "$NOTES/tokens"
sleep 600 & wait $!
"""
RL_VLM = """#!/bin/bash
printf '%s\\n' "$@" "address=$RAY_ADDRESS" > "$NOTES/run"
exit ${RUN_STATUS:-0}
"""
PYTHON = """#!/bin/bash
for _ in $(seq 100); do [[ $(wc -l < "$NOTES/tokens") == 2 ]] && exit 0; sleep 0.1; done
exit 1
"""


# The image: what it is told to run runs here.
APPTAINER = """#!/bin/bash
printf '%s\\n' "$4" >> "$NOTES/binds"
shift 5
exec "$@"
"""


def job(tmp_path: Path, standins: dict[str, str], **changes: str) -> dict[str, str]:
    """The environment of a job with stand-ins before everything else on the path, which note what happens in NOTES."""
    tools, notes = tmp_path / "bin", tmp_path / "notes"
    for folder in (tools, notes, tmp_path / "tmp"):
        folder.mkdir(exist_ok=True)
    for name, script in {"srun": SRUN, "scontrol": SCONTROL, **standins}.items():
        (tools / name).write_text(script)
        (tools / name).chmod(0o755)
    path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]])
    slurm = {"SLURM_JOB_ID": "4242", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_CPUS_PER_TASK": "1"}
    known = {"PATH": path, "NOTES": str(notes), "TMPDIR": str(tmp_path / "tmp"), "HEAD_IP": "127.0.0.1", **slurm}
    return {**environment(), **known, **changes}


def run_nodes(tmp_path: Path, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """The script with stand-ins for everything that it starts."""
    standins = {"ray": RAY, "rl-vlm": RL_VLM, "python": PYTHON, "apptainer": APPTAINER}
    known = job(tmp_path, standins, SLURM_SUBMIT_DIR=str(checkout(tmp_path)), **changes)
    return bash(known, NODES_SCRIPT, *arguments)


def notes(tmp_path: Path, name: str) -> list[str]:
    return (tmp_path / "notes" / name).read_text().splitlines()


def test_every_node_runs_ray_and_the_run_joins_it(tmp_path: Path) -> None:
    done = run_nodes(tmp_path, "configs/quickstart.yaml", "seed=3", NODE_RESOURCES='{"gpu_learner": 1}')
    assert done.returncode == 0, done.stderr
    head, worker, last = sorted(notes(tmp_path, "steps"), key=lambda step: ("rm -rf" in step, step))
    port = 20000 + 2 * 4242  # the next one is of Ray's client server
    assert head.startswith("node1:") and f"--head --node-ip-address=127.0.0.1 --port={port}" in head
    assert worker.startswith("node2:") and f"--address=127.0.0.1:{port}" in worker
    assert all('--resources={"gpu_learner": 1}' in step and "--num-cpus=1" in step for step in (head, worker))
    command = ["train", "configs/quickstart.yaml", "seed=3", "--run-dir", "runs/quickstart", "--resume"]
    assert notes(tmp_path, "run") == [*command, f"address=127.0.0.1:{port}"]
    # Both nodes were told to end, and what they wrote is gone.
    assert notes(tmp_path, "ended") == ["ended"] * 2
    assert last.startswith(": rm -rf") and list((tmp_path / "tmp").iterdir()) == []


def test_the_token_is_in_the_environment_and_on_no_command_line(tmp_path: Path) -> None:
    run_nodes(tmp_path, "configs/quickstart.yaml")
    first, second = notes(tmp_path, "tokens")
    assert first == second
    assert not any(first in line for name in ("steps", "run") for line in notes(tmp_path, name))


def test_the_runs_failure_is_the_jobs(tmp_path: Path) -> None:
    assert run_nodes(tmp_path, "configs/quickstart.yaml", RUN_STATUS="3").returncode == 3
    assert notes(tmp_path, "ended") == ["ended"] * 2 and not (tmp_path / "notes" / "scontrol").exists()


@pytest.mark.parametrize("variable", ["SCRATCH_DIR", "HF_HOME"])
def test_a_hub_cache_of_first_use_is_made_and_bound(variable: str, tmp_path: Path) -> None:
    (tmp_path / "rl_vlm.sif").touch()
    place = tmp_path / "hf_cache"
    changes = {
        "APPTAINER_IMAGE": str(tmp_path / "rl_vlm.sif"),
        variable: str(place if variable == "HF_HOME" else tmp_path),
    }
    done = run_nodes(tmp_path, "configs/quickstart.yaml", **changes)
    assert done.returncode == 0, done.stderr
    assert place.is_dir() and {line.split(",")[-1] for line in notes(tmp_path, "binds")} == {str(place)}


@pytest.mark.parametrize(
    ("arguments", "changes", "words"),
    [
        ((), {}, "Which configuration?"),
        (("configs/none.yaml",), {}, "There is no configuration configs/none.yaml"),
        (("configs/quickstart.yaml",), {"SLURM_JOB_NODELIST": ""}, "start it with sbatch"),
        (("configs/quickstart.yaml",), {"CONTAINER": "/no/image.sif"}, "There is no image /no/image.sif"),
        (("configs/quickstart.yaml",), {"SCRATCH_DIR": "/no/scratch"}, "SCRATCH_DIR=/no/scratch is not a folder"),
    ],
)
def test_wrong_input_is_refused_before_anything_starts(
    arguments: tuple[str, ...], changes: dict[str, str], words: str, tmp_path: Path
) -> None:
    done = run_nodes(tmp_path, *arguments, **changes)
    assert done.returncode == 2 and words in done.stderr
    assert not (tmp_path / "notes" / "steps").exists()


def processes_of(job_folder: Path) -> list[psutil.Process]:
    """Processes whose command line names the job's folder, as Ray's do."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(str(job_folder) in argument for argument in process.cmdline()):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
            continue
    return found


@pytest.mark.acceptance
def test_a_job_over_two_nodes_saves_is_requeued_and_goes_on(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    (port,) = map(str, free_ports(1))
    # A short path: sockets of Ray's lie below it.
    known = job(tmp_path, {}, SLURM_SUBMIT_DIR=str(ROOT), RUN_DIR=str(run_dir), RAY_PORT=port, TMPDIR="/tmp")
    # 1.5 logical CPUs, which no node has; kinds of nodes that both offer.
    known["NODE_RESOURCES"] = '{"any_node": 1}'
    settings = ["evaluation.every=0", "resources.env_runners_on=any_node", "logging.checkpoint_every=1000"]
    with BashProcess(NODES_SCRIPT, "configs/quickstart.yaml", *settings, **known) as first:
        first.wait_until(lambda: iterations_done(run_dir) >= 3, "iterations")
        first.process.send_signal(signal.SIGTERM)
        assert first.wait(180) == 0, first.output()[-3000:]
    session = Path("/tmp/rl-vlm-ray-4242")
    assert notes(tmp_path, "scontrol") == ["requeue 4242"]
    assert processes_of(session) == [] and not session.exists()
    (saved,) = (run_dir / "checkpoints").glob("iteration-*")
    iterations = int(saved.name.removeprefix("iteration-")) + 2
    done = bash(
        known, NODES_SCRIPT, "configs/quickstart.yaml", *settings, f"algorithm.iterations={iterations}", patience=400
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    result = yaml.safe_load((run_dir / "result.json").read_text())
    assert (result["status"], result["iterations"]) == ("done", iterations)
    assert processes_of(session) == [] and not session.exists()
