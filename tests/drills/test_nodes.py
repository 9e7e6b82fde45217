"""Three nodes that share nothing: a run, a preference run and a sweep; nodes are killed in mid-run."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_cluster import Node, NodeCluster, what_is_missing
from runs import ENV_RUNNER, LEARNER, QUICKSTART, REGISTRY, REPLICA, ROOT, iterations_done

from rl_vlm.models.loading import resolve_model

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(1200)]

SMALL = [
    "evaluation.num_items=64", "evaluation.every=0", "rollout.prompts_per_iteration=4", "logging.checkpoint_every=2",
    "learner.num_learners=1", "learner.cpus_per_learner=0.5",
]  # fmt: skip
DRIVER = '{"driver": 1}'


@pytest.fixture
def cluster() -> Iterator[NodeCluster]:
    assert not what_is_missing(), what_is_missing()
    models = [resolve_model(name) for name in ("tiny", "tiny-labeller")]
    # The driver may run on either of the last two workers. Each node has a cache of its own.
    with NodeCluster([2, 2, 2], ["{}", DRIVER, DRIVER]) as cluster:
        for node in cluster.workers:
            for model in models:
                shutil.copytree(model, node.folder / "home/.cache/rl_vlm" / model.name)
        yield cluster


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    shutil.copy(QUICKSTART, folder / "config.yaml")
    shutil.copy(ROOT / "configs/rl_vlm_f/cartpole_tiny.yaml", folder / "preferences.yaml")
    (folder / "space.yaml").write_text(
        "space: {learner.lr: {grid: [0.001, 0.002]}}\nmetric: held_out/reward\nmax_concurrent: 2\n"
    )
    return folder


def submit(cluster: NodeCluster, name: str, project: Path, *command: object) -> None:
    cluster.submit(name, project, ["rl-vlm", *command], options=["--entrypoint-resources", DRIVER])


def train(run_dir: Path, iterations: int, *more: str) -> list[object]:
    return ["train", "config.yaml", *SMALL, f"algorithm.iterations={iterations}", "--run-dir", run_dir, *more]


def where(cluster: NodeCluster, title: str) -> list[Node]:
    return [node for node in cluster.workers if node.processes(title)]


def test_a_run_a_preference_run_and_a_sweep(cluster: NodeCluster, project: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    submit(cluster, "run", project, *train(run_dir, 6))
    cluster.wait_until(lambda: iterations_done(run_dir) >= 1, "run")
    used = {node.name for title in (REPLICA, ENV_RUNNER, LEARNER) for node in where(cluster, title)}
    assert len(used) >= 2, used
    assert cluster.wait_for_end("run") == "SUCCEEDED", cluster.logs("run")[-3000:]
    assert iterations_done(run_dir) == 6
    print(f"parts ran on {sorted(used)}; caches: { {node.name: node.cache() for node in cluster.workers} }")

    preferences = tmp_path / "preferences"
    changes = ["preference.total_steps=1500", "preference.steps_per_iteration=500", "preference.evaluation.every=0"]
    submit(cluster, "preferences", project, "train", "preferences.yaml", *changes, "--run-dir", preferences)
    assert cluster.wait_for_end("preferences", 600) == "SUCCEEDED", cluster.logs("preferences")[-3000:]
    assert json.loads((preferences / "result.json").read_text())["status"] == "done"

    sweep = tmp_path / "sweep"
    small = [*SMALL, "serving.num_replicas=1", "rollout.num_env_runners=1", "algorithm.iterations=2"]
    submit(cluster, "sweep", project, "sweep", "config.yaml", *small, "--space", "space.yaml", "--run-dir", sweep)
    assert cluster.wait_for_end("sweep", 600) == "SUCCEEDED", cluster.logs("sweep")[-3000:]
    assert (sweep / "best/adapter/adapter_model.safetensors").is_file()


def test_the_node_of_a_learner_is_killed(cluster: NodeCluster, project: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    submit(cluster, "run", project, *train(run_dir, 30))
    cluster.wait_until(lambda: iterations_done(run_dir) >= 3, "run")
    (node,) = where(cluster, LEARNER)
    (driver,) = where(cluster, REGISTRY)  # it is beside the driver
    if node is driver:
        pytest.fail("the learner sits with the driver: this drill needs them apart")
    before, started = iterations_done(run_dir), time.monotonic()
    node.kill()
    cluster.wait_until(lambda: iterations_done(run_dir) > before, "run", timeout=400)
    print(
        f"the learner's node was killed at iteration {before}; the next one came after {time.monotonic() - started:.0f} s"
    )
    assert cluster.wait_for_end("run", 600) == "SUCCEEDED", cluster.logs("run")[-3000:]
    result = json.loads((run_dir / "result.json").read_text())
    assert result["iterations"] == iterations_done(run_dir) == 30 and result["restarts"]["learner"] >= 1


def test_the_node_of_registry_and_driver_is_killed(cluster: NodeCluster, project: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    submit(cluster, "run", project, *train(run_dir, 30))
    cluster.wait_until(lambda: iterations_done(run_dir) >= 5, "run")
    (node,) = where(cluster, REGISTRY)
    node.kill()
    before = iterations_done(run_dir)
    assert cluster.wait_for_end("run", 400) == "FAILED"
    started = time.monotonic()
    submit(cluster, "again", project, *train(run_dir, 30, "--resume"))
    cluster.wait_until(lambda: iterations_done(run_dir) > before, "again", timeout=400)
    print(
        f"the driver's node was killed at iteration {before}; resumed elsewhere after {time.monotonic() - started:.0f} s"
    )
    assert cluster.wait_for_end("again", 600) == "SUCCEEDED", cluster.logs("again")[-3000:]
    assert iterations_done(run_dir) == 30
