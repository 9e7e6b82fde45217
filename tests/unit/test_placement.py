"""Kinds of nodes: which custom resource each actor asks for, and what is said where no node offers it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl_vlm.algorithms.grpo import GRPOConfig
from rl_vlm.config import PolicyConfig, parse_config
from rl_vlm.models.reference import ModelReference
from rl_vlm.runs import ray_session
from rl_vlm.serving.deploy import build_app
from rl_vlm.types import UserInputError

PLACEMENT = {"replicas_on": "gpu_serving", "learners_on": "gpu_learner", "env_runners_on": "cpu_env_runner"}


def run(**placement: str) -> PolicyConfig:
    return parse_config({"resources": placement})


def replica_options(config: PolicyConfig) -> dict[str, Any]:
    app = build_app(ModelReference("tiny", Path("model"), "digest"), config, "run", "namespace")
    return app._bound_deployment.ray_actor_options  # type: ignore[no-any-return]


def test_each_actor_asks_for_its_kind_of_node() -> None:
    config = run(**PLACEMENT)
    rllib = GRPOConfig.from_run_config(config)
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
