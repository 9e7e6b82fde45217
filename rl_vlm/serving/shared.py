"""The registry of a service that runs share, and which runs fit it."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import ray

from rl_vlm.config import CommonConfig
from rl_vlm.models.reference import ModelReference
from rl_vlm.serving.deploy import delete_application, deploy_shared
from rl_vlm.serving.registry import (
    SHARED_NAMESPACE,
    Changes,
    Published,
    Revision,
    VersionRegistry,
    app_name,
    shared_id,
    start_registry,
)
from rl_vlm.waiting import retried

logger = logging.getLogger(__name__)

_FIRST_USER_S = 60.0  # how long a service waits for its first tenant
_LINGER_S = 2.0  # and how long after its last one, for a run that is about to come
_TICK_S = 1.0
_REPORT_FAILURE_S = 5.0  # how long a service that could not start says why
_STALL_S = 2.0  # by which a tick is late where this process was stopped, or its machine did not get to it
_END_S = 120.0  # how long to try to delete the application


def mismatch(name: str, known: CommonConfig, known_digest: str, config: CommonConfig, digest: str) -> str:
    """Why a run cannot join the service `name` of the run `known`; empty if it can. The digests are those of the
    models, whose folders may differ between nodes."""
    there, here = (
        {f"model.{key}": getattr(run.model, key) for key in ("dtype", "head_dtype", "min_pixels", "max_pixels")}
        | {"serving.engine": run.serving.expected_engine}
        | {f"serving.{key}": getattr(run.serving, key) for key in ("quantization", "gpus_per_replica")}
        for run in (known, config)
    )
    differing = [f"{key} is {value} there and {here[key]} here" for key, value in there.items() if value != here[key]]
    if digest != known_digest:
        differing.append(f"model.path is {known.model.path} there and {config.model.path} here, with other weights")
    if config.serving.max_context > known.serving.max_context:
        differing.append(
            f"serving.max_context is {known.serving.max_context} there and {config.serving.max_context} here"
        )
    # Merged weights, as of the transformers engine, have the model's own shape, whatever the rank was.
    if known.serving.expected_engine == "vllm" and config.lora_rank > known.max_lora_rank:
        differing.append(
            f"adapters of rank {known.max_lora_rank} fit there and model.lora.rank is {config.lora_rank} here (the run "
            "that starts the service sets serving.sharing.max_lora_rank)"
        )
    if not differing:
        return ""
    return (
        f"The run does not fit the shared service {name!r}, which runs already: {'; '.join(differing)}. Change that, "
        "or give serving.shared another name."
    )


class SharedRegistry(VersionRegistry):
    """The registry of a shared service. The first run starts it (`find_or_start`) and with it the application; the last
    one to leave ends both. Leases end for the policy of a crashed run."""

    def __init__(self, name: str, config: CommonConfig, model: ModelReference) -> None:
        super().__init__(config.serving.sharing.lease_s)
        self._name, self._config, self._model = name, config, model
        self._opened_at = self._empty_since = time.monotonic()
        self._deployed = False
        self._closing = False
        self._worker: asyncio.Task[None] | None = None

    def _ensure_working(self) -> None:
        if self._worker is None:  # there is no event loop before the first call
            self._worker = asyncio.create_task(self._work())

    async def join(
        self, policy: str, newest: Published | None = None, config: CommonConfig | None = None, digest: str = ""
    ) -> int | str:
        """As `VersionRegistry.join`. A text instead says why the run cannot join; an empty one: come again soon."""
        self._ensure_working()
        if self._closing:
            return self._failure
        if config and (reason := mismatch(self._name, self._config, self._model.digest, config, digest)):
            return reason
        return await super().join(policy, newest)

    async def watch(self, replica_id: str, since: Revision | None, *args: Any) -> Changes | None:
        self._ensure_working()
        return await super().watch(replica_id, since, *args)

    # What it does by itself.

    async def _work(self) -> None:
        while not self._closing:
            try:
                await self._drop_crashed()
                patience = _LINGER_S if self._tenants or self._left else _FIRST_USER_S
                if time.monotonic() - self._empty_since >= patience:
                    break
                if not self._deployed:
                    await self._deploy()
            except Exception as error:
                # A full disk, a controller that is being restarted: each may be over at the next attempt.
                logger.warning("shared service %s: %r", self._name, error)
                if self._failure:
                    break
            await self._tick()
        await self._end()

    async def _drop_crashed(self) -> None:
        """Drop tenants whose lease has ended, those of an earlier process after the length of a lease."""
        now = time.monotonic()
        for policy in [policy for policy, tenant in self._tenants.items() if tenant.deadline < now]:
            logger.warning("policy %s is dropped: its run has not renewed its lease", policy)
            await self.leave(policy)
        if not self._settled and now - self._opened_at >= self._lease_s:
            self._settled = True
            self._grow()
            await self._notify()
        if self._tenants:
            self._empty_since = now

    async def _deploy(self) -> None:
        """Start the application. That of an earlier process of this actor is kept; what others left is replaced."""
        restarted = _was_restarted()
        try:
            await asyncio.to_thread(deploy_shared, self._model, self._config, shared_id(self._name), restarted)
            self._deployed = True
        except Exception as error:
            if not restarted:  # tenants learn why
                self._failure = f"The shared service {self._name!r} could not be started: {error}"
            raise

    async def _tick(self) -> None:
        """Wait; much longer than wanted means that this process was stopped, and tenants could not renew leases."""
        clock = asyncio.get_running_loop().time
        began = clock()
        await asyncio.sleep(_TICK_S)
        if (late := clock() - began - _TICK_S) > _STALL_S:
            for tenant in self._tenants.values():
                tenant.deadline += late

    async def _end(self) -> None:
        """Delete the application, then this actor. A run that joins meanwhile must come again."""
        self._closing = True
        if self._failure:
            await asyncio.sleep(_REPORT_FAILURE_S)
        name = app_name(shared_id(self._name))
        try:
            # Serve's controller may be being restarted. Where Serve is gone replicas end by themselves.
            await asyncio.to_thread(retried, lambda: delete_application(name), (Exception,), _END_S)
        except Exception as error:
            logger.warning("shared service %s is not deleted: %r", self._name, error)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def _was_restarted() -> bool:
    return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def find_or_start(name: str, config: CommonConfig, model: ModelReference) -> ray.actor.ActorHandle:
    """The registry of this name on the cluster, or a new one on this node."""
    return start_registry(shared_id(name), SHARED_NAMESPACE, SharedRegistry, name, config, model, shared=True)
