"""The driver's side of serving where parts of the cluster fail. Ray and Serve are played."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from core_support import run_config
from ray.exceptions import ActorDiedError, ObjectStoreFullError

from rl_vlm.config import PolicyConfig
from rl_vlm.config.sweep import SweepConfig
from rl_vlm.models.reference import hash_model
from rl_vlm.models.weights import AdapterPayload
from rl_vlm.runs.serve_app import HTTPIngress, build
from rl_vlm.serving import deploy
from rl_vlm.serving import service as module
from rl_vlm.serving.deploy import ServingError
from rl_vlm.serving.service import PolicyService
from rl_vlm.serving.shared import mismatch
from rl_vlm.types import UserInputError

PAYLOAD = AdapterPayload(3, b"weights", "{}", "hash")


def made(registry_calls: dict[str, Any], monkeypatch: pytest.MonkeyPatch, **settings: Any) -> PolicyService:
    """A run's own service whose registry answers with the results of these functions."""
    service = PolicyService.__new__(PolicyService)
    service.run_id, service.key = "run", module.OWN
    service._shared, service._newest, service._stopped = None, None, threading.Event()
    service._serving = PolicyConfig().serving.model_copy(update=settings)
    service._memory, service._files, service._bytes = None, [], 0
    calls = {name: SimpleNamespace(remote=call) for name, call in registry_calls.items()}
    service._registry = SimpleNamespace(**calls)
    monkeypatch.setattr(module, "_PAUSE_S", 0.0)
    return service


def played(monkeypatch: pytest.MonkeyPatch, put: Any = lambda payload: "reference") -> None:
    def get(answer: Any, timeout: float) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(module, "ray", SimpleNamespace(get=get, put=put, kill=lambda *_, **__: None))


def test_a_full_object_store_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [ObjectStoreFullError("full"), ObjectStoreFullError("full")]

    def put(payload: Any) -> Any:
        if failures:
            raise failures.pop()
        return "reference"

    played(monkeypatch, put)
    calls = {"acknowledged": lambda policy: None, "publish": lambda published: True}
    service = made(calls, monkeypatch)
    service.publish(PAYLOAD)
    assert not failures
    failures.append(ObjectStoreFullError("full"))
    service = made(calls, monkeypatch, publish_timeout_s=-1.0)
    with pytest.raises(ServingError, match="object store"):
        service.publish(PAYLOAD)


def test_a_controller_that_is_gone_at_the_end_does_not_make_a_run_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[str] = []

    def delete(*_: Any, **__: Any) -> None:
        raise ActorDiedError

    service = made({}, monkeypatch)
    service._registry = "registry"
    monkeypatch.setattr(deploy, "serve", SimpleNamespace(delete=delete))
    monkeypatch.setattr(module, "ray", SimpleNamespace(kill=lambda actor, no_restart: killed.append(actor)))
    service.stop()
    assert killed == ["registry"]  # replicas without a registry end by themselves


# --- The application for RayService: its arguments, its deployments, and that it asks for a token. Ray is not started


HERE = ["serving.engine=transformers", "http.max_queue=8", "http.drain_s=3"]


def test_applications_of_one_model_do_not_share_a_registry(tiny_folder: Path) -> None:
    run_ids = {
        build({"model": str(tiny_folder), "overrides": HERE})._bound_deployment.init_args[-1] for _ in range(2)
    }  # fmt: skip
    assert len(run_ids) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "model"),
        ({"model": "tiny", "override": []}, "Unknown config key override. Did you mean overrides?"),
        ({"model": "tiny", "overrides": ["serving.num_replica=2"]}, "serving.num_replicas"),
        ({"model": "/no/such/model"}, "/no/such/model"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(UserInputError, match=words):
        build(arguments)


@pytest.mark.parametrize("token", [None, "", "  "])
def test_without_a_token_nobody_is_answered(token: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RL_VLM_API_TOKEN", raising=False)
    if token is not None:
        monkeypatch.setenv("RL_VLM_API_TOKEN", token)
    ingress = HTTPIngress.__new__(HTTPIngress)
    with pytest.raises(UserInputError, match="RL_VLM_API_TOKEN"):
        asyncio.run(ingress.__init__(None, None, PolicyConfig(), Path("model"), "name", "id"))  # type: ignore[misc]


# --- Which runs fit a shared service, and what a sweep makes of `shared`


def config(folder: Path, **dotted: Any) -> Any:
    return run_config(folder, serving__shared="s", **dotted)


@pytest.mark.parametrize(
    ("here", "told"),
    [
        ({}, ""),
        ({"seed": 5, "learner__lr": 1.0, "rollout__group_size": 2, "serving__num_replicas": 7}, ""),
        ({"serving__max_context": 256}, ""),
        ({"model__lora__rank": 64}, ""),  # merged weights have the model's shape
        ({"serving__max_context": 8192}, "serving.max_context is 4096 there and 8192 here"),
        ({"model__dtype": "bfloat16"}, "model.dtype is float32 there and bfloat16 here"),
        ({"model__max_pixels": 4096}, "model.max_pixels is None there and 4096 here"),
        ({"serving__engine": "vllm"}, "serving.engine is transformers there and vllm here"),
    ],
)
def test_a_run_that_asks_for_more_or_other_than_is_there_is_told_what(
    tiny_folder: Path, here: dict[str, Any], told: str
) -> None:
    reason = mismatch("s", config(tiny_folder), "digest", config(tiny_folder, **here), "digest")
    assert told in reason and bool(reason) == bool(told)


def test_vllm_holds_adapters_up_to_a_rank(tiny_folder: Path) -> None:
    def held(**dotted: Any) -> str:
        first = config(tiny_folder, serving__engine="vllm", model__lora__rank=8, **dotted)
        joins = config(tiny_folder, serving__engine="vllm", model__lora__rank=16)
        return mismatch("s", first, "digest", joins, "digest")

    assert "adapters of rank 8 fit there and model.lora.rank is 16 here" in held()
    assert held(serving__sharing__max_lora_rank=16) == ""


def test_a_model_is_known_by_its_weights_wherever_it_lies(tiny_folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_folder, tmp_path / "copy")
    there = config(tiny_folder), hash_model(tiny_folder)
    assert mismatch("s", *there, config(copy), hash_model(copy)) == ""
    weights = next(copy.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    assert "model.path is" in mismatch("s", *there, config(copy), hash_model(copy))


@pytest.mark.parametrize(
    "setting", [{"deterministic": True}, {"rollout__in_flight_updates": "keep", "rollout__max_policy_lag": 1}]
)
def test_what_shared_replicas_do_not_know_is_refused(tiny_folder: Path, setting: dict[str, Any]) -> None:
    with pytest.raises(UserInputError, match="serving.shared"):
        config(tiny_folder, **setting)


def test_a_sweep_makes_its_trials_share(tiny_folder: Path) -> None:
    run = run_config(tiny_folder, name="mine")
    space = {"space": {"model.lora.rank": {"choice": [4, 32]}}}
    assert SweepConfig.model_validate(space).prepared(run) is run
    shared = SweepConfig.model_validate({**space, "shared": True}).prepared(run)
    assert (shared.serving.shared, shared.serving.sharing.max_lora_rank) == ("mine-sweep", 32)
    assert SweepConfig.model_validate({**space, "shared": "ours"}).prepared(run).serving.shared == "ours"
    assert run.serving.shared is None
