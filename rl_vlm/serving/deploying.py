"""Starting Serve, and the application of a shared service on it."""

from __future__ import annotations

import time
from collections.abc import Callable

import ray
from ray import serve
from ray.exceptions import ActorAlreadyExistsError
from ray.serve._private.common import DeploymentID
from ray.serve.context import _get_global_client as get_global_client
from ray.serve.context import _set_global_client as set_global_client
from ray.serve.schema import ApplicationStatus, ReplicaState

from rl_vlm.config import RunConfig
from rl_vlm.models.reference import ModelReference
from rl_vlm.serving.server import app_name, build_app
from rl_vlm.serving.shared_types import SHARED_NAMESPACE, shared_id
from rl_vlm.types import RLVLMError

_ANSWER_S = 30.0


class ServingError(RLVLMError):
    """The served policy could not be started, or a version could not be published."""


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
        application = serve.status().applications.get(app_name(run_id))
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


def deploy_shared(model: ModelReference, run: RunConfig, name: str, replicas: int) -> None:
    """Start the application of a shared service, or change the number of its replicas; those that run stay."""
    start_serve(run.serving.startup_timeout_s)
    known = app_name(shared_id(name))
    deadline = time.monotonic() + run.serving.startup_timeout_s
    while (found := serve.status().applications.get(known)) is not None:
        if found.status != ApplicationStatus.DELETING:
            if run.serving.autoscaling is None:
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
    serve.delete(app_name(shared_id(name)), _blocking=True)
