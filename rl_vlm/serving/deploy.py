"""The Serve application of a service: started, waited for, deleted."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ray import serve
from ray.exceptions import ActorAlreadyExistsError, RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, ReplicaState

from rl_vlm.config import CommonConfig, ServingSection
from rl_vlm.config.resources import claim
from rl_vlm.deadlines import call_with_deadline
from rl_vlm.models.reference import ModelReference
from rl_vlm.serving.registry import SHARED_NAMESPACE, app_name
from rl_vlm.serving.replica import VLMServer
from rl_vlm.types import RLVLMError
from rl_vlm.waiting import retried

_DELETE_S = 90.0  # Serve itself waits for 60
_HEALTH_CHECK_S = 5.0


class ServingError(RLVLMError):
    """The served policy could not be started, or a version could not be published.

    Do: read the reason, often memory or a missing model; `rl-vlm doctor MODEL` checks one.
    """


def initial_replicas(serving: ServingSection) -> int:
    autoscaling = serving.autoscaling
    if autoscaling is None:
        return serving.num_replicas
    return min(max(serving.num_replicas, autoscaling.min_replicas), autoscaling.max_replicas)


def build_app(model: ModelReference, config: CommonConfig, run_id: str, namespace: str) -> serve.Application:
    """The application of a run, or of runs that share it: one deployment, no HTTP route."""
    serving = config.serving
    count: dict[str, Any] = {"num_replicas": serving.num_replicas}
    if (autoscaling := serving.autoscaling) is not None:
        count = {"autoscaling_config": {**autoscaling.model_dump(), "initial_replicas": initial_replicas(serving)}}
    deployment = serve.deployment(VLMServer).options(
        name="policy",
        **count,
        max_ongoing_requests=1024,
        health_check_period_s=_HEALTH_CHECK_S,
        health_check_timeout_s=serving.probe_timeout_s + 10.0,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=2.0,
        ray_actor_options={
            "num_cpus": serving.cpus_per_replica,
            "num_gpus": config.gpu_shares[0],
            "resources": claim(config.resources.replicas_on),
        },
        request_router_config=RequestRouterConfig(request_router_class="rl_vlm.serving.router:AffinityRouter"),
    )
    return deployment.bind(model, config, run_id, namespace)  # type: ignore[no-any-return]


def start_serve(timeout_s: float) -> None:
    """Start the cluster's one Serve, without an HTTP port, or find the one that is there. Raises ServingError when
    another's does not come up."""
    try:
        # Where another run starts it at the same time, the next attempt finds its controller.
        retried(lambda: serve.start(proxy_location="Disabled"), (ActorAlreadyExistsError,), timeout_s)
    except ActorAlreadyExistsError as error:
        raise ServingError(f"Serve is being started elsewhere and did not come up in {timeout_s:g} s.") from error


def delete_application(name: str) -> None:
    """Delete an application of Serve and wait for its end. Raises what Serve raises, and TimeoutError also where it
    does not answer, as on a node that is dying."""
    call_with_deadline(_DELETE_S, f"deleting {name}", lambda: serve.delete(name, _blocking=True))


def _application(name: str, seconds: float) -> ApplicationStatusOverview | None:
    """Serve's view of an application; None where it is not there. Raises TimeoutError where Serve does not answer."""
    return call_with_deadline(max(seconds, 1.0), "asking Serve", serve.status).applications.get(name)


def wait_for_replicas(
    run_id: str, timeout_s: float, *, one: bool = False, check: Callable[[], None] = lambda: None
) -> None:
    """Wait for all replicas of an application, or for `one`. Raises ServingError, and what `check` does."""
    deadline = time.monotonic() + timeout_s
    while True:
        check()
        application = None
        with suppress(RayActorError, TimeoutError):  # Serve's controller is being restarted
            application = _application(app_name(run_id), deadline - time.monotonic())
        status, deployments = (application.status, application.deployments.values()) if application else (None, ())
        running = any(one_of.replica_states.get(ReplicaState.RUNNING) for one_of in deployments)
        if status == ApplicationStatus.RUNNING or (one and running):
            return
        failed = status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY)
        if failed or time.monotonic() > deadline:
            messages = [one_of.message.strip() for one_of in deployments]
            detail = " ".join(message.splitlines()[-1] for message in messages if message)
            why = "failed" if failed else f"were not ready within {timeout_s:g} s"
            raise ServingError(f"The policy's replicas {why}. {detail}".strip())
        time.sleep(0.1)


def deploy(app: serve.Application, run_id: str) -> None:
    """Start an application, without waiting for its replicas."""
    target = serve.RunTarget(app, name=app_name(run_id), route_prefix=None)
    serve.run_many([target], wait_for_applications_running=False)


def deploy_shared(model: ModelReference, config: CommonConfig, run_id: str, keep: bool) -> None:
    """Start the application of a shared service. `keep` one that is there as it is, or delete it first."""
    timeout_s = config.serving.startup_timeout_s
    start_serve(timeout_s)
    deadline = time.monotonic() + timeout_s
    while (there := _application(app_name(run_id), deadline - time.monotonic())) is not None:
        if not keep:
            delete_application(app_name(run_id))
        elif there.status != ApplicationStatus.DELETING:
            return
        if time.monotonic() > deadline:
            raise ServingError(f"Serve does not finish deleting the application {app_name(run_id)}.")
        time.sleep(0.1)
    deploy(build_app(model, config, run_id, SHARED_NAMESPACE), run_id)
