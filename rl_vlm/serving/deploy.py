"""The Serve application of a service: started, resized, waited for, deleted."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import ray
from ray import serve
from ray.exceptions import ActorAlreadyExistsError, RayActorError
from ray.serve._private.common import DeploymentID
from ray.serve.config import RequestRouterConfig
from ray.serve.context import _get_global_client as get_global_client
from ray.serve.context import _set_global_client as set_global_client
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, ReplicaState
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rl_vlm.config import CommonConfig, ServingSection
from rl_vlm.config.section import claim
from rl_vlm.models.reference import ModelReference
from rl_vlm.serving.registry import (
    MOST_CALLS,
    SHARED_NAMESPACE,
    Published,
    Registry,
    Revision,
    app_name,
    registry_name,
    shared_id,
)
from rl_vlm.serving.replica import VLMServer
from rl_vlm.types import RLVLMError
from rl_vlm.waiting import within

_ANSWER_S = 30.0
_DELETE_S = 90.0  # Serve itself waits for 60
_HEALTH_CHECK_S = 5.0

IfFound = Literal["resize", "keep", "replace"]  # what becomes of an application that is there


class ServingError(RLVLMError):
    """The served policy could not be started, or a version could not be published."""


def initial_replicas(serving: ServingSection) -> int:
    """How many replicas an application begins with."""
    autoscaling = serving.autoscaling
    if autoscaling is None:
        return serving.num_replicas
    return min(max(serving.num_replicas, autoscaling.min_replicas), autoscaling.max_replicas)


def _replicas(serving: ServingSection, wanted: int | None) -> dict[str, Any]:
    initial, autoscaling = initial_replicas(serving), serving.autoscaling
    if autoscaling is None:
        return {"num_replicas": wanted or initial}
    return {"autoscaling_config": {**autoscaling.model_dump(), "initial_replicas": initial}}


def build_app(
    model: ModelReference, config: CommonConfig, run_id: str, namespace: str, replicas: int | None = None
) -> serve.Application:
    """The application of a run, or of runs that share it: one deployment, no HTTP route. `replicas` in place of the
    configuration's number."""
    serving = config.serving
    deployment = serve.deployment(VLMServer).options(
        name="policy",
        **_replicas(serving, replicas),
        max_ongoing_requests=1024,
        health_check_period_s=_HEALTH_CHECK_S,
        health_check_timeout_s=serving.probe_timeout_s + 10.0,
        graceful_shutdown_timeout_s=2.0,
        ray_actor_options={
            "num_cpus": serving.cpus_per_replica,
            "num_gpus": serving.gpus_per_replica,
            "resources": claim(config.resources.replicas_on),
        },
        request_router_config=RequestRouterConfig(request_router_class="rl_vlm.serving.client:AffinityRouter"),
    )
    return deployment.bind(model, config, run_id, namespace)  # type: ignore[no-any-return]


def start_serve(timeout_s: float) -> None:
    """Start the cluster's one Serve, or find the one that is there. Raises ServingError when another's does not come
    up.

    A training run opens no HTTP port of its own.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            serve.start(proxy_location="Disabled")
            return
        except ActorAlreadyExistsError as error:
            # Another run starts it at the same time: the next attempt finds its controller.
            if time.monotonic() > deadline:
                raise ServingError(
                    f"Serve is being started elsewhere and did not come up in {timeout_s:g} s."
                ) from error
            time.sleep(0.1)


def delete_application(name: str) -> None:
    """Delete an application of Serve and wait for its end. Raises TimeoutError, also where Serve does not answer at
    all, as on a node that is dying, and what Serve raises.
    """
    within(_DELETE_S, f"deleting {name}", lambda: serve.delete(name, _blocking=True))


def _application(name: str, seconds: float) -> ApplicationStatusOverview | None:
    """What Serve says of an application; None where it is not there. Raises TimeoutError where Serve says nothing
    for so long."""
    return within(max(seconds, 1.0), "asking Serve", serve.status).applications.get(name)


def forget_serve() -> None:
    """Forget the Serve that this process was connected to, which may be that of an earlier cluster; the next call finds
    the current one.

    A run that shares does not call `serve.start`, which would do this.
    """
    set_global_client(None)


def wait_for_replicas(
    run_id: str, timeout_s: float, *, one: bool = False, check: Callable[[], None] = lambda: None
) -> None:
    """Wait for all replicas of an application, or for `one` that runs. Raises ServingError with Serve's own message,
    and what `check` raises.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        check()
        application = None
        with suppress(RayActorError, TimeoutError):  # Serve's controller is being restarted
            application = _application(app_name(run_id), deadline - time.monotonic())
        status = application.status if application else None
        running = (
            [d.replica_states.get(ReplicaState.RUNNING, 0) for d in application.deployments.values()]
            if application
            else []
        )
        if status == ApplicationStatus.RUNNING or (one and any(running)):
            return
        failed = status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY)
        if failed or time.monotonic() > deadline:
            messages = [d.message for d in application.deployments.values()] if application else []
            detail = " ".join(message.strip().splitlines()[-1] for message in messages if message.strip())
            why = "failed" if failed else f"were not ready within {timeout_s:g} s"
            raise ServingError(f"The policy's replicas {why}. {detail}".strip())
        time.sleep(0.1)


def deploy_shared(
    model: ModelReference, config: CommonConfig, name: str, replicas: int, if_found: IfFound = "resize"
) -> None:
    """Start the application of a shared service; of one that is there change the number of its replicas (those that run
    stay), keep it as it is, or delete it first.
    """
    start_serve(config.serving.startup_timeout_s)
    known = app_name(shared_id(name))
    deadline = time.monotonic() + config.serving.startup_timeout_s
    while (found := _application(known, deadline - time.monotonic())) is not None:
        if if_found == "replace":
            delete_application(known)
        elif found.status != ApplicationStatus.DELETING:
            if config.serving.autoscaling is None and if_found == "resize":
                _resize(known, replicas)
            return
        if time.monotonic() > deadline:
            raise ServingError(f"Serve does not finish deleting the application {known}.")
        time.sleep(0.1)
    app = build_app(model, config, shared_id(name), SHARED_NAMESPACE, replicas=replicas)
    # Deploying an application again would replace its replicas, so their number is changed from outside.
    target = serve.RunTarget(
        app, name=known, route_prefix=None, external_scaler_enabled=config.serving.autoscaling is None
    )
    serve.run_many([target], wait_for_applications_running=False)


def _resize(app: str, replicas: int) -> None:
    # The client of what Serve offers over HTTP, which is not open here.
    controller = get_global_client()._controller
    ray.get(controller.update_deployment_replicas.remote(DeploymentID("policy", app), replicas), timeout=_ANSWER_S)


def delete_shared(name: str) -> None:
    """Delete the application of a shared service; the cluster's Serve itself stays."""
    delete_application(app_name(shared_id(name)))


# The first run starts it, and the last one to leave ends it. Tenants hold leases, so that the policy of a crashed run
# is dropped.

logger = logging.getLogger(__name__)

_FIRST_USER_S = 60.0  # how long a service waits for its first tenant
_LINGER_S = 2.0  # and how long after its last one, for a run that is about to come
_TICK_S = 1.0
_TELL_S = 5.0  # how long a service that could not start says why
_STALL_S = 2.0  # by which a tick is late where this process was stopped, or its machine did not get to it
_END_S = 120.0  # how long to try to delete the application
_FEWER_AFTER_S = 30.0  # how long fewer replicas must be wanted before one is stopped


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a run needs of a service. Computed where the run is, whose model folder other nodes need not have under the
    same path.

    Attributes:
        equal: what all runs of a service must agree on, by configuration key.
        max_lora_rank: the highest rank that a service of this run can hold; None: any.
        lora_rank: of the run's own adapter.
    """

    equal: Mapping[str, str]
    max_context: int
    max_lora_rank: int | None
    lora_rank: int

    @classmethod
    def of(cls, config: CommonConfig, digest: str) -> Requirements:
        """The requirements of a run; `digest` is its model's."""
        serving = config.serving
        engine = serving.expected_engine
        equal = {
            "model.path": f"{config.model.path} ({digest})",
            "model.dtype": config.model.dtype,
            "model.head_dtype": config.model.head_dtype,
            "model.min_pixels": str(config.model.pixels.minimum),
            "model.max_pixels": str(config.model.pixels.maximum),
            "serving.engine": engine,
            "serving.quantization": serving.quantization,
            "serving.gpus_per_replica": f"{serving.gpus_per_replica:g}",
        }
        # Merged weights have the model's own shape, whatever the rank was.
        ranks = serving.sharing.max_lora_rank or config.lora_rank
        return cls(equal, serving.max_context, ranks if engine == "vllm" else None, config.lora_rank)

    def mismatch(self, wanted: Requirements, name: str) -> str:
        """Why a run cannot join the service `name`, which was started for these requirements; empty if it can."""
        differing = [
            f"{key} is {_shortened(value)} there and {_shortened(wanted.equal[key])} here"
            for key, value in self.equal.items()
            if _compared(value) != _compared(wanted.equal[key])
        ]
        if wanted.max_context > self.max_context:
            differing.append(f"serving.max_context is {self.max_context} there and {wanted.max_context} here")
        if self.max_lora_rank is not None and wanted.lora_rank > self.max_lora_rank:
            differing.append(
                f"adapters of rank {self.max_lora_rank} fit there and model.lora.rank is {wanted.lora_rank} here (the "
                "run that starts the service sets serving.sharing.max_lora_rank)"
            )
        if not differing:
            return ""
        return (
            f"The run does not fit the shared service {name!r}, which runs already: {'; '.join(differing)}. Change "
            "that, or give serving.shared another name."
        )


def _compared(value: str) -> str:
    """The part that is compared: of a model the digest of its weights, wherever they lie."""
    return value.rpartition(" (")[2]


def _shortened(value: str) -> str:
    return value if len(value) <= 120 else f"...{value[-117:]}"


def wanted_replicas(serving: ServingSection, policies: int) -> int:
    """How many replicas this many policies get."""
    sharing = serving.sharing
    if sharing.policies_per_replica is None:
        return serving.num_replicas
    most = max(sharing.replica_limit, serving.num_replicas)
    return min(max(math.ceil(policies / sharing.policies_per_replica), serving.num_replicas), most)


class SharedRegistry(Registry):
    """The actor's class; `find_or_start` makes the actor."""

    def __init__(self, name: str, config: CommonConfig, model: ModelReference) -> None:
        super().__init__(config.serving.sharing.lease_s)
        self._name, self._config, self._reference = name, config, model
        self._requirements = Requirements.of(config, model.digest)
        self._opened_at = time.monotonic()
        self._replicas = 0  # that were asked for last
        self._fewer_since: float | None = None
        self._had_tenants = False
        self._settled = False  # whether every tenant of an earlier process has had the time to join again
        self._kept = False  # whether an application was found whose tenants have not all joined again
        self._failure = ""
        self._closing = False
        self._worker: asyncio.Task[None] | None = None

    def _ensure_working(self) -> None:
        if self._worker is None:  # there is no event loop before the first call
            self._worker = asyncio.create_task(self._work())

    async def join(
        self,
        policy: str,
        newest: Published | None = None,
        keeper: bool = False,
        requirements: Requirements | None = None,
    ) -> int | str:
        """As `Registry.join`. A text instead says why the run cannot join; an empty one: come again soon."""
        self._ensure_working()
        if self._closing:
            return self._failure
        if requirements is not None and (reason := self._requirements.mismatch(requirements, self._name)):
            return reason
        self._had_tenants = True
        return await super().join(policy, newest, keeper)

    async def watch(self, replica_id: str, since: Revision | None, *args: Any, **options: Any) -> Any:
        """See Registry."""
        self._ensure_working()
        return await super().watch(replica_id, since, *args, **options)

    def _expected(self) -> Collection[str]:
        return ()  # replicas load what they are asked for

    def _present(self) -> Collection[str] | None:
        return frozenset(tenant.policy for tenant in self._tenants.policies) if self._settled else None

    async def status(self) -> dict[str, Any]:
        """As `Registry.status`, and the state of the service."""
        return {
            **await super().status(),
            "name": self._name,
            "failure": self._failure,
            "closing": self._closing,
            "keepers": len(self._tenants) - len(self._tenants.policies),
            "wanted_replicas": self._replicas,
        }

    # What it does by itself.

    async def _work(self) -> None:
        """Start the replicas, drop crashed tenants, adapt the number of replicas to that of policies, and end the
        service."""
        while not self._closing:
            try:
                now = time.monotonic()
                await self._settle(now)
                for tenant in self._tenants.expired(now):
                    logger.warning("policy %s is dropped: its run has not renewed its lease", tenant.policy)
                    await self.leave(tenant.policy)
                if self._is_over(now):
                    break
                await self._scale(now)
            except Exception as error:
                # A full disk, a controller that is being restarted: each may be over at the next attempt.
                logger.warning("shared service %s: %r", self._name, error)
                if not (self._replicas or self._kept):  # never started: tenants are told
                    self._failure = f"The shared service {self._name!r} could not be started: {error}"
                    break
            await self._tick()
        await self._end()

    async def _settle(self, now: float) -> None:
        """After the length of a lease every tenant of an earlier process has joined again."""
        if not self._settled and now - self._opened_at >= self._config.serving.sharing.lease_s:
            self._settled = True
            if self._kept:
                self._replicas = 0  # their number is set anew
            self._tenants.revision += 1
            await self._notify()

    async def _tick(self) -> None:
        """Wait. If that took much longer than it should, this process was stopped and tenants could not renew their
        leases."""
        clock = asyncio.get_running_loop().time
        began = clock()
        await asyncio.sleep(_TICK_S)
        if (late := clock() - began - _TICK_S) > _STALL_S:
            self._tenants.excuse(late)

    def _is_over(self, now: float) -> bool:
        if len(self._tenants):
            return False
        patience = _LINGER_S if self._had_tenants else _FIRST_USER_S
        return now - max(self._tenants.empty_since, self._opened_at) >= patience

    async def _scale(self, now: float) -> None:
        wanted = wanted_replicas(self._config.serving, len(self._tenants.policies))
        if wanted >= self._replicas:
            self._fewer_since = None
        elif self._fewer_since is None:
            self._fewer_since = now
        if wanted > self._replicas or (self._fewer_since is not None and now - self._fewer_since >= _FEWER_AFTER_S):
            deploying = (self._reference, self._config, self._name, wanted, self._if_found())
            await asyncio.to_thread(deploy_shared, *deploying)
            self._replicas, self._fewer_since = wanted, None

    def _if_found(self) -> IfFound:
        """What becomes of an application that is there."""
        if self._settled or self._replicas:
            return "keep" if self._kept and not self._settled else "resize"
        # An earlier process of this actor started it, whose tenants join again; or another service left it, perhaps
        # with another model.
        self._kept = True  # also where the cluster does not say
        self._kept = _was_restarted()
        return "keep" if self._kept else "replace"

    async def _end(self) -> None:
        """Delete the application, then this actor. A run that joins meanwhile is told to come again."""
        self._closing = True
        if self._failure:
            await asyncio.sleep(_TELL_S)
        deadline = time.monotonic() + _END_S
        while True:
            try:
                await asyncio.to_thread(delete_shared, self._name)
                break
            except Exception as error:
                # Serve's controller is being restarted, or Serve is gone: then replicas end by themselves.
                logger.warning("shared service %s is not deleted: %r", self._name, error)
                if time.monotonic() > deadline:
                    break
            await asyncio.sleep(_TICK_S)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def _was_restarted() -> bool:
    """Whether this process continues an actor that died. Asks the cluster."""
    return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def find_or_start(name: str, config: CommonConfig, model: ModelReference) -> ray.actor.ActorHandle:
    """The registry of this name on the cluster, or a new one on this node."""
    actor = ray.remote(SharedRegistry).options(
        name=registry_name(shared_id(name)),
        namespace=SHARED_NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=MOST_CALLS,
        # As long as this node is there.
        scheduling_strategy=NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True),
    )
    return actor.remote(name, config, model)  # type: ignore[no-any-return]
