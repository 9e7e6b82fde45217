"""Replicas on Ray Serve: versions, streams, cancellation, a wedged engine, and what the registry knows of them."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from loops import in_loop
from ray import serve
from serving_support import RUN_ID, Adapters, ask, client, replicas, served, until

from rl_vlm.config import PolicyConfig
from rl_vlm.engines.base import EngineError
from rl_vlm.models.reference import ModelReference
from rl_vlm.runs.surroundings import is_loopback
from rl_vlm.serving import replica as replica_module
from rl_vlm.serving.registry import app_name, registry_name
from rl_vlm.serving.replica import ReplicaUnavailableError
from rl_vlm.serving.service import PolicyService

Served = tuple[PolicyConfig, PolicyService]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def policy(tiny_folder: Path) -> Iterator[Served]:
    probes = {"serving__probe_after_s": 2.0, "serving__probe_timeout_s": 1.5}
    with served(tiny_folder, **probes) as (run, service):
        yield run, service


@pytest.fixture(scope="module")
def adapters(policy: Served, tiny_folder: Path) -> Adapters:
    return Adapters(policy[0], tiny_folder)


def registry_status() -> dict[str, Any]:
    registry = ray.get_actor(registry_name(RUN_ID))
    return ray.get(registry.status.remote(), timeout=30)  # type: ignore[no-any-return]


def test_every_replica_acknowledges_a_version_and_serves_it(
    policy: Served, adapters: Adapters, tiny_folder: Path
) -> None:
    _, service = policy
    for version in (1, 2):
        service.publish(adapters.payload(version))

    async def ask_all() -> list[Any]:
        policy_client = client()
        return await asyncio.gather(
            *(policy_client.generate(ask(tiny_folder, "hello", str(k), min_version=2)) for k in range(8))
        )

    answers = asyncio.run(ask_all())
    assert {answer.policy_version for answer in answers} == {2}
    assert len({answer.replica_id for answer in answers}) == 2
    assert len({answer.samples[0].token_ids.tobytes() for answer in answers}) == 1

    def acknowledged() -> bool:
        reports = registry_status()["reports"]
        return len(reports) == 2 and all(report["version"] == 2 for report in reports.values())

    asyncio.run(until(acknowledged, 30))
    report = service.publish(adapters.payload(3))
    assert report is not None
    assert len(report.acked) == 2


def test_replicas_listen_on_loopback_alone_and_answer_there(policy: Served, tiny_folder: Path) -> None:
    ports = [port for one in replicas() for port in one.net_connections(kind="inet") if port.status == "LISTEN"]
    assert len(ports) >= 4  # Ray's own and Serve's, of two
    assert [port.laddr for port in ports if not is_loopback(port.laddr.ip)] == []
    by_grpc = serve.get_deployment_handle("policy", app_name(RUN_ID)).options(_by_reference=False)
    (answer,) = by_grpc.generate.remote([ask(tiny_folder, "hello")]).result(timeout_s=60)
    assert answer.replica_id


def test_a_request_waits_for_its_version(policy: Served, adapters: Adapters, tiny_folder: Path) -> None:
    _, service = policy

    async def early() -> tuple[bool, int]:
        request = asyncio.ensure_future(client().generate(ask(tiny_folder, "early", min_version=4)))
        await asyncio.sleep(0.5)
        waited = not request.done()
        await asyncio.to_thread(service.publish, adapters.payload(4))
        return waited, (await request).policy_version

    assert asyncio.run(early()) == (True, 4)


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Exit codes of a replica in this process, beside the real ones; only Serve's context is not Serve's."""
    codes: list[int] = []
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="here"))
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(replica_module.os, "_exit", codes.append)
    return codes


def replica_here(run: PolicyConfig, folder: Path, **serving: Any) -> replica_module.VLMServer:
    changed = run.model_copy(update={"serving": run.serving.model_copy(update=serving)})
    return replica_module.VLMServer(
        ModelReference.of(str(folder)), changed, RUN_ID, ray.get_runtime_context().namespace
    )


@in_loop
async def test_a_replica_that_cannot_load_fails_its_health_check(
    policy: Served, adapters: Adapters, tiny_folder: Path, exits: list[int]
) -> None:
    run, service = policy
    service.publish(adapters.payload(service.newest_version() + 1))

    async def load_adapter(payload: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    replica = replica_here(run, tiny_folder, publish_timeout_s=1.0)
    replica._engine.load_adapter = load_adapter  # type: ignore[method-assign]
    await replica.check_health()
    with pytest.raises(ReplicaUnavailableError):
        await replica.generate([ask(tiny_folder, "hello")])
    with pytest.raises(EngineError, match="No space left"):
        async with asyncio.timeout(20):
            while True:
                await replica.check_health()
                await asyncio.sleep(0.1)
    await asyncio.sleep(1.0)
    await replica.__del__()
    assert exits == [1]


@in_loop
async def test_a_replica_that_is_busy_for_long_passes_its_health_checks(
    policy: Served, tiny_folder: Path, exits: list[int]
) -> None:
    """Every check probes, and every probe stands behind samples that end much later than its deadline."""
    run, _ = policy
    replica = replica_here(run, tiny_folder, probe_after_s=1e-9, probe_timeout_s=2.0, max_rows=8)
    long = [ask(tiny_folder, "count", str(k), n=8, max_new_tokens=450, temperature=9.0) for k in range(16)]
    work = asyncio.ensure_future(replica._engine.generate(long))
    await until(lambda: replica._engine.stats().running > 0)
    for _ in range(10):
        waiting = replica._engine.stats().waiting
        await replica.check_health()
        assert replica._life.failed_probes == 0
    assert waiting > 8  # nothing got so far that a probe could have been answered
    work.cancel()
    hangs = replica_here(run, tiny_folder, probe_after_s=1e-9, probe_timeout_s=0.3)
    await until(lambda: hangs._life.started or bool(hangs._ensure_started()))
    hangs._engine._advance = lambda: time.sleep(3)  # type: ignore[attr-defined]
    with pytest.raises(EngineError, match="nothing"):
        for _ in range(2):
            await hangs.check_health()
    await asyncio.sleep(1.0)
    for each in (replica, hangs):
        await each.__del__()
    assert exits == [1]


@pytest.mark.acceptance
def test_a_wedged_engine_is_found_and_replaced(policy: Served, tiny_folder: Path) -> None:
    """A stopped process answers nothing, neither requests nor health checks; requests end on the other replica."""
    (victim, _), before = replicas(), {process.pid for process in replicas()}
    victim.send_signal(signal.SIGSTOP)
    try:
        started = time.monotonic()

        async def go_on() -> None:
            policy_client = client(deadline_s=120.0)
            answers = await asyncio.gather(
                *(policy_client.generate(ask(tiny_folder, "hello", str(k))) for k in range(6)), return_exceptions=True
            )
            assert not [answer for answer in answers if isinstance(answer, BaseException)]

        asyncio.run(go_on())
        asyncio.run(until(lambda: len({p.pid for p in replicas()} - before) == 1, 120))
        print(f"replaced after {time.monotonic() - started:.1f} s")
    finally:
        if victim.is_running():
            os.kill(victim.pid, signal.SIGKILL)
