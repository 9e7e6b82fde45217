"""The Slurm script of runs over several nodes, run by bash as Slurm runs it; `srun` and `scontrol` are stand-ins.

The stand-in for `srun` runs a step on this machine, so that the "nodes" are Ray nodes of one machine.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from runs import ROOT, environment

SCRIPT = ROOT / "cluster" / "slurm" / "grpo.sbatch"
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


@pytest.fixture
def submitted(tmp_path: Path) -> Path:
    """A checkout without .venv, from which the job was submitted."""
    folder = tmp_path / "submitted"
    folder.mkdir()
    (folder / "configs").symlink_to(ROOT / "configs")
    return folder


def run(submitted: Path, tmp_path: Path, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """The script with stand-ins for everything that it starts."""
    standins = {"ray": RAY, "rl-vlm": RL_VLM, "python": PYTHON, "apptainer": APPTAINER}
    known = job(tmp_path, standins, SLURM_SUBMIT_DIR=str(submitted), **changes)
    return subprocess.run(
        ["bash", SCRIPT, *arguments], env=known, capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip


def notes(tmp_path: Path, name: str) -> list[str]:
    return (tmp_path / "notes" / name).read_text().splitlines()


def test_every_node_runs_ray_and_the_run_joins_it(submitted: Path, tmp_path: Path) -> None:
    done = run(submitted, tmp_path, "configs/quickstart.yaml", "seed=3", NODE_RESOURCES='{"gpu_learner": 1}')
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


def test_the_token_is_in_the_environment_and_on_no_command_line(submitted: Path, tmp_path: Path) -> None:
    run(submitted, tmp_path, "configs/quickstart.yaml")
    first, second = notes(tmp_path, "tokens")
    assert first == second
    assert not any(first in line for name in ("steps", "run") for line in notes(tmp_path, name))


def test_the_runs_failure_is_the_jobs(submitted: Path, tmp_path: Path) -> None:
    assert run(submitted, tmp_path, "configs/quickstart.yaml", RUN_STATUS="3").returncode == 3
    assert notes(tmp_path, "ended") == ["ended"] * 2 and not (tmp_path / "notes" / "scontrol").exists()


@pytest.mark.parametrize("variable", ["SCRATCH_DIR", "HF_HOME"])
def test_a_hub_cache_of_first_use_is_made_and_bound(variable: str, submitted: Path, tmp_path: Path) -> None:
    (tmp_path / "rl_vlm.sif").touch()
    place = tmp_path / "hf_cache"
    changes = {
        "APPTAINER_IMAGE": str(tmp_path / "rl_vlm.sif"),
        variable: str(place if variable == "HF_HOME" else tmp_path),
    }
    done = run(submitted, tmp_path, "configs/quickstart.yaml", **changes)
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
    arguments: tuple[str, ...], changes: dict[str, str], words: str, submitted: Path, tmp_path: Path
) -> None:
    done = run(submitted, tmp_path, *arguments, **changes)
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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    # A short path: sockets of Ray's lie below it.
    known = job(tmp_path, {}, SLURM_SUBMIT_DIR=str(ROOT), RUN_DIR=str(run_dir), RAY_PORT=port, TMPDIR="/tmp")
    # 1.5 logical CPUs, which no node has; kinds of nodes that both offer.
    known["NODE_RESOURCES"] = '{"any_node": 1}'
    settings = ["evaluation.every=0", "resources.env_runners_on=any_node", "logging.checkpoint_every=1000"]
    command = ["bash", str(SCRIPT), "configs/quickstart.yaml", *settings]
    log = (tmp_path / "log").open("w")
    first = subprocess.Popen(
        command, env=known, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 300
        progress = run_dir / "progress.csv"
        while not progress.is_file() or len(progress.read_text().splitlines()) < 4:
            assert first.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.2)
        first.send_signal(signal.SIGTERM)
        assert first.wait(180) == 0, (tmp_path / "log").read_text()[-3000:]
    finally:
        if first.poll() is None:
            os.killpg(first.pid, signal.SIGKILL)
    session = Path("/tmp/rl-vlm-ray-4242")
    assert notes(tmp_path, "scontrol") == ["requeue 4242"]
    assert processes_of(session) == [] and not session.exists()
    (saved,) = (run_dir / "checkpoints").glob("iteration-*")
    iterations = int(saved.name.removeprefix("iteration-")) + 2
    done = subprocess.run(
        [*command, f"algorithm.iterations={iterations}"], env=known, capture_output=True, text=True, timeout=400, check=False
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    result = yaml.safe_load((run_dir / "result.json").read_text())
    assert (result["status"], result["iterations"]) == ("done", iterations)
    assert processes_of(session) == [] and not session.exists()
