"""`rl-vlm cluster drain`: runs save their checkpoints before their containers are stopped."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl_vlm.runs.lifecycle import drain_runs, is_actor, is_run, wait_for_actors


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["/opt/bin/python", "/opt/bin/rl-vlm", "train", "x.yaml"], True),
        (["python", "-m", "rl_vlm.cli", "sweep", "x.yaml"], True),
        (["/opt/bin/python", "/opt/bin/rl-vlm", "serve", "tiny"], False),
        (["/bin/sh", "-c", "rl-vlm train x.yaml"], False),  # its child is
        (["vim", "rl-vlm"], False),
        ([], False),
    ],
)
def test_runs_are_told_from_other_processes(arguments: list[str], expected: bool) -> None:
    assert is_run(arguments) is expected


@pytest.mark.parametrize(
    ("title", "expected"),
    [
        ("ray::VLMEnvRunner.sample", True),
        ("ray::ServeReplica:policy:policy", True),
        ("ray::_WrappedExecutable", True),
        ("ray::IDLE", False),
        ("ray::IDLE_SpillWorker", False),
        ("ray::DashboardAgent", False),
        ("ray::ProxyActor.receive_asgi_messages", False),
        ("raylet", False),
    ],
)
def test_actors_are_told_from_rays_own_processes(title: str, expected: bool) -> None:
    assert is_actor([title]) is expected


def test_a_worker_waits_for_its_actors_and_not_for_ever() -> None:
    command = ["bash", "-c", 'exec -a ray::VLMEnvRunner.sample sleep "$0"', "60"]
    actor = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + 30
        while wait_for_actors(0.0, within=os.getpid()) != [actor.pid]:  # bash has not become it yet
            assert time.monotonic() < deadline
        assert wait_for_actors(0.6, within=os.getpid()) == [actor.pid]
    finally:
        actor.kill()
        actor.wait()
    assert wait_for_actors(30.0, within=os.getpid()) == []


SAVES = """
import pathlib, signal, sys, time
def stop(*_):
    pathlib.Path(sys.argv[2]).write_text("saved")
    sys.exit(143)
signal.signal(signal.SIGTERM, stop if sys.argv[3] == "saves" else signal.SIG_IGN)
print("ready", flush=True)
time.sleep(60)
"""


def test_draining_waits_until_runs_have_saved(tmp_path: Path) -> None:
    script = tmp_path / "rl-vlm"
    script.write_text(SAVES)

    def start(command: str, how: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(script), command, str(tmp_path / f"{command}-{how}"), how], stdout=subprocess.PIPE, text=True
        )  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        return process

    run, deaf, server = start("train", "saves"), start("train", "deaf"), start("serve", "saves")
    try:
        begun = time.monotonic()
        assert drain_runs(1.0, within=os.getpid()) == [deaf.pid]
        assert time.monotonic() - begun >= 1.0
        run.wait(300)
        assert (tmp_path / "train-saves").read_text() == "saved"
        assert server.poll() is None
    finally:
        for process in (run, deaf, server):
            process.kill()
            process.wait()


SCRIPT = """
import pathlib, signal, sys, time
from rl_vlm.runs.lifecycle import RUNNING, STOPPING, call_this_process
told = []
def stop(*_):
    told.append(1)
    call_this_process(STOPPING)
call_this_process(RUNNING)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
while not told:
    time.sleep(0.05)
print("stopping", flush=True)
time.sleep(1.5)
pathlib.Path(sys.argv[1]).write_text(str(len(told)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="processes have no names of their own elsewhere")
@pytest.mark.parametrize("told", [False, True])
def test_draining_tells_a_run_of_any_script_once(tmp_path: Path, told: bool) -> None:
    """A second SIGTERM would end it before its checkpoint is saved: `ray job stop` and a pod's end come together."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "told")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        if told:
            process.terminate()
            assert process.stdout.readline() == "stopping\n"
        assert drain_runs(60.0, within=os.getpid()) == []
        assert (tmp_path / "told").read_text() == "1"
    finally:
        process.kill()
        process.wait()
