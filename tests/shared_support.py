"""Replicas that several policies share, in the test's own process: users, clients, and adapters that tell policies apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from core_support import run_config
from serving_support import Adapters

from rl_vlm.config import PolicyConfig
from rl_vlm.models.reference import ModelReference
from rl_vlm.models.weights import AdapterPayload
from rl_vlm.runs.ray_session import ray_cluster
from rl_vlm.serving.client import PolicyClient
from rl_vlm.serving.registry import SHARED_NAMESPACE, registry_name, shared_id
from rl_vlm.serving.service import PolicyService

NAME = "test"


@contextmanager
def sharing(folder: Path, **dotted: Any) -> Iterator[PolicyConfig]:
    """A private Ray cluster, and a configuration that shares."""
    settings = {
        "serving__shared": NAME, "serving__num_replicas": 1, "serving__cpus_per_replica": 0.25, "resources__num_cpus": 2,
        "serving__max_context": 512, "serving__sharing__lease_s": 20.0, **dotted,
    }  # fmt: skip
    run = run_config(folder, **settings)
    with ray_cluster(run):
        yield run


@contextmanager
def user(run: PolicyConfig, policy: str, folder: Path) -> Iterator[PolicyService]:
    """One run's part, ready to be asked."""
    service = PolicyService(run, policy, ModelReference.of(str(folder)))
    try:
        service.wait_until_ready()
        yield service
    finally:
        service.stop()


def client_of(service: PolicyService, **settings: Any) -> PolicyClient:
    """A client of one policy."""
    return PolicyClient(
        service.run_id,
        **{"deadline_s": 60.0, "homes": [service.key.home], "coalesce": False, "key": service.key, **settings},
    )


def registry() -> Any:
    """The registry's handle. Raises ValueError where there is none."""
    return ray.get_actor(registry_name(shared_id(NAME)), namespace=SHARED_NAMESPACE)


def status() -> dict[str, Any]:
    """What the registry says."""
    return ray.get(registry().status.remote(), timeout=30)  # type: ignore[no-any-return]


class PolicyAdapters:
    """Random adapters, of which no two are alike: of a policy's number and a version."""

    def __init__(self, run: PolicyConfig, folder: Path) -> None:
        self._adapters = Adapters(run, folder)

    def payload(self, policy: int, version: int) -> AdapterPayload:
        return replace(self._adapters.payload(100_000 * (policy + 1) + version), version=version)
