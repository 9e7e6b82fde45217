"""Values of clusters and `rl-vlm cluster`: changes, mistakes in one sentence, what is written."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from rl_vlm.cli.app import run as rl_vlm
from rl_vlm.cluster.drain import drain_runs, is_actor, is_run, wait_for_actors
from rl_vlm.cluster.render import commented_values, load_values, placement, render
from rl_vlm.types import UserInputError


def test_a_file_need_not_name_every_key(tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text("workers: {gpu_serving: {max: 7}}\nimages: {gpu: my/gpu@sha256:12}\n")
    values = load_values(tmp_path / "values.yaml", ["workers.gpu_serving.cpus=3"])
    assert (values.workers.gpu_serving.max, values.workers.gpu_serving.cpus) == (7, 3)
    assert values.workers.gpu_serving.gpus == 1 and values.images.cpu == "rl-vlm:cpu"
    job = render(values, ["kuberay"])["kuberay/rayjob.yaml"]
    assert 'image: "my/gpu@sha256:12"' in job and "maxReplicas: 7" in job


def test_labels_and_hosts_are_replaced_and_not_merged() -> None:
    values = load_values(None, ["onprem.hosts={gpu1: gpu_learner}", "kubernetes.preemptible_selector={spot: 'yes'}"])
    assert values.onprem.hosts == {"gpu1": "gpu_learner"} and values.kubernetes.preemptible_selector == {"spot": "yes"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("workers.gpu_serving.maximum=4", "Did you mean workers.gpu_serving.max?"),
        ("worker.gpu_serving.max=4", "Did you mean workers?"),
        ("images.gpus=x", "Did you mean images.gpu?"),
        ("workers.gpu_learner.min=9", "workers.gpu_learner.min (9) is above its max (1)"),
        ("workers.gpu_learner.shm_gib=999", "workers.gpu_learner.shm_gib (999) must be below its memory_gib (76)"),
        ("onprem.hosts={10.0.0.1: gpu}", "onprem.hosts"),
        ("onprem.hosts={'$(reboot)': gpu_learner}", "is not an address"),
        ("storage.mount=relative", "storage.mount"),
        ("storage.nfs='a b'", "storage.nfs"),
        ("name=Not_DNS", "name"),
        ("job.run=Geo3k_Qwen3VL_2B_grpo_long_context_seed0_lr1e-4", "KubeRay takes at most 47 characters"),
        ("job.run=a...", "make the RayJob rl-vlm-a---"),
        ("name='no'", "'no' would not be read as text in a manifest"),
        ("storage.nfs='$(id):/'", "storage.nfs"),
        ("aws.ssh_user='a;b'", "aws.ssh_user"),
        ("storage.nfs=10.0.0.2", "storage.nfs 10.0.0.2 names no export: write server:/export"),
        ("aws.region=eu-west-1", "aws.zones has us-west-2a, which is not in aws.region eu-west-1"),
        ("gcp.zone=europe-west4-a", "gcp.zone europe-west4-a is not in gcp.region us-central1"),
        ("onprem.hosts={10.0.0.10: gpu_learner}", "onprem.hosts has 10.0.0.10, which is the head"),
    ],
)
def test_mistakes_are_named_in_one_sentence(change: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert rl_vlm(["cluster", "values", "--set", change]) == 2
    assert words in capsys.readouterr().err


def test_an_unknown_target_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserInputError, match=r"no target azure: choose from aws, gcp"):
        render(load_values(None), ["azure"])


def test_values_that_are_printed_are_read_again() -> None:
    values = load_values(None, ["storage.nfs=10.0.0.2:/data", "job.overrides=['seed=1', \"env.kwargs={task: count}\"]"])
    assert load_values(None) != values
    text = commented_values(values)
    assert yaml.safe_load(text)["storage"]["nfs"] == "10.0.0.2:/data"
    assert type(values).model_validate(yaml.safe_load(text)) == values


def test_only_files_that_change_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["cluster", "render", "aws", "gcp", "--out", str(tmp_path)]
    assert rl_vlm(command) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert rl_vlm([*command, "--set", "aws.region=eu-west-1", "--set", "aws.zones=eu-west-1a"]) == 0
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "aws/cluster.yaml")]
    assert "region: eu-west-1" in (tmp_path / "aws/cluster.yaml").read_text()


def test_a_type_without_nodes_is_left_out_and_nothing_is_placed_there() -> None:
    values = load_values(None, ["workers.cpu_env_runner.max=0", "workers.cpu_env_runner_preemptible.max=0"])
    assert placement(values) == ["resources.replicas_on=gpu_serving", "resources.learners_on=gpu_learner"]
    assert "cpu_env_runner" not in render(values, ["aws"])["aws/cluster.yaml"]


_NO_SERVING = ("workers.gpu_serving.max=0", "workers.gpu_serving_preemptible.max=0")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (("workers.gpu_learner.max=0", *_NO_SERVING), "job.overrides asks for serving.gpus_per_replica=1"),
        (
            ("workers.gpu_learner.max=0", "job.overrides=['learner.gpus_per_learner=2']"),
            "raise workers.gpu_learner.max",
        ),
        (("job.overrides=['serving.gpus_per_replica=4']",), "raise workers.gpu_serving.gpus"),
        (("job.overrides=[]", *_NO_SERVING), "service.overrides asks for serving.gpus_per_replica=1"),
    ],
)
def test_a_job_that_asks_for_gpus_which_no_worker_has_is_refused(changes: tuple[str, ...], words: str) -> None:
    values = load_values(None, changes)
    with pytest.raises(UserInputError, match=words):
        render(values, ["kuberay"])
    render(values, ["aws", "gcp"])  # which hold no job


@pytest.mark.parametrize(
    "changes",
    [
        ("workers.gpu_learner.max=0",),  # the learner runs beside the replicas
        ("workers.gpu_learner.max=0", *_NO_SERVING, "job.overrides=[seed=1]", "service.overrides=[]"),
        ("job.overrides=['serving=5', 'algorithm.name=grpo', 'algorithm.preset=[1]']",),  # the run tells of these
        ("workers.gpu_serving.max=0",),  # its preemptible twin serves
        ("job.overrides=['serving.gpus_per_replica=0.5', 'learner.gpus_per_learner=0.5']",),
    ],
)
def test_a_job_whose_gpus_are_there_is_rendered(changes: tuple[str, ...]) -> None:
    assert "kuberay/rayjob.yaml" in render(load_values(None, changes), ["kuberay"])


def test_a_preemptible_type_alone_serves_its_kind() -> None:
    values = load_values(None, ["workers.cpu_env_runner.max=0"])
    assert "resources.env_runners_on=cpu_env_runner" in placement(values)


def test_values_cannot_leave_their_place_in_a_manifest() -> None:
    values = load_values(None, ['job.config="a b\'; echo $(id) #.yaml"'])
    job = yaml.safe_load(render(values, ["kuberay"])["kuberay/rayjob.yaml"])
    done = subprocess.run(
        ["bash", "-c", f"set -- {job['spec']['entrypoint']}; printf %s \"$3\""], capture_output=True, text=True, timeout=900
    )  # fmt: skip
    assert done.stdout == "a b'; echo $(id) #.yaml"


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
from rl_vlm.cluster.drain import RUNNING, STOPPING, call_this_process
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
