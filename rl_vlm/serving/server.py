"""VLMServer: the Serve deployment around one engine."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError

from rl_vlm.config import RunConfig
from rl_vlm.engines.base import Engine, EngineError
from rl_vlm.models.adapter import AdapterPayload
from rl_vlm.serving.registry import registry_name
from rl_vlm.types import Completion, GenerationRequest, RLVLMError

logger = logging.getLogger("ray.serve")


class ReplicaUnavailableError(RLVLMError):
    """This replica cannot answer now, another one or a later attempt may: the client tries again."""


class StaleReplicaError(ReplicaUnavailableError):
    """The replica did not get the adapter version that a request asks for in time."""


def build_engine(model: Path, run: RunConfig) -> Engine:
    """The engine that the configuration names; `auto` is vLLM on a GPU and transformers without one."""
    serving = run.serving
    import torch

    on_gpu = serving.gpus_per_replica > 0 and torch.cuda.is_available()
    name = serving.engine if serving.engine != "auto" else ("vllm" if on_gpu else "transformers")
    if name == "vllm":
        from rl_vlm.engines.vllm_engine import VLLMEngine

        return VLLMEngine(
            model,
            dtype=run.model.dtype,
            serving=serving,
            max_lora_rank=run.model.lora.rank,
            # Samples of older versions may still run when a new one comes.
            max_loras=run.rollout.max_policy_lag + 2,
        )
    from rl_vlm.engines.transformers_engine import TransformersEngine

    return TransformersEngine(
        model,
        dtype=run.model.dtype,
        device="cuda" if on_gpu else "cpu",
        max_context=serving.max_context,
        max_rows=serving.max_rows,
        lockstep=run.deterministic,
        num_threads=None if on_gpu else serving.num_threads,
    )


class VLMServer:
    """One replica: an engine that follows the adapter registry of its run.

    It pulls the newest adapter before it takes its first request, keeps a call to the registry open from then on, and
    holds a request whose `min_version` it does not have yet.
    """

    def __init__(self, model: str, run: RunConfig, run_id: str, namespace: str) -> None:
        self._engine = build_engine(Path(model), run)
        self._publish_timeout_s = run.serving.publish_timeout_s
        self._run_id, self._namespace = run_id, namespace
        self.replica_id: str = serve.get_replica_context().replica_id.unique_id
        self._loaded = asyncio.Condition()
        self._follower: asyncio.Task[None] | None = None
        self._first_pull: AdapterPayload | None = None
        try:
            self._first_pull = ray.get(self._registry().newest.remote(), timeout=self._publish_timeout_s)
        except (RayError, ValueError) as error:
            # The registry may be restarting; the follower below keeps asking, and requests wait for their version.
            logger.warning("replica %s starts without the registry: %s", self.replica_id, error)

    def _registry(self) -> Any:
        return ray.get_actor(registry_name(self._run_id), namespace=self._namespace)

    async def _ensure_following(self) -> None:
        if self._follower is None:
            self._follower = asyncio.get_running_loop().create_task(self._follow())
            if self._first_pull is not None:
                payload, self._first_pull = self._first_pull, None
                await self._load(payload)

    async def _load(self, payload: AdapterPayload) -> None:
        if payload.version > self._engine.version:
            await self._engine.load_adapter(payload)
        async with self._loaded:
            self._loaded.notify_all()

    async def _follow(self) -> None:
        delay = 0.1
        while True:
            try:
                registry = self._registry()
                payload = await registry.wait_newer.remote(self.replica_id, self._engine.version)
                if payload is not None:
                    await self._load(payload)
                    await registry.ack.remote(self.replica_id, payload.version, payload.sha256)
                delay = 0.1
            except (RayError, ValueError, RLVLMError) as error:
                # ValueError: the registry's name is not known while it restarts.
                logger.warning("replica %s cannot follow the registry: %s", self.replica_id, error)
                await asyncio.sleep(delay)
                delay = min(2 * delay, 2.0)

    async def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        """Answer a batch; every completion names this replica. Raises StaleReplicaError or EngineError."""
        await self._ensure_following()
        wanted = max(request.min_version for request in requests)
        if wanted > self._engine.version:
            try:
                async with asyncio.timeout(self._publish_timeout_s), self._loaded:
                    await self._loaded.wait_for(lambda: self._engine.version >= wanted)
            except TimeoutError as error:
                raise StaleReplicaError(
                    f"Replica {self.replica_id} serves version {self._engine.version} and did not get version {wanted} "
                    f"within {self._publish_timeout_s:g} s."
                ) from error
        try:
            completions = await self._engine.generate(requests)
        except EngineError as error:
            if self._engine.dead:
                # Serve's next health check replaces this replica.
                raise ReplicaUnavailableError(f"The engine of replica {self.replica_id} has died: {error}") from error
            raise
        for completion in completions:
            object.__setattr__(completion, "replica_id", self.replica_id)
        return completions

    async def check_health(self) -> None:
        """Serve restarts the replica when this raises: the engine must still accept work."""
        await self._ensure_following()
        if self._engine.dead:
            raise EngineError(f"The engine of replica {self.replica_id} has died.")

    async def __del__(self) -> None:
        """Serve awaits this when it stops the replica."""
        await self._engine.close()

    async def status(self) -> dict[str, Any]:
        """What this replica serves."""
        return {"replica_id": self.replica_id, "version": self._engine.version, "time": time.time()}


def app_name(run_id: str) -> str:
    """The Serve application of a run."""
    return f"rl-vlm-{run_id}"


def build_app(model: Path, run: RunConfig, run_id: str, namespace: str) -> serve.Application:
    """The application of a run: one deployment, no HTTP route."""
    from ray.serve.config import RequestRouterConfig

    serving = run.serving
    deployment = serve.deployment(VLMServer).options(
        name="policy",
        num_replicas=serving.num_replicas,
        max_ongoing_requests=1024,
        health_check_period_s=5.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_timeout_s=2.0,
        ray_actor_options={"num_cpus": serving.cpus_per_replica, "num_gpus": serving.gpus_per_replica},
        request_router_config=RequestRouterConfig(request_router_class="rl_vlm.serving.router:AffinityRouter"),
    )
    return deployment.bind(str(model), run, run_id, namespace)  # type: ignore[no-any-return]
