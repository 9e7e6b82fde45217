"""A run's side of a service that several runs share: it joins, keeps its lease, publishes, and leaves."""

from __future__ import annotations

import logging
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError

from rl_vlm.config import CommonConfig
from rl_vlm.models.payload import WeightPayload
from rl_vlm.models.reference import ModelReference
from rl_vlm.serving.deploying import (
    ATTEMPT_S,
    ServingError,
    answer_of,
    forget_serve,
    into_object_store,
    wait_for_replicas,
)
from rl_vlm.serving.policy_key import PolicyKey
from rl_vlm.serving.shared_registry import find_or_start
from rl_vlm.serving.shared_types import Welcome, shared_id
from rl_vlm.serving.terms import Terms
from rl_vlm.serving.version_line import Published, PublishReport
from rl_vlm.types import UserInputError

logger = logging.getLogger(__name__)

_PAUSE_S = 0.2
_LEAVE_S = 5.0


class SharedService:
    """One run's policy on shared replicas. A thread of this process renews its lease; without it the policy is collected.

    Raises UserInputError where the run does not fit the service that is there, before anything of the run has started.
    """

    def __init__(self, run: CommonConfig, policy: str, model: ModelReference, *, keeper: bool = False) -> None:
        assert run.serving.shared is not None
        self.name, self.model = run.serving.shared, model
        self.run_id = shared_id(self.name)
        self._run, self._serving, self._keeper = run, run.serving, keeper
        self.key = PolicyKey.new(policy)
        self._terms = Terms.of(run, model.digest)
        self._newest: Published | None = None
        self._registry: Any = None
        self._ready = False
        self._stopped = threading.Event()
        forget_serve()
        self.key = replace(self.key, seat=self._join(run.serving.startup_timeout_s).seat)
        self._heart = threading.Thread(target=self._keep_lease, name="policy-lease", daemon=True)
        self._heart.start()

    def _join(self, timeout_s: float) -> Welcome:
        """Find or start the service, and join it; one that is ending is waited for."""
        deadline = time.monotonic() + timeout_s
        reason: object = "it is ending"
        while True:
            try:
                folder = Path(tempfile.gettempdir()) / f"rl-vlm-shared-{uuid.uuid4().hex}"
                self._registry = find_or_start(self.name, self._run, self.model, folder)
                answer = ray.get(
                    self._registry.join.remote(self.key.policy, self.key.token, self._terms, keeper=self._keeper),
                    timeout=ATTEMPT_S,
                )
                if isinstance(answer, Welcome):
                    return answer
                if answer:
                    raise UserInputError(answer)
            except (RayActorError, GetTimeoutError, ValueError) as error:
                reason = error
            if time.monotonic() > deadline:
                raise ServingError(f"The shared service {self.name!r} cannot be joined: {reason}")
            time.sleep(_PAUSE_S)

    def _keep_lease(self) -> None:
        pause = self._serving.sharing.lease_s / 6
        while not self._stopped.wait(pause):
            try:
                renewed = self._registry.renew.remote(self.key.policy, self.key.token)
                if not ray.get(renewed, timeout=ATTEMPT_S):
                    logger.warning("The lease of policy %s had ended: it joins %s again.", self.key.policy, self.name)
                    self._rejoin()
            except RayActorError:
                self._try_rejoin()
            except Exception as error:
                # Whatever it is, the thread must go on: the next call may succeed.
                logger.warning("The lease of policy %s is not renewed: %r", self.key.policy, error)

    def _try_rejoin(self) -> None:
        # Ray is being shut down, or the registry has ended for good, as it does when nobody could renew for long.
        with suppress(ServingError, UserInputError, RayError):
            if self._ready and not self._stopped.is_set():
                self._rejoin()

    def _rejoin(self) -> None:
        self._join(self._serving.sharing.lease_s)
        if self._stopped.is_set():  # while it joined: nobody else would leave, and replicas would be kept for a lease
            self._leave()
            return
        newest = self._newest
        if newest is not None:
            ray.get(self._registry.publish.remote(newest, self.key.token), timeout=ATTEMPT_S)

    def wait_until_ready(self) -> None:
        """Wait for the first replica. Raises ServingError with Serve's own message, or the registry's."""
        wait_for_replicas(self.run_id, self._serving.startup_timeout_s, one=True, check=self._raise_failure)
        self._ready = True

    def _raise_failure(self) -> None:
        try:
            status = ray.get(self._registry.status.remote(), timeout=ATTEMPT_S)
        except (ActorUnavailableError, GetTimeoutError):
            return  # it is being restarted, or busy
        except RayActorError as error:
            raise ServingError(f"The shared service {self.name!r} has ended while it was starting.") from error
        if status["failure"]:
            raise ServingError(status["failure"])

    def publish(self, payload: WeightPayload) -> PublishReport | None:
        """Make a version of this policy known to all replicas, which load it when they are asked for it.

        As `PolicyService.publish` otherwise.
        """
        payload = replace(payload, policy=self.key.policy)
        published = self._newest = into_object_store(payload, False, self._serving.publish_timeout_s)
        deadline = time.monotonic() + self._serving.publish_timeout_s
        while True:
            try:
                before = self._registry.acknowledged.remote(self.key.policy, self.key.token)
                done = ray.get(self._registry.publish.remote(published, self.key.token), timeout=ATTEMPT_S)
                if done:
                    return ray.get(before, timeout=ATTEMPT_S)  # type: ignore[no-any-return]
                reason: object = "its lease had ended"
                self._rejoin()
            except (RayActorError, GetTimeoutError) as error:
                reason = error
            if time.monotonic() > deadline:
                raise ServingError(f"Version {published.version} could not be published: {reason}")
            time.sleep(_PAUSE_S)

    def offer_again(self) -> None:
        """Nothing to do: the thread that renews the lease publishes again where the registry has lost it."""

    def rest(self) -> None:
        """Does nothing: other runs sample meanwhile."""

    def wake(self) -> None:
        """Does nothing."""

    def newest_version(self) -> int:
        """The version that the registry holds; 0 before the first publication. Raises ServingError."""

        def ask() -> ray.ObjectRef:
            return self._registry.newest_version.remote(self.key.policy, self.key.token)

        return int(answer_of(ask, self._serving.publish_timeout_s))

    def stop(self) -> None:
        """Leave. The last user's leaving ends the service."""
        self._stopped.set()
        self._leave()

    def _leave(self) -> None:
        with suppress(RayError):  # it is gone, or the lease ends by itself
            ray.get(self._registry.leave.remote(self.key.policy, self.key.token), timeout=_LEAVE_S)


@contextmanager
def kept_up(run: CommonConfig) -> Iterator[None]:
    """Inside this context the run's shared service, if it names one, does not end for want of users: for a sweep's trials."""
    if not run.serving.shared:
        yield
        return
    service = SharedService(run, f"keeper-{uuid.uuid4().hex[:8]}", ModelReference.of(run.model.path), keeper=True)
    try:
        yield
    finally:
        service.stop()
