"""The driver's side of serving where parts of the cluster fail. Ray and Serve are played."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ObjectStoreFullError
from ray.serve.schema import ApplicationStatus

from rl_vlm.config import PolicyConfig
from rl_vlm.models.weights import AdapterPayload
from rl_vlm.serving import deploy
from rl_vlm.serving import service as module
from rl_vlm.serving.deploy import ServingError, deploy_shared
from rl_vlm.serving.service import PolicyService

PAYLOAD = AdapterPayload(3, b"weights", "{}", "hash")


def made(registry_calls: dict[str, Any], monkeypatch: pytest.MonkeyPatch, **settings: Any) -> PolicyService:
    """A run's own service whose registry answers with the results of these functions."""
    service = PolicyService.__new__(PolicyService)
    service.run_id, service.key = "run", module.OWN
    service._shared, service._newest, service._stopped = None, None, threading.Event()
    service._serving = PolicyConfig().serving.model_copy(update=settings)
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


@pytest.mark.parametrize(
    ("keep", "done"),
    [(True, []), (False, ["deleted", "deployed"])],
)
def test_what_becomes_of_an_application_that_is_there(
    monkeypatch: pytest.MonkeyPatch, keep: bool, done: list[str]
) -> None:
    seen: list[str] = []
    there = {"rl-vlm-shared-s": SimpleNamespace(status=ApplicationStatus.RUNNING)}

    def delete(name: str, _blocking: bool) -> None:
        seen.append("deleted")
        del there[name]

    played_serve = SimpleNamespace(
        status=lambda: SimpleNamespace(applications=there),
        delete=delete,
        RunTarget=lambda *_, **__: None,
        run_many=lambda *_, **__: seen.append("deployed"),
    )
    monkeypatch.setattr(deploy, "serve", played_serve)
    monkeypatch.setattr(deploy, "start_serve", lambda timeout_s: None)
    monkeypatch.setattr(deploy, "build_app", lambda *_, **__: None)
    deploy_shared(None, PolicyConfig(), "shared-s", keep)  # type: ignore[arg-type]
    assert seen == done
