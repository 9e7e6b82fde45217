"""What `rl-vlm serve` serves, as an application of Ray Serve: for RayService, `serve run` and `serve deploy`.

    serve run rl_vlm.runs.serve_app:build model=tiny

`rl-vlm serve` has an HTTP server of its own; here Serve's proxies are it, so that replicas on many nodes share the
load.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
from pydantic import Field
from ray import serve
from starlette.types import ASGIApp

from rl_vlm.config import PolicyConfig, Section
from rl_vlm.config.loading import validated
from rl_vlm.config.section import Count
from rl_vlm.envs.address import TOKEN_VARIABLE
from rl_vlm.http.server import check_exposure
from rl_vlm.models.loading import load_text_side
from rl_vlm.models.reference import ModelReference
from rl_vlm.models.trained import read_payload
from rl_vlm.runs.serve import http_app, plan
from rl_vlm.serving.adapters import ServedAdapters
from rl_vlm.serving.deploy import build_app
from rl_vlm.serving.registry import Published, start_registry
from rl_vlm.types import POLICY

_NAMESPACE = "rl_vlm"  # of the registry
_EVERY_ADDRESS = "0.0.0.0"  # where Serve's proxies listen on a cluster: a token is needed, whatever http.host says
_START_S = 60.0  # for the registry to start


class ServeArguments(Section):
    """`args` of the application, as in `rl-vlm serve MODEL [overrides] --adapter ADAPTER`."""

    model: str = Field(min_length=1)  # tiny, a model folder, a hub name, a configuration or a run folder
    overrides: tuple[str, ...] = ()  # changes to the configuration
    adapter: Path | None = None  # a peft adapter folder; a run folder brings its own
    ingress_replicas: Count = 1  # processes that parse requests; http.max_queue holds for each


def build(args: dict[str, Any]) -> serve.Application:
    """The application: HTTP ingress, replicas, and the registry. Every node must find model and adapter under the same
    path. Raises UserInputError."""
    given = validated(ServeArguments, args)
    planned = plan(given.model, given.overrides, adapter=given.adapter)
    config, run_id = planned.config, f"serve-{uuid.uuid4().hex[:8]}"
    model = ModelReference.of(str(planned.model))
    policy = build_app(model, config, run_id, _NAMESPACE)
    registry = serve.deployment(RegistryOwner).options(
        name="registry", max_ongoing_requests=1024, ray_actor_options={"num_cpus": 0}, health_check_period_s=5.0
    )
    ingress = serve.deployment(serve.ingress()(HTTPIngress)).options(
        name="http",
        num_replicas=given.ingress_replicas,
        # The gate counts and rejects; /health and /metrics still get in.
        max_ongoing_requests=config.http.max_queue + 64,
        graceful_shutdown_timeout_s=config.http.drain_s + 5,
        ray_actor_options={"num_cpus": 0},
    )
    owner = registry.bind(run_id, config, planned.model, planned.adapter_folder)
    return ingress.bind(policy, owner, config, planned.model, planned.name, run_id)  # type: ignore[no-any-return]


class RegistryOwner(ServedAdapters):
    """A deployment that owns the adapter registry: replicas that start later get its adapters there."""

    def __init__(self, run_id: str, config: PolicyConfig, model: Path, adapter: Path | None) -> None:
        registry, newest = start_registry(run_id, _NAMESPACE), None
        if adapter is not None:
            payload = read_payload(adapter, version=1)
            newest = Published(payload.version, payload.sha256, ray.put(payload))
        super().__init__(registry, config, model, newest)
        ray.get(registry.join.remote(POLICY, newest), timeout=_START_S)

    check_health = ServedAdapters.status  # Serve replaces this deployment when it does not answer


class HTTPIngress:
    """A deployment that answers HTTP requests with the application of `rl-vlm serve`."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, policy: Any, owner: Any, config: PolicyConfig, model: Path, name: str, run_id: str
    ) -> None:
        self._token = os.environ.get(TOKEN_VARIABLE) or None
        check_exposure(_EVERY_ADDRESS, self._token)
        self._policy, self._config, self._name, self._run_id = policy, config, name, run_id
        self._adapters = SimpleNamespace(status=owner.status.remote, load=owner.load.remote, unload=owner.unload.remote)
        self._text = load_text_side(model, config.model.pixels)
        # Once it answers, the adapter is published, and requests wait for replicas that have it.
        await owner.status.remote()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return http_app(self._config, self._name, self._run_id, self._policy, self._adapters, self._text, self._token)
