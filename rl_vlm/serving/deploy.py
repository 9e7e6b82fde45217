"""The Serve application of a service: started, resized, waited for, deleted."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

import ray
from ray import serve
from ray.exceptions import ActorAlreadyExistsError, RayActorError
from ray.serve._private.common import DeploymentID
from ray.serve.config import RequestRouterConfig
from ray.serve.context import _get_global_client as get_global_client
from ray.serve.context import _set_global_client as set_global_client
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, ReplicaState

from rl_vlm.config import CommonConfig, ServingSection
from rl_vlm.config.resources import claim
from rl_vlm.hung_threads import within
from rl_vlm.models.reference import ModelReference
from rl_vlm.serving.registry import SHARED_NAMESPACE, app_name, shared_id
from rl_vlm.serving.replica import VLMServer
from rl_vlm.types import RLVLMError

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
    model: ModelReference, run: CommonConfig, run_id: str, namespace: str, replicas: int | None = None
) -> serve.Application:
    """The application of a run, or of runs that share it: one deployment, no HTTP route. `replicas` in place of the
    configuration's number."""
    serving = run.serving
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
            "resources": claim(run.resources.replicas_on),
        },
        request_router_config=RequestRouterConfig(request_router_class="rl_vlm.serving.router:AffinityRouter"),
    )
    return deployment.bind(model, run, run_id, namespace)  # type: ignore[no-any-return]


def start_serve(timeout_s: float) -> None:
    """Start the cluster's one Serve, or find the one that is there. Raises ServingError when another's does not come up.

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
    """Delete an application of Serve and wait for its end. Raises TimeoutError, also where Serve does not answer at all, as on a
    node that is dying, and what Serve raises."""
    within(_DELETE_S, f"deleting {name}", lambda: serve.delete(name, _blocking=True))


def _application(name: str, seconds: float) -> ApplicationStatusOverview | None:
    """What Serve says of an application; None where it is not there. Raises TimeoutError where Serve says nothing for so long."""
    return within(max(seconds, 1.0), "asking Serve", serve.status).applications.get(name)


def forget_serve() -> None:
    """Forget the Serve that this process was connected to, which may be that of an earlier cluster; the next call finds the current one.

    A run that shares does not call `serve.start`, which would do this.
    """
    set_global_client(None)


def wait_for_replicas(
    run_id: str, timeout_s: float, *, one: bool = False, check: Callable[[], None] = lambda: None
) -> None:
    """Wait for all replicas of an application, or for `one` that runs. Raises ServingError with Serve's own message, and what
    `check` raises."""
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
    model: ModelReference, run: CommonConfig, name: str, replicas: int, if_found: IfFound = "resize"
) -> None:
    """Start the application of a shared service; of one that is there change the number of its replicas (those that run stay), keep it
    as it is, or delete it first."""
    start_serve(run.serving.startup_timeout_s)
    known = app_name(shared_id(name))
    deadline = time.monotonic() + run.serving.startup_timeout_s
    while (found := _application(known, deadline - time.monotonic())) is not None:
        if if_found == "replace":
            delete_application(known)
        elif found.status != ApplicationStatus.DELETING:
            if run.serving.autoscaling is None and if_found == "resize":
                _resize(known, replicas)
            return
        if time.monotonic() > deadline:
            raise ServingError(f"Serve does not finish deleting the application {known}.")
        time.sleep(0.1)
    app = build_app(model, run, shared_id(name), SHARED_NAMESPACE, replicas=replicas)
    # Deploying an application again would replace its replicas, so their number is changed from outside.
    target = serve.RunTarget(
        app, name=known, route_prefix=None, external_scaler_enabled=run.serving.autoscaling is None
    )
    serve.run_many([target], wait_for_applications_running=False)


def _resize(app: str, replicas: int) -> None:
    # The client of what Serve offers over HTTP, which is not open here.
    controller = get_global_client()._controller
    ray.get(controller.update_deployment_replicas.remote(DeploymentID("policy", app), replicas), timeout=_ANSWER_S)


def delete_shared(name: str) -> None:
    """Delete the application of a shared service; the cluster's Serve itself stays."""
    delete_application(app_name(shared_id(name)))
