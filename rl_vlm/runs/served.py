"""The served policy of a command without a learner: `rl-vlm eval` and `rl-vlm rollout`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rl_vlm.config import PolicyConfig
from rl_vlm.models.initial_adapter import initial_adapter_folder
from rl_vlm.models.trained import is_full, read_payload

if TYPE_CHECKING:
    from rl_vlm.rollout.env_runner import RolloutWorker
    from rl_vlm.serving.service import PolicyService


def starting_adapter(config: PolicyConfig) -> Path | None:
    """The adapter folder that `model.adapter` names, if it names one."""
    return initial_adapter_folder(config.model) if config.model.adapter is not None else None


def run_for(config: PolicyConfig, trained: Path) -> PolicyConfig:
    """The run with replicas that can serve what a folder holds: an adapter, or full weights."""
    kind = "full" if is_full(trained) else "lora"
    return config.model_copy(update={"model": config.model.model_copy(update={"train": kind})})


@dataclass(frozen=True, slots=True)
class Served:
    """A model behind Ray Serve and a rollout worker in this process that asks it."""

    run_id: str
    worker: RolloutWorker
    service: PolicyService

    def publish(self, adapter: Path | None, version: int) -> None:
        """Serve an adapter folder, or one of full weights, as this version; None changes nothing."""
        if adapter is not None:
            self.service.publish(read_payload(adapter, version))


@contextmanager
def served_worker(config: PolicyConfig) -> Iterator[Served]:
    """Start Ray, the replicas and a worker; all end with the context."""
    from rl_vlm.rollout.env_runner import RolloutWorker
    from rl_vlm.runs.ray_session import ray_cluster
    from rl_vlm.serving.service import start_service

    with ray_cluster(config):
        service = start_service(config)
        worker = RolloutWorker(config, service.run_id, service.model.folder, key=service.key)
        try:
            service.wait_until_ready()
            yield Served(service.run_id, worker, service)
        finally:
            worker.close_envs()
            service.stop()
