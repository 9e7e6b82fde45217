"""PolicyService: a run's side of serving. It starts or joins a service, publishes versions, and leaves or ends the
service.

A run of its own is a service with one tenant, whose registry ends with the run. With `serving.shared` the service
belongs to all runs that name it (see `SharedRegistry`).
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    ObjectStoreFullError,
    OutOfDiskError,
    RayActorError,
    RayError,
)
from ray.serve.context import _set_global_client as set_global_client
from ray.serve.exceptions import RayServeException
from ray.util.placement_group import get_current_placement_group

from rl_vlm.config import CommonConfig
from rl_vlm.engines.vllm_limits import check_kernels
from rl_vlm.models.reference import ModelReference
from rl_vlm.models.shared_memory import OwnFolder
from rl_vlm.models.weights import WeightPayload
from rl_vlm.serving.deploy import ServingError, build_app, delete_application, deploy, start_serve, wait_for_replicas
from rl_vlm.serving.registry import OWN, PolicyKey, Published, PublishReport, app_name, shared_id, start_registry
from rl_vlm.serving.shared import find_or_start
from rl_vlm.types import UserInputError
from rl_vlm.waiting import retried

logger = logging.getLogger(__name__)

# For an answer of a registry, which may be dying, before it is asked again; repeated calls change nothing.
_ATTEMPT_S = 15.0
_PAUSE_S = 0.2
_RENEW_S = 5.0  # at most, between two renewals of a lease: a restarted registry has no version until then
_LEAVE_S = 5.0


class PolicyService:
    """A served policy. A thread renews its lease, and joins again where the registry has lost it.

    `name` is that of the policy where replicas are shared, else of the service. `run_id` is that of the application,
    `key` the policy. Raises UserInputError, before anything has started, where a run does not fit a shared service.
    """

    def __init__(self, config: CommonConfig, name: str, model: ModelReference) -> None:
        self.model, self._config, self._serving = model, config, config.serving
        check_kernels(config, model.folder)
        self._shared = config.serving.shared
        self.run_id = shared_id(self._shared) if self._shared else name
        self.key = PolicyKey(name) if self._shared else OWN
        self._newest: Published | None = None
        self._ready = False
        self._stopped = threading.Event()
        self._memory = OwnFolder() if config.trains_full else None
        self._files, self._bytes = list[str](), 0  # of the newest versions in it, and the size of one
        self._registry: Any = None
        if self._shared:
            # The next call finds the cluster's Serve: this process may know that of an earlier cluster.
            set_global_client(None)
        else:
            self._registry = start_registry(self.run_id, ray.get_runtime_context().namespace)
            self._deploy()
        self.key = replace(self.key, home=self._join(self._serving.startup_timeout_s))
        threading.Thread(target=self._keep_lease, name="policy-lease", daemon=True).start()

    def __deepcopy__(self, memo: Any) -> PolicyService:
        """RLlib copies configurations; the service stays the same."""
        return self

    def __reduce__(self) -> Any:
        """Other processes get None: the service belongs to the process that started it."""
        return type(None), ()

    def _deploy(self) -> None:
        app = build_app(self.model, self._config, self.run_id, ray.get_runtime_context().namespace)
        timeout_s = self._serving.startup_timeout_s
        if get_current_placement_group() is None:
            start_serve(timeout_s)
        else:
            # From a task of its own: a Tune trial's placement group would claim Serve's controller, which does not fit
            # in it.
            start = ray.remote(start_serve).options(num_cpus=0, scheduling_strategy="DEFAULT")
            ray.get(start.remote(timeout_s), timeout=2 * timeout_s)
        deploy(app, self.run_id)

    def _join(self, timeout_s: float) -> int:
        """Join the service, which is started if it is shared and not there; one that is ending is waited for."""
        again = (RayActorError, GetTimeoutError, ValueError)
        try:
            return retried(self._ask_to_join, again, timeout_s)
        except again as error:
            raise ServingError(f"The service {self.run_id!r} cannot be joined: {error}") from error

    def _ask_to_join(self) -> int:
        if self._shared:
            self._registry = find_or_start(self._shared, self._config, self.model)
            asked = self._registry.join.remote(self.key.policy, self._newest, self._config, self.model.digest)
        else:
            asked = self._registry.join.remote(self.key.policy, self._newest)
        answer: int | str = ray.get(asked, timeout=_ATTEMPT_S)
        if isinstance(answer, str):  # why the run does not fit; nothing while the service ends
            raise UserInputError(answer) if answer else ValueError("it is ending")
        return answer

    def _keep_lease(self) -> None:
        pause = min(self._serving.sharing.lease_s / 6, _RENEW_S)
        while not self._stopped.wait(pause):
            try:
                if not ray.get(self._registry.renew.remote(self.key.policy), timeout=_ATTEMPT_S):
                    logger.warning(
                        "The registry of %s had lost policy %s, which joins again.", self.run_id, self.key.policy
                    )
                    self._rejoin()
            except RayActorError:
                # Ray is being shut down, or the registry has ended for good: no tenant could renew for long.
                with suppress(ServingError, UserInputError, RayError):
                    if self._ready and not self._stopped.is_set():
                        self._rejoin()
            except Exception as error:
                # Whatever it is, the thread must go on: the next call may succeed.
                logger.warning("The lease of policy %s is not renewed: %r", self.key.policy, error)

    def _rejoin(self) -> None:
        self._join(self._serving.sharing.lease_s)
        if self._stopped.is_set():  # while it joined: without this the replicas would stay up for a whole lease
            self._leave()

    def wait_until_ready(self) -> None:
        """Wait for all replicas, or for the first one where they are shared. Raises ServingError with Serve's or the
        registry's own message."""
        check = self._raise_failure if self._shared else lambda: None
        wait_for_replicas(self.run_id, self._serving.startup_timeout_s, one=bool(self._shared), check=check)
        self._ready = True

    def _raise_failure(self) -> None:
        try:
            status = ray.get(self._registry.status.remote(), timeout=_ATTEMPT_S)
        except (ActorUnavailableError, GetTimeoutError):
            return  # it is being restarted, or busy
        except RayActorError as error:
            raise ServingError(f"The service {self.run_id!r} has ended while it was starting.") from error
        if status["failure"]:
            raise ServingError(status["failure"])

    def publish(self, payload: WeightPayload) -> PublishReport | None:
        """Give a version to the registry. One that is dying, and a full object store, are waited for; then this raises
        ServingError.

        It does not wait for replicas: requests carry the version that they need. Returns which replicas have loaded the
        newest version that was acknowledged before this one, and after how long; None before the first acknowledgement.
        """
        payload, published = replace(payload, policy=self.key.policy), None
        if payload.file and sum(node["Alive"] for node in ray.nodes()) > 1:
            payload = replace(payload, file="")  # its bytes go to the other nodes
        deadline = time.monotonic() + self._serving.publish_timeout_s
        while True:
            try:
                if published is None:
                    published = Published(payload.version, payload.sha256, ray.put(payload), payload.policy)
                    self._newest = published  # kept here, because a restarted registry has no versions
                before = self._registry.acknowledged.remote(self.key.policy)  # calls from here arrive in their order
                if ray.get(self._registry.publish.remote(published), timeout=_ATTEMPT_S):
                    self._keep(payload)
                    return ray.get(before, timeout=_ATTEMPT_S)  # type: ignore[no-any-return]
                self._rejoin()
                reason: object = "the registry had lost it"
            except (RayActorError, GetTimeoutError) as error:
                reason = error
            except (ObjectStoreFullError, OutOfDiskError):
                reason = (
                    "it does not fit into the object store of this node, nor on its disk: start the node with a larger "
                    "--object-store-memory, or free some space."
                )
            if time.monotonic() > deadline:
                raise ServingError(f"Version {payload.version} could not be published: {reason}")
            time.sleep(_PAUSE_S)

    @property
    def folder(self) -> str:
        """Where versions of all weights may lie in this node's shared memory. Empty where three do not fit beside Ray's
        store: processes that write to what is promised and not there are killed."""
        if self._memory is None or not self._memory.in_memory:
            return ""
        needed = ray.cluster_resources().get("object_store_memory", 0) + 3 * self._bytes
        return str(self._memory.path) if shutil.disk_usage(self._memory.path).total >= needed else ""

    def _keep(self, payload: WeightPayload) -> None:
        """Delete all versions but this one and the one before, which replicas may still open."""
        self._bytes, self._files = len(payload.tensors), [*self._files, payload.file][-2:]
        for path in self._memory.path.iterdir() if self._memory is not None else ():
            if str(path) not in self._files:
                path.unlink()

    def let_sleep(self, sleep: bool) -> None:
        """Let the replicas give memory to the learner until the next version is published, or take it back without one.
        Where a replica is late, the learner must do with what is free."""
        wanted, limit = "sleep" if sleep else "wake", self._serving.publish_timeout_s
        try:
            late = ray.get(self._registry.let_sleep.remote(sleep, limit), timeout=limit + _ATTEMPT_S)
        except (RayActorError, GetTimeoutError) as error:
            logger.warning("The replicas were not asked to %s: %s", wanted, error)  # a new registry lets them wake
            return
        if late:
            logger.warning("Replicas %s were asked to %s and did not within %g s.", ", ".join(late), wanted, limit)

    def newest_version(self) -> int:
        """0 before the first publication."""
        return self._newest.version if self._newest is not None else 0

    def stop(self) -> None:
        """Leave a shared service, whose last tenant ends it; end a run's own. A second call does nothing."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        if self._shared:
            self._leave()
            return
        try:
            delete_application(app_name(self.run_id))
        except (RayError, RayServeException, TimeoutError) as error:
            # What was trained is not lost with it: replicas whose registry is gone end by themselves.
            logger.warning("The replicas of %s could not be stopped: %s", self.run_id, error)
        ray.kill(self._registry, no_restart=True)
        if self._memory is not None:
            self._memory.close()

    def _leave(self) -> None:
        with suppress(RayError):  # it is gone, or the lease ends by itself
            ray.get(self._registry.leave.remote(self.key.policy), timeout=_LEAVE_S)


def start_service(config: CommonConfig) -> PolicyService:
    return PolicyService(config, f"{config.name}-{uuid.uuid4().hex[:8]}", ModelReference.of(config.model.path))


@contextmanager
def started_service(config: CommonConfig) -> Iterator[PolicyService]:
    """A service that ends with the context. A run enters it before it imports RLlib, which takes as long to load."""
    service = start_service(config)
    try:
        yield service
    finally:
        service.stop()
