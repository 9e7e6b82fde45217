"""The driver's side of serving: starts the application and the registry of a run, publishes adapters, stops both."""

from __future__ import annotations

import logging
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import ray
from ray import serve
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from ray.serve.exceptions import RayServeException
from ray.util.placement_group import get_current_placement_group

from rl_vlm.config import CommonConfig
from rl_vlm.models.payload import WeightPayload
from rl_vlm.models.reference import ModelReference
from rl_vlm.serving.deploying import (
    ATTEMPT_S,
    ServingError,
    answer_of,
    delete_application,
    into_object_store,
    start_serve,
    wait_for_replicas,
)
from rl_vlm.serving.policy_key import OWN, PolicyKey
from rl_vlm.serving.registry import start_registry
from rl_vlm.serving.server import app_name, build_app
from rl_vlm.serving.shared_service import SharedService
from rl_vlm.serving.version_line import Published, PublishReport

_OFFER_EVERY_S = 5.0

logger = logging.getLogger(__name__)


class Service(Protocol):
    """A served policy, as the run that trains or asks it sees it. `key` opens it in the application of `run_id`."""

    run_id: str
    model: ModelReference
    key: PolicyKey

    def wait_until_ready(self) -> None:
        """Wait until it answers. Raises ServingError."""
        ...

    def publish(self, payload: WeightPayload) -> PublishReport | None:
        """Hand a version to the replicas; the report is that of an earlier one. Raises ServingError."""
        ...

    def offer_again(self) -> None:
        """Make sure that the registry has the newest version; quick, and called often."""
        ...

    def rest(self) -> None:
        """Let the replicas give memory to the learner until the next version is published, or `wake`."""
        ...

    def wake(self) -> None:
        """Let them take it back although there is no new version."""
        ...

    def newest_version(self) -> int:
        """The version that the registry holds; 0 before the first publication."""
        ...

    def stop(self) -> None:
        """End it, or the run's part in it."""
        ...


class PolicyService:
    """One run's served policy. The registry belongs to the process that makes this object and ends with it."""

    key = OWN

    def __init__(self, run: CommonConfig, run_id: str, model: ModelReference, folder: Path) -> None:
        self.run_id, self.model = run_id, model
        self._serving = run.serving
        self._namespace = ray.get_runtime_context().namespace
        # The folder serves a restarted registry of this run only: a resumed run publishes its checkpoint again.
        shutil.rmtree(folder, ignore_errors=True)
        self._registry = start_registry(run_id, self._namespace, folder, model.folder)
        self._newest: Published | None = None
        self._offer: ray.ObjectRef | None = None
        self._offered_at = time.monotonic()
        app = build_app(model, run, run_id, self._namespace)
        timeout_s = run.serving.startup_timeout_s
        if get_current_placement_group() is None:
            start_serve(timeout_s)
        else:
            # From a task of its own: a Tune trial's placement group would claim Serve's controller, which does not fit in it.
            start = ray.remote(start_serve).options(num_cpus=0, scheduling_strategy="DEFAULT")
            ray.get(start.remote(timeout_s), timeout=2 * timeout_s)
        serve.run_many(
            [serve.RunTarget(app, name=app_name(run_id), route_prefix=None)], wait_for_applications_running=False
        )

    def wait_until_ready(self) -> None:
        """Wait for all replicas. Raises ServingError with Serve's own message."""
        wait_for_replicas(self.run_id, self._serving.startup_timeout_s)

    def publish(self, payload: WeightPayload, on_disk: bool = False) -> PublishReport | None:
        """Hand a version to all replicas. `on_disk`: for a service that publishes once and never offers it again.
        A dying registry is waited for; raises ServingError when it does not come back.

        Returns once the registry holds it. It does not wait for the replicas: requests carry the version that they need. The
        result reports the newest version that was acknowledged before this one: who has loaded it, and after how long.
        None before the first acknowledgement, also of a registry that died meanwhile.
        """
        # Kept here, because the registry may die before its replicas have fetched the object.
        published = self._newest = into_object_store(payload, on_disk, self._serving.publish_timeout_s)
        deadline = time.monotonic() + self._serving.publish_timeout_s
        while True:
            try:
                before = self._registry.acknowledged.remote()  # calls from here arrive in their order
                ray.get(self._registry.publish.remote(published), timeout=ATTEMPT_S)
                return ray.get(before, timeout=ATTEMPT_S)  # type: ignore[no-any-return]
            except (ActorDiedError, ActorUnavailableError, RayActorError, GetTimeoutError) as error:
                if time.monotonic() > deadline:
                    raise ServingError(f"Version {published.version} could not be published: {error}") from error
                time.sleep(0.1)

    def offer_again(self) -> None:
        """Send the newest version to the registry once more, without waiting, if the last time was a while ago.

        It changes nothing, unless the registry has died and came back without its copy: then replicas that start would wait
        for a version that only the next publication brings, and that may wait for these replicas.
        """
        if self._newest is None or time.monotonic() - self._offered_at < _OFFER_EVERY_S:
            return
        if self._offer is not None and ray.wait([self._offer], timeout=0)[0]:
            with suppress(RayError):  # it died meanwhile: this call is the next attempt
                ray.get(self._offer, timeout=ATTEMPT_S)
        self._offered_at = time.monotonic()
        self._offer = self._registry.publish.remote(self._newest)

    def rest(self) -> None:
        """See Service. Where a replica does not rest in time the learner must do with what is free."""
        self._let_rest(True)

    def wake(self) -> None:
        """See Service."""
        self._let_rest(False)

    def _let_rest(self, rest: bool) -> None:
        turn = "rest" if rest else "wake"
        limit = self._serving.publish_timeout_s
        try:
            late = ray.get(self._registry.let_rest.remote(rest, limit), timeout=limit + ATTEMPT_S)
        except (ActorDiedError, ActorUnavailableError, RayActorError, GetTimeoutError) as error:
            logger.warning("The replicas were not told to %s: %s", turn, error)  # a new registry lets them wake
            return
        if late:
            logger.warning("Replicas %s were told to %s and did not within %g s.", ", ".join(late), turn, limit)

    def newest_version(self) -> int:
        """The version that the registry holds; 0 before the first publication. Raises ServingError."""
        return int(answer_of(self._registry.status.remote, self._serving.publish_timeout_s)["version"])

    def stop(self) -> None:
        """Delete the application and the registry; the cluster's Serve itself stays."""
        try:
            delete_application(app_name(self.run_id))
        except (RayError, RayServeException, TimeoutError) as error:
            # What was trained is not lost with it: replicas whose registry is gone end by themselves.
            logger.warning("The replicas of %s could not be stopped: %s", self.run_id, error)
        ray.kill(self._registry, no_restart=True)


_started_early: dict[Path, Service] = {}


@contextmanager
def serving_ahead(run: CommonConfig, folder: Path) -> Iterator[None]:
    """Start serving before the rest of a run is imported: RLlib takes ten seconds, in which the replicas load.

    The algorithm that asks `start_service` for the same folder takes it over; else it ends with this context.
    """
    _started_early[folder] = _new_service(run, folder)
    try:
        yield
    finally:
        left = _started_early.pop(folder, None)
        if left is not None:
            left.stop()


def start_service(run: CommonConfig, folder: Path) -> Service:
    """The served policy of a run, which may have been started ahead; `folder` is the registry's."""
    return _started_early.pop(folder, None) or _new_service(run, folder)


def _new_service(run: CommonConfig, folder: Path) -> Service:
    model, run_id = ModelReference.of(run.model.path), f"{run.name}-{uuid.uuid4().hex[:8]}"
    return SharedService(run, run_id, model) if run.serving.shared else PolicyService(run, run_id, model, folder)
