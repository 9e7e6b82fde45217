"""What docs/cloud.md tells, on one machine: Ray's autoscaler starts "machines" of the manifest's types, as processes here.

Real are the head with token authentication, the autoscaler, the job server, the run, its placement, and what a stop saves.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from head import RayHead
from jobs import RAY, wait_until
from runs import ROOT, iterations_done

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


class LocalCloud(RayHead):
    """A head whose autoscaler starts nodes as processes of this machine."""

    def __init__(self) -> None:
        super().__init__(
            num_cpus=0, RAY_FAKE_CLUSTER="1", RL_VLM_AUTOSCALING="1", AUTOSCALER_UPDATE_INTERVAL_S="1",
            RAY_JOB_STOP_WAIT_TIME_S=str(GRACE_S), RAY_enable_autoscaler_v2="0", RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S="0",
            PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        )  # fmt: skip
        self._arguments = ("--num-gpus=0", f"--autoscaling-config={self.folder}/cluster.json")

    def configure(self) -> None:
        types = {**small_types(), "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}}
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
        (self.folder / "cluster.json").write_text(json.dumps(config))

    def workers(self) -> dict[str, int]:
        """Types of workers that run, and how many of each."""
        self.remember()
        status = subprocess.run([RAY, "status"], env=self.variables, capture_output=True, text=True, timeout=240).stdout
        parts = re.findall(r"(?:Active|Idle):\n(.*?)(?=Pending|Idle|Recent)", status, re.DOTALL)
        found = re.findall(r"(\d+) (\w+)$", "".join(parts), re.MULTILINE)
        return {name: int(count) for name, count in found if name in TYPES}


@pytest.mark.acceptance
@pytest.mark.timeout(900)
def test_a_job_gets_its_machines_is_stopped_resumed_and_leaves_none(tmp_path: Path) -> None:
    run_dir, project = tmp_path / "run", tmp_path / "project"
    shutil.copytree(ROOT / "configs", project / "configs")
    settings = ("learner.num_learners=1", "evaluation.every=0", "logging.checkpoint_every=1000")
    command = ["rl-vlm", "train", "configs/quickstart.yaml", *PLACEMENT, *settings, "--run-dir", run_dir, "--resume"]
    with LocalCloud() as cloud:
        refused = cloud.job("list", RAY_AUTH_TOKEN="0" * 64)
        assert refused.returncode != 0 and "AuthenticationError" in refused.stderr
        assert cloud.workers() == {}
        cloud.submit("first", project, command)
        cloud.wait_until(lambda: iterations_done(run_dir) >= 2, "first", 420)
        # One machine of each type holds what the run placed there.
        assert cloud.workers() == dict.fromkeys(TYPES, 1)
        assert cloud.job("stop", "first", timeout=240).returncode == 0
        assert cloud.wait_for_end("first") == "STOPPED"
        (saved,) = (run_dir / "checkpoints").glob("iteration-*")
        iterations = int(saved.name.removeprefix("iteration-")) + 2
        cloud.submit("second", project, [*command, f"algorithm.iterations={iterations}"])
        assert cloud.wait_for_end("second") == "SUCCEEDED", cloud.logs("second")[-3000:]
        result = json.loads((run_dir / "result.json").read_text())
        assert (result["status"], result["iterations"]) == ("done", iterations)
        wait_until(lambda: cloud.workers() == {}, "a cluster without workers", 180)
