"""`rl-vlm serve`: a Serve application, its adapter registry and the HTTP server in one foreground command."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import serve
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from rl_vlm.config import LearnerSection, PolicyConfig, ServingSection, load_config, load_served_config, of_policy
from rl_vlm.config.recipes import recipe_names
from rl_vlm.envs.address import TOKEN_VARIABLE, url_host
from rl_vlm.http.app import ModelApp
from rl_vlm.http.backend import ServeBackend
from rl_vlm.http.server import HTTPServer, bind, check_exposure
from rl_vlm.models.images import TextSide
from rl_vlm.models.loading import check_quantization, check_weights, load_text_side, quiet_libraries
from rl_vlm.models.reference import ModelReference
from rl_vlm.models.trained import find_trained, read_payload, trained_folder
from rl_vlm.models.weights import AdapterPayload, WeightPayload
from rl_vlm.runs.evaluate import run_for
from rl_vlm.runs.ray_session import ray_cluster
from rl_vlm.runs.surroundings import check_vllm_is_installed
from rl_vlm.serving.adapters import RESERVED, ServedAdapters, check_servable
from rl_vlm.serving.deploy import initial_replicas
from rl_vlm.serving.registry import app_name, registry_name
from rl_vlm.serving.service import PolicyService
from rl_vlm.types import UserInputError


@dataclass(frozen=True, slots=True)
class ServeTarget:
    """What is served, and how; all of it has been checked."""

    config: PolicyConfig
    model: Path
    adapter: WeightPayload | None
    adapter_folder: Path | None  # from which it was read
    name: str
    token: str | None


def plan(
    target: str | None,
    overrides: Sequence[str] = (),
    *,
    adapter: Path | None = None,
    host: str | None = None,
    port: int | None = None,
) -> ServeTarget:
    """Read arguments and environment. Raises UserInputError.

    `target` is a model (`tiny`, a folder, a hub name), a YAML file, a recipe or a run folder, which brings its adapter.
    Options win over overrides, overrides over SERVER_HOST and SERVER_PORT, these over the configuration.
    """
    adapter = find_trained(adapter)
    target = target or os.environ.get("LOCAL_MODEL_PATH")
    if not target:
        raise UserInputError("Which model? Give `tiny`, a folder, a hub name, a configuration or a run folder.")
    environment = {"http.host": os.environ.get("SERVER_HOST"), "http.port": os.environ.get("SERVER_PORT")}
    options = {"http.host": host, "http.port": port}
    settings = [f"{key}={value}" for key, value in environment.items() if value]
    settings += [*overrides, *(f"{key}={value}" for key, value in options.items() if value is not None)]
    path = Path(target)
    if (path / "config.yaml").is_file():
        config = load_served_config(path / "config.yaml", settings)
        adapter = adapter or trained_folder(path)
    elif path.suffix in (".yaml", ".yml") or (target in recipe_names() and not path.exists()):
        config = of_policy(load_config(path, settings))
    else:
        import torch

        on_gpu = ["serving.gpus_per_replica=1", "model.dtype=bfloat16"] if torch.cuda.is_available() else []
        defaults = [f"model.path={json.dumps(target)}", "serving.num_replicas=1", *on_gpu]
        config = of_policy(load_config(None, [*defaults, *settings]))
    token = os.environ.get(TOKEN_VARIABLE) or None
    check_exposure(config.http.host, token)
    if config.http.allowed_origins and token is None:
        raise UserInputError(f"http.allowed_origins lets web pages in: set {TOKEN_VARIABLE} to a secret token.")
    check_quantization(config.serving.quantization)
    model = check_weights(config.model.path)
    if (path / "config.yaml").is_file() and not any(one.startswith("serving.max_context=") for one in settings):
        config = _with_usual_context(config, model)
    given = model == Path(config.model.path).expanduser()  # and no built-in model with a folder of its name beside it
    name = config.http.model_name or (model.name if given else config.model.path)
    if RESERVED.fullmatch(name):
        raise UserInputError(f"The name {name!r} is that of the trained versions: set http.model_name to another one.")
    adapter = adapter or find_trained(config.model.adapter)
    config = run_for(config.model_copy(update={"http": config.http.model_copy(update={"model_name": name})}), adapter)
    payload = read_payload(adapter, version=1) if adapter is not None else None
    config = _for_serving(config)
    if isinstance(payload, AdapterPayload):
        check_servable(payload, config, f"The adapter {adapter}")
    return ServeTarget(config, model, payload, adapter, name, token)


def _with_usual_context(config: PolicyConfig, model: Path) -> PolicyConfig:
    """A run's context fits its episodes; other clients ask for more, which the model may allow."""
    shape = json.loads((model / "config.json").read_text())
    most = shape.get("text_config", shape).get("max_position_embeddings", 0)
    usual = min(ServingSection.model_fields["max_context"].default, most)
    serving = config.serving.model_copy(update={"max_context": max(config.serving.max_context, usual)})
    return config.model_copy(update={"serving": serving})


def _for_serving(config: PolicyConfig) -> PolicyConfig:
    """Without what only training needs, and with the engine by name."""
    engine: str = config.serving.engine
    if engine == "vllm":
        check_vllm_is_installed()
    if engine == "auto":
        has_vllm = importlib.util.find_spec("vllm") is not None
        engine = "vllm" if has_vllm and config.serving.gpus_per_replica > 0 else "transformers"
    return config.model_copy(
        update={
            "deterministic": False,
            "serving": config.serving.model_copy(update={"engine": engine, "shared": None}),
            "rollout": config.rollout.model_copy(update={"cpus_per_env_runner": 0.0, "in_flight_updates": None}),
            "learner": LearnerSection(),
        }
    )


def keeps_base_model(config: PolicyConfig) -> bool:
    """Whether replicas that have a version answer for the base model too: vLLM keeps no second copy of all weights."""
    return config.model.train != "full" or config.serving.expected_engine != "vllm"


def http_app(
    config: PolicyConfig, name: str, run_id: str, handle: Any, adapters: Any, text: TextSide, token: str | None
) -> ASGIApp:
    """The HTTP application in front of a Serve application's replicas and its `ServedAdapters`."""
    deadline_s, keeps_base = config.http.deadline_s, keeps_base_model(config)
    backend = ServeBackend(handle, adapters, name, run_id=run_id, deadline_s=deadline_s, keeps_base=keeps_base)
    gate = ModelApp(backend, text, config.http, max_context=config.serving.max_context, token=token).gate
    if not (origins := config.http.allowed_origins):
        return gate
    shown = ["X-Request-Id", "X-Ignored-Fields", "Retry-After"]
    return CORSMiddleware(gate, origins, ["GET", "POST"], ["*"], expose_headers=shown)


def run_server(plan: ServeTarget, announce: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM, inside `leaving_on_signals`. Raises RLVLMError when the model cannot be served."""
    config, limits = plan.config, plan.config.http
    quiet_libraries()
    text = load_text_side(plan.model, config.model.pixels)
    run_id = f"serve-{uuid.uuid4().hex[:8]}"
    with bind(limits.host, limits.port) as sock:
        announce(f"Loading {plan.name} ...")
        with ray_cluster(config):
            service = PolicyService(config, run_id, ModelReference.of(str(plan.model)))
            try:
                service.wait_until_ready()
                adapters = ServedAdapters(ray.get_actor(registry_name(run_id)), config, plan.model)
                if plan.adapter is not None:
                    asyncio.run(adapters.publish(plan.adapter))
                handle = serve.get_deployment_handle("policy", app_name(run_id))
                app = http_app(config, plan.name, run_id, handle, adapters, text, plan.token)
                port = sock.getsockname()[1]
                HTTPServer(app, sock, limits, lambda: announce(banner(plan, port))).run([sock])
            finally:
                service.stop()


def banner(plan: ServeTarget, port: int) -> str:
    config = plan.config
    device = "GPU" if config.serving.gpus_per_replica else "CPU"
    names = [plan.name] if plan.adapter is None or keeps_base_model(config) else []
    if plan.adapter is not None:
        names = ["policy", f"policy-v{plan.adapter.version}", *names]
    who = f"required ({TOKEN_VARIABLE})" if plan.token else "none: programs on this machine may connect"
    return (
        f"Serving on http://{url_host(config.http.host)}:{port}\n"
        f"  engine  {config.serving.engine} on {device}, {initial_replicas(config.serving)} replica(s), "
        f"{config.model.dtype}, {config.serving.max_context} tokens of context\n"
        f"  models  {', '.join(names)}\n"
        f"  token   {who}\n"
        "Ctrl-C or SIGTERM lets running requests finish."
    )
