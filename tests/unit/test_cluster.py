"""What a run asks of its cluster, in words. Nothing is started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from preference_loop import run_config
from ray._private import utils as ray_utils
from tables import table

from rl_vlm.algorithms.grpo import GRPO
from rl_vlm.cli.output import log_to_stderr
from rl_vlm.config import PolicyConfig, parse_config
from rl_vlm.models.reference import ModelReference
from rl_vlm.runs import ray_session
from rl_vlm.runs.drain import drain_runs, is_actor, wait_for_actors
from rl_vlm.runs.ray_session import check_resources, ray_cluster
from rl_vlm.runs.signals import StopRequest
from rl_vlm.serving.deploy import build_app
from rl_vlm.types import UserInputError

TABLES = table("cluster")


def test_a_run_that_asks_for_too_much_is_told_about_its_own_actors() -> None:
    collection = {"num_env_runners": 3, "cpus_per_env_runner": 5.0}
    preference = run_config(preference__collection=collection, learner__num_learners=1, resources__num_cpus=4)
    with pytest.raises(UserInputError, match=r"15.5 logical CPUs \(3 env runners × 5, 1 learners × 0.5\)"):
        check_resources(preference)
    grpo = {"rollout": {"num_env_runners": 8, "cpus_per_env_runner": 1.0}, "resources": {"num_cpus": 4}}
    with pytest.raises(UserInputError, match=r"9 logical CPUs \(2 replicas × 0.5, 8 env runners × 1\)"):
        check_resources(parse_config(grpo))


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "said"), [("AS, (4 << 30,) * 2", "-v unlimited"), ("NOFILE, (64,) * 2", "-n 4096")])
def test_small_limits_of_the_shell_are_told_before_ray_aborts(limit: str, said: str) -> None:
    code = f"""if True:
        import resource
        from rl_vlm.config import parse_config
        from rl_vlm.runs.ray_session import check_resources
        from rl_vlm.cli.doctor import ray_checks
        resource.setrlimit(resource.RLIMIT_{limit})
        print([check.detail for check in ray_checks() if check.status == "fail"])
        check_resources(parse_config({{}}))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode and all(f"run `ulimit {said}` first" in text for text in (done.stderr, done.stdout))


@pytest.fixture
def without_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ray's calls without a cluster."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(ray_session.ray, "init", lambda **_: None)
    for name, answer in {"is_initialized": False, "shutdown": None, "cluster_resources": {"CPU": 64.0}}.items():
        monkeypatch.setattr(ray_session.ray, name, lambda answer=answer: answer)
    for name in ("RAY_ADDRESS", "RAY_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ray_session, "cluster_address", lambda: os.environ["RAY_ADDRESS"])
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("token", "warned"), [(False, True), (True, False)])
def test_a_joined_cluster_without_a_token_is_warned_about_where_it_is_seen(
    token: bool,
    warned: bool,
    without_cluster: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.7:6379")
    monkeypatch.setattr(ray_session, "is_token_auth_enabled", lambda: token)
    monkeypatch.setattr(ray_session.ray.util, "get_node_ip_address", lambda: "192.0.2.7")
    log_to_stderr()
    with ray_cluster(parse_config({})):
        pass
    assert ("has no token" in capsys.readouterr().err) == warned


RAYLET = "The current node timed out during startup. This could happen because ..."
STORE_WAIT = "RAY_gcs_server_port_wait_time_s"
STORE = "Timed out waiting for file /tmp/ray/session_1/gcs_server_port_2."


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Exception]]:
    """What the next calls of `ray.init` raise, first one first; then it succeeds."""
    errors: list[Exception] = []

    def init(**settings: object) -> None:
        if errors:
            raise errors.pop(0)

    monkeypatch.setattr(ray_session.ray, "init", init)
    monkeypatch.setattr(ray_session.ray, "shutdown", lambda: None)
    monkeypatch.delenv(STORE_WAIT, raising=False)
    yield errors


def test_a_private_cluster_on_a_busy_machine_is_started_again(starts: list[Exception]) -> None:
    starts += [Exception(RAYLET), RuntimeError(STORE), Exception(RAYLET)]
    ray_session._init_with_retry()
    assert not starts
    assert os.environ[STORE_WAIT] == "60"


@pytest.mark.parametrize("address", ["", "127.0.0.1:6379"])
def test_a_run_that_is_told_to_stop_while_ray_starts_hears_it(
    address: str, without_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ray job stop` during the start: Ray's handler would end it as a failure, with code 15."""

    def init(**_: object) -> None:
        ray_utils.set_sigterm_handler(lambda number, _: sys.exit(number))  # as the first thing that Ray does
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(ray_session.ray, "init", init)
    stop = StopRequest()
    with stop.installed(lambda _: None), pytest.raises(KeyboardInterrupt), ray_session.ray_cluster(run_config()):
        pass
    assert stop.signal == signal.SIGTERM


# --- Kinds of nodes: which custom resource each actor asks for, and what is said where no node offers it


PLACEMENT = {"replicas_on": "gpu_serving", "learners_on": "gpu_learner", "env_runners_on": "cpu_env_runner"}


def run(**placement: str) -> PolicyConfig:
    return parse_config({"resources": placement})


def replica_options(config: PolicyConfig) -> dict[str, Any]:
    app = build_app(ModelReference("tiny", Path("model"), "digest"), config, "run", "namespace")
    return app._bound_deployment.ray_actor_options  # type: ignore[no-any-return]


def test_each_actor_asks_for_its_kind_of_node() -> None:
    config = run(**PLACEMENT)
    rllib = GRPO.from_run_config(config)
    asked = {
        "replicas_on": replica_options(config)["resources"],
        "learners_on": rllib.custom_resources_per_learner,
        "env_runners_on": rllib.custom_resources_per_env_runner,
    }
    assert {kind: list(resources) for kind, resources in asked.items()} == {k: [v] for k, v in PLACEMENT.items()}
    # So small a share that CPUs and GPUs alone say how many fit on a node.
    assert all(0 < amount <= 0.001 for resources in asked.values() for amount in resources.values())


def test_a_cluster_without_such_nodes_is_named_before_actors_wait_for_ever() -> None:
    offered = {"CPU": 8.0, "gpu_serving": 2.0}
    ray_session._check_placement(run(replicas_on="gpu_serving"), offered)
    with pytest.raises(UserInputError, match="gpu_learner"):
        ray_session._check_placement(run(replicas_on="gpu_serving", learners_on="gpu_learner"), offered)


def test_a_private_cluster_is_every_kind_of_node(monkeypatch: pytest.MonkeyPatch) -> None:
    started: dict[str, Any] = {}
    monkeypatch.setattr(ray_session, "_init_with_retry", lambda **settings: started.update(settings))
    monkeypatch.setattr(ray_session.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray_session.ray, "shutdown", lambda: None)
    for name in ("RAY_ADDRESS", "RAY_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    with ray_session.ray_cluster(run(**PLACEMENT)):
        pass
    assert started["resources"] == dict.fromkeys(PLACEMENT.values(), 1.0)


# --- `rl-vlm cluster drain`: runs save their checkpoints before their containers are stopped


@pytest.mark.parametrize(("title", "expected"), TABLES["actors_are_told_from_rays_own_processes"])
def test_actors_are_told_from_rays_own_processes(title: str, expected: bool) -> None:
    assert is_actor([title]) is expected


@pytest.mark.slow
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


SCRIPT = """
import pathlib, signal, sys, time
from rl_vlm.runs.signals import RUNNING, STOPPING, name_this_process
told = []
def stop(*_):
    told.append(1)
    name_this_process(STOPPING)
name_this_process(RUNNING)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
while not told:
    time.sleep(0.05)
print("stopping", flush=True)
time.sleep(1.5)
pathlib.Path(sys.argv[1]).write_text(str(len(told)))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes have no names of their own elsewhere")
@pytest.mark.parametrize("told", [False, True])
def test_draining_tells_a_run_of_any_script_once(tmp_path: Path, told: bool) -> None:
    """A second SIGTERM would end it before its checkpoint is saved: `ray job stop` and a pod's end come together."""
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "told")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        if told:
            process.terminate()
            assert process.stdout.readline() == "stopping\n"
        assert drain_runs(0.2, within=os.getpid()) == [process.pid]  # which has not saved yet
        assert drain_runs(60.0, within=os.getpid()) == []
        assert (tmp_path / "told").read_text() == "1"
    finally:
        process.kill()
        process.wait()
