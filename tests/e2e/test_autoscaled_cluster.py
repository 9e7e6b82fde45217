"""What docs/cloud.md tells, on one machine: Ray's autoscaler starts "machines" of the manifest's types, as processes here.

Real are the head with token authentication, the autoscaler, the job server, the run, its placement, and what a stop saves.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from ports import free_ports
from runs import ROOT, environment

BIN = Path(sys.executable).parent
# Small "machines" without GPUs; a preemptible type has to do what its twin would.
TYPES = ("gpu_serving", "gpu_learner", "cpu_env_runner_preemptible")
PLACEMENT = (
    "resources.replicas_on=gpu_serving", "resources.learners_on=gpu_learner", "resources.env_runners_on=cpu_env_runner"
)  # fmt: skip
GRACE_S = 120  # what the manifests give a run to save its checkpoint


def small_types() -> dict[str, Any]:
    """The manifest's types of workers, each with two CPUs and without GPUs."""
    types = yaml.safe_load((ROOT / "cluster/aws/cluster.yaml").read_text())["available_node_types"]
    small = {}
    for name in TYPES:
        resources = {key: value for key, value in types[name]["resources"].items() if key != "GPU"}
        bounds = {key: types[name][key] for key in ("min_workers", "max_workers")}
        small[name] = {**bounds, "resources": {**resources, "CPU": 2}, "node_config": {}}
    return small


def until(condition: Callable[[], Any], what: str, timeout: float, log: Path) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come:\n{log.read_text()[-3000:]}"
        time.sleep(0.5)


class LocalCloud:
    """A head whose autoscaler starts nodes as processes of this machine."""

    def __init__(self, folder: Path) -> None:
        self.session = Path(tempfile.mkdtemp(prefix="rlv-", dir="/tmp"))  # short: sockets of Ray's lie below it
        self.log = folder / "head.log"
        port, dashboard, agent, client = free_ports(4)
        self.address, self.api = f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}"
        types = small_types()
        types["ray.head.default"] = {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}
        config = {
            "cluster_name": "here", "max_workers": 8, "upscaling_speed": 10, "idle_timeout_minutes": 0.1,
            "provider": {
                "type": "fake_multinode", "gcs_address": self.address, "use_node_id_as_ip": True,
                "disable_node_updaters": True, "disable_launch_config_check": True,
            },
            "available_node_types": types, "head_node_type": "ray.head.default", "auth": {}, "file_mounts": {},
            "cluster_synced_files": [], "initialization_commands": [], "setup_commands": [], "head_setup_commands": [],
            "worker_setup_commands": [], "head_start_ray_commands": [], "worker_start_ray_commands": [],
        }  # fmt: skip
        (folder / "cluster.json").write_text(json.dumps(config))
        self.environment = environment(
            RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32), RAY_FAKE_CLUSTER="1", RL_VLM_AUTOSCALING="1",
            AUTOSCALER_UPDATE_INTERVAL_S="1", RAY_JOB_STOP_WAIT_TIME_S=str(GRACE_S), RAY_enable_autoscaler_v2="0",
            RAY_USAGE_STATS_ENABLED="0", RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S="0",
            PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        )  # fmt: skip
        start = [
            "start", "--head", "--block", "--num-cpus=0", "--num-gpus=0", "--node-ip-address=127.0.0.1", f"--port={port}",
            "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}",
            f"--ray-client-server-port={client}", f"--temp-dir={self.session}", f"--autoscaling-config={folder}/cluster.json",
        ]  # fmt: skip
        with self.log.open("w") as log:
            self.head = subprocess.Popen(
                [BIN / "ray", *start],
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ray(self, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
        known = {**self.environment, "RAY_ADDRESS": self.address, "RAY_API_SERVER_ADDRESS": self.api, **changes}
        return subprocess.run(
            [BIN / "ray", *arguments], env=known, capture_output=True, text=True, timeout=240, check=False
        )

    def workers(self) -> dict[str, int]:
        """Types of workers that run, and how many of each."""
        active = re.search(r"Active:\n(.*?)(?:Pending|Idle):", self.ray("status").stdout, re.DOTALL)
        idle = re.search(r"Idle:\n(.*?)(?:Pending|Recent)", self.ray("status").stdout, re.DOTALL)
        found = re.findall(r"(\d+) (\w+)$", "".join(m.group(1) for m in (active, idle) if m), re.MULTILINE)
        return {name: int(count) for count, name in found if name in TYPES}

    def submit(self, name: str, run_dir: Path, *changes: str) -> None:
        command = [str(BIN / "rl-vlm"), "train", str(ROOT / "configs/quickstart.yaml"), *PLACEMENT]
        if not (BIN / "rl-vlm").exists():
            command[:1] = [sys.executable, "-m", "rl_vlm.cli"]
        command += ["learner.num_learners=1", "evaluation.every=0", "logging.checkpoint_every=1000", *changes]
        command += ["--run-dir", str(run_dir), "--resume"]
        done = self.ray("job", "submit", "--submission-id", name, "--no-wait", "--", *command)
        assert done.returncode == 0, done.stdout + done.stderr

    def status(self, name: str) -> str:
        return self.ray("job", "status", name).stdout

    def close(self) -> None:
        self.head.terminate()
        try:
            self.head.wait(60)
        finally:
            left = [process for process in psutil.process_iter() if self._is_ours(process)]
            for process in left:
                process.kill()
            psutil.wait_procs(left, timeout=10)
            shutil.rmtree(self.session, ignore_errors=True)

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("RAY_AUTH_TOKEN") == self.environment["RAY_AUTH_TOKEN"]
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            return False


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[LocalCloud]:
    here = LocalCloud(tmp_path)
    try:
        until(lambda: here.ray("job", "list").returncode == 0, "the job server", 120, here.log)
        yield here
    finally:
        here.close()


@pytest.mark.acceptance
@pytest.mark.timeout(900)
def test_a_job_gets_its_machines_is_stopped_resumed_and_leaves_none(cloud: LocalCloud, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    progress = run_dir / "progress.csv"
    refused = cloud.ray("job", "list", RAY_AUTH_TOKEN="0" * 64)
    assert refused.returncode != 0 and "AuthenticationError" in refused.stderr
    assert cloud.workers() == {}
    cloud.submit("first", run_dir)
    until(lambda: progress.is_file() and len(progress.read_text().splitlines()) >= 3, "iterations", 420, cloud.log)
    # One machine of each type holds what the run placed there.
    assert cloud.workers() == dict.fromkeys(TYPES, 1)
    assert cloud.ray("job", "stop", "first").returncode == 0
    assert "was stopped" in cloud.status("first")
    (saved,) = (run_dir / "checkpoints").glob("iteration-*")
    iterations = int(saved.name.removeprefix("iteration-")) + 2
    cloud.submit("second", run_dir, f"algorithm.iterations={iterations}")
    until(lambda: "succeeded" in cloud.status("second"), "the end of the run", 300, cloud.log)
    result = json.loads((run_dir / "result.json").read_text())
    assert (result["status"], result["iterations"]) == ("done", iterations)
    until(lambda: cloud.workers() == {}, "a cluster without workers", 180, cloud.log)
