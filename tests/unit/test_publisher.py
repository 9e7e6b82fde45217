"""The driver's side of serving where parts of the cluster fail. Ray and Serve are played."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, GetTimeoutError, ObjectStoreFullError
from ray.serve.schema import ApplicationStatus
from registry_support import arrived

from rl_vlm.config import RunConfig
from rl_vlm.models.adapter import AdapterPayload
from rl_vlm.serving import deploying, publisher, registry, version_line
from rl_vlm.serving.deploying import ServingError, answer_of, deploy_shared, into_object_store
from rl_vlm.serving.publisher import PolicyService
from rl_vlm.serving.shared_service import SharedService
from rl_vlm.serving.version_line import Published, VersionLine

PAYLOAD = AdapterPayload(3, b"weights", "{}", "hash")


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploying, "_PAUSE_S", 0.0)


def test_a_registry_that_restarts_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [ActorDiedError(), GetTimeoutError(), {"version": 7}]

    def get(ref: Any, timeout: float) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(deploying, "ray", SimpleNamespace(get=get))
    service = PolicyService.__new__(PolicyService)
    service._registry = SimpleNamespace(status=SimpleNamespace(remote=lambda: None))  # type: ignore[assignment]
    service._serving = RunConfig().serving
    assert service.newest_version() == 7
    answers += [ActorDiedError()]
    with pytest.raises(ServingError, match="did not answer"):
        answer_of(lambda: None, -1.0)  # type: ignore[arg-type, return-value]


def test_a_full_object_store_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [ObjectStoreFullError("full"), ObjectStoreFullError("full")]

    def put(payload: Any) -> Any:
        if failures:
            raise failures.pop()
        return "reference"

    monkeypatch.setattr(version_line, "ray", SimpleNamespace(put=put))
    published = into_object_store(PAYLOAD, False, 60.0)
    assert (published.version, published.ref) == (3, "reference")
    failures.append(ObjectStoreFullError("full"))
    with pytest.raises(ServingError, match="Version 3 does not fit into the object store"):
        into_object_store(PAYLOAD, False, -1.0)


def test_a_controller_that_is_gone_at_the_end_does_not_make_a_run_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[str] = []

    def delete(*_: Any, **__: Any) -> None:
        raise ActorDiedError

    monkeypatch.setattr(deploying, "serve", SimpleNamespace(delete=delete))
    monkeypatch.setattr(publisher, "ray", SimpleNamespace(kill=lambda actor, no_restart: killed.append(actor)))
    service = PolicyService.__new__(PolicyService)
    service.run_id, service._registry = "run", "registry"  # type: ignore[assignment]
    service.stop()
    assert killed == ["registry"]  # replicas without a registry end by themselves


def test_who_leaves_while_it_joins_again_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[str] = []
    service = SharedService.__new__(SharedService)
    service._stopped, service._serving, service._newest = threading.Event(), RunConfig().serving, None
    monkeypatch.setattr(SharedService, "_join", lambda self, timeout_s: self._stopped.set())
    monkeypatch.setattr(SharedService, "_leave", lambda self: left.append("left"))
    service._rejoin()
    assert left == ["left"]


def test_a_disk_that_is_gone_costs_the_copy_and_not_the_publication(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: Any, **__: Any) -> None:
        raise OSError(116, "Stale file handle")

    async def story() -> None:
        line = VersionLine(tmp_path, put=arrived)
        published = Published(3, "hash", arrived(PAYLOAD))
        assert line.add(published)
        monkeypatch.setattr(VersionLine, "_write", gone)
        monkeypatch.setattr(Path, "unlink", gone)
        await line.persist(published, version_line.disk_thread())
        assert line.newest is published

    asyncio.run(story())


@pytest.mark.parametrize(
    ("if_found", "done"),
    [("resize", ["resized to 2"]), ("keep", []), ("replace", ["deleted", "deployed"])],
)
def test_what_becomes_of_an_application_that_is_there(
    monkeypatch: pytest.MonkeyPatch, if_found: Any, done: list[str]
) -> None:
    seen: list[str] = []
    there = {"rl-vlm-shared-s": SimpleNamespace(status=ApplicationStatus.RUNNING)}

    def delete(name: str, _blocking: bool) -> None:
        seen.append("deleted")
        del there[name]

    played = SimpleNamespace(
        status=lambda: SimpleNamespace(applications=there),
        delete=delete,
        RunTarget=lambda *_, **__: None,
        run_many=lambda *_, **__: seen.append("deployed"),
    )
    monkeypatch.setattr(deploying, "serve", played)
    monkeypatch.setattr(deploying, "start_serve", lambda timeout_s: None)
    monkeypatch.setattr(deploying, "build_app", lambda *_, **__: None)
    monkeypatch.setattr(deploying, "_resize", lambda app, replicas: seen.append(f"resized to {replicas}"))
    deploy_shared(None, RunConfig(), "s", 2, if_found)  # type: ignore[arg-type]
    assert seen == done


def test_a_job_of_another_namespace_finds_the_registry_of_a_shared_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tune.Tuner(GRPO)` runs in whatever namespace `ray.init` was given."""

    def get_actor(name: str, namespace: str | None) -> Any:
        if (name, namespace) != ("rl-vlm-registry-shared-s", "rl_vlm"):
            raise ValueError("Failed to look up the actor")
        return SimpleNamespace(model_files=SimpleNamespace(remote=lambda: {"config.json": b"{}"}))

    monkeypatch.setattr(registry, "ray", SimpleNamespace(get_actor=get_actor, get=lambda ref, timeout: ref))
    assert registry.fetch_model_files("shared-s") == {"config.json": b"{}"}
    with pytest.raises(ValueError, match="Failed to look up"):
        registry.fetch_model_files("shared-s", "elsewhere")


def test_a_controller_that_restarts_does_not_end_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    running = SimpleNamespace(
        applications={"rl-vlm-run": SimpleNamespace(status=ApplicationStatus.RUNNING, deployments={})}
    )
    answers: list[Any] = [ActorDiedError(), running]

    def status() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(deploying, "serve", SimpleNamespace(status=status))
    deploying.wait_for_replicas("run", 60.0)
    assert not answers


@pytest.mark.parametrize("marker", ["", "[]", '{"folder": "adapter-1", "version": 1, "sha256": "0"}'])
def test_a_damaged_copy_on_disk_does_not_keep_a_registry_from_starting(tmp_path: Path, marker: str) -> None:
    (tmp_path / "newest.json").write_text(marker)
    (tmp_path / "adapter-1").mkdir()
    (tmp_path / "adapter-1/adapter_model.safetensors").write_bytes(b"\x10")
    assert VersionLine(tmp_path).newest is None
