"""The client of the served policy, with a handle that a test controls: calls, retries, deadlines, cancellation."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import deque
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_support import until
from loops import in_loop
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError

from rl_vlm.config import AutoscalingSection, ServingSection
from rl_vlm.engines.base import EngineError
from rl_vlm.http import backend as module
from rl_vlm.http.backend import ServeBackend
from rl_vlm.serving.client import GenerationFailedError, PolicyClient
from rl_vlm.serving.health import ReplicaState
from rl_vlm.serving.registry import OWN
from rl_vlm.serving.replica import ReplicaUnavailableError
from rl_vlm.serving.router import AffinityRouter, home_session, homes
from rl_vlm.types import Completion, GenerationRequest, SamplingParams

FOREVER = object()


class Response:
    """What a Serve handle gives back: awaitable once, and cancellable."""

    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    def __await__(self) -> Generator[Any, None, Any]:
        return self._wait().__await__()

    async def _wait(self) -> Any:
        await asyncio.sleep(0)
        if self.outcome is FOREVER:
            await asyncio.Event().wait()
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


class Handle:
    """Answers by itself, or with what a test has put into `script`, one entry per call."""

    def __init__(self, *script: Any) -> None:
        self.script = deque(script)
        self.calls: list[tuple[str, list[GenerationRequest]]] = []
        self.responses: list[Response] = []
        self.session = ""

    @property
    def generate(self) -> Handle:
        return self

    @property
    def encode_images(self) -> Handle:
        return self

    def options(self, session_id: str) -> Handle:
        self.session = session_id
        return self

    def remote(self, requests: list[GenerationRequest]) -> Response:
        self.calls.append((self.session, list(requests)))
        outcome = self.script.popleft() if self.script else None
        if outcome is None:
            outcome = [answer(asked, f"replica-{len(self.calls)}") for asked in requests]
        self.responses.append(Response(outcome))
        return self.responses[-1]


def ask(name: str, session: str = "") -> GenerationRequest:
    return GenerationRequest(name, np.zeros(1, dtype=np.int32), SamplingParams(1), preferred_replica=session)


def answer(asked: GenerationRequest, replica: str = "r") -> Completion:
    return Completion(asked.request_id, asked.prompt_ids, (), 0, replica)


class Pauses(list[float]):
    """Stands in for sleeping, and remembers how long."""

    async def __call__(self, seconds: float) -> None:
        self.append(seconds)
        await asyncio.sleep(0)


def client_of(handle: Handle, **changes: Any) -> PolicyClient:
    settings: dict[str, Any] = {"deadline_s": 20.0, "homes": range(2), "coalesce": True, "sleep": Pauses(), **changes}
    return PolicyClient("run", handle=handle, **settings)


def run(client: PolicyClient, *requests: GenerationRequest, patience_s: float = 15.0) -> list[Any]:
    """All at the same moment; errors in their places."""

    async def gather() -> list[Any]:
        async with asyncio.timeout(patience_s):
            return await asyncio.gather(*map(client.generate, requests), return_exceptions=True)

    return asyncio.run(gather())


def task_error(cause: Exception) -> Exception:
    """What Serve raises here when a replica's method raised `cause` there: both a RayTaskError and the cause."""
    return RayTaskError("generate", "traceback", cause).as_instanceof_cause()


# --- how requests become calls


def test_requests_of_one_moment_are_spread_over_as_many_calls_as_replicas() -> None:
    handle = Handle()
    requests = [ask(str(k)) for k in range(10)]
    answers = run(client_of(handle, homes=range(3)), *requests)
    assert [completion.request_id for completion in answers] == [str(k) for k in range(10)]
    assert sorted(len(batch) for _, batch in handle.calls) == [3, 3, 4]
    assert [session for session, _ in handle.calls] == ["#0", "#1", "#2"]  # a home each


def test_requests_that_become_ready_in_the_same_round_share_a_call() -> None:
    """Those that a callback of this round submits, too."""
    handle = Handle()
    client = client_of(handle, homes=[0])

    async def late() -> Completion:
        await asyncio.sleep(0)
        return await client.generate(ask("late"))

    async def both() -> list[Completion]:
        return await asyncio.gather(client.generate(ask("early")), late())

    assert [completion.request_id for completion in asyncio.run(both())] == ["early", "late"]
    assert [len(batch) for _, batch in handle.calls] == [2]


def test_conversations_stay_on_their_replica() -> None:
    handle = Handle()
    requests = [ask(f"{session}{k}", session) for k in range(3) for session in ("x", "y", "")]
    answers = run(client_of(handle), *requests)
    assert [completion.request_id for completion in answers] == [asked.request_id for asked in requests]
    by_session: dict[str, list[list[str]]] = {}
    for session, batch in handle.calls:
        by_session.setdefault(session, []).append([asked.request_id for asked in batch])
    assert by_session["x"] == [["x0", "x1", "x2"]]
    assert by_session["y"] == [["y0", "y1", "y2"]]
    assert by_session["#0"] == [["0", "2"]]
    assert by_session["#1"] == [["1"]]


def test_long_answers_are_asked_for_one_by_one() -> None:
    handle = Handle()
    run(client_of(handle, coalesce=False), *(ask(str(k), "s") for k in range(4)))
    assert [len(batch) for _, batch in handle.calls] == [1] * 4


# --- retries


@pytest.mark.parametrize(
    "error",
    [
        ActorDiedError(),
        ActorUnavailableError("gone", None),
        BackPressureError(num_queued_requests=1, max_queued_requests=1),
        TaskCancelledError(),
        ReplicaUnavailableError("old"),
        task_error(ReplicaUnavailableError("old")),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("coalesce", [True, False])
def test_what_a_dead_or_stale_replica_lost_is_asked_again_elsewhere(error: Exception, coalesce: bool) -> None:
    handle, pauses = Handle(error, error), Pauses()
    client = client_of(handle, coalesce=coalesce, sleep=pauses)
    drawn = random.getstate()
    (completion,) = run(client, ask("a", "replica-7"))
    assert random.getstate() == drawn  # environments may draw from the global generator
    assert completion.request_id == "a"
    # The first replica is asked for by name only once: it may be the dead one.
    assert [session for session, _ in handle.calls] == ["replica-7", "", ""]
    assert (client.retries, len(pauses)) == (2, 2)


def test_an_answer_that_the_engine_refuses_is_not_asked_for_again() -> None:
    for error in (task_error(EngineError("too long")), EngineError("too long"), task_error(ValueError("a bug"))):
        handle = Handle(error)
        (outcome,) = run(client_of(handle), ask("a"))
        assert isinstance(outcome, GenerationFailedError)
        assert str(error.args[0] if not isinstance(error, RayTaskError) else error.cause) in str(outcome)
        assert len(handle.calls) == 1


# --- deadlines and cancellation


@pytest.mark.parametrize("coalesce", [True, False])
def test_no_answer_within_the_deadline_is_an_error_and_frees_the_replica(coalesce: bool) -> None:
    handle = Handle(FOREVER)
    started = time.monotonic()
    (outcome,) = run(client_of(handle, deadline_s=0.2, coalesce=coalesce), ask("a"))
    assert isinstance(outcome, GenerationFailedError)
    assert "No answer within 0.2 s" in str(outcome)
    assert 0.2 <= time.monotonic() - started < 30
    assert handle.responses[0].cancelled


def test_retries_count_against_the_deadline() -> None:
    handle = Handle(*[ActorDiedError()] * 10_000)
    started = time.monotonic()
    (outcome,) = run(client_of(handle, deadline_s=0.4, sleep=asyncio.sleep), ask("a"))
    assert isinstance(outcome, GenerationFailedError)
    assert "attempts; the last error" in str(outcome)
    assert time.monotonic() - started < 30


def test_cancelling_one_of_several_requests_leaves_the_others() -> None:
    handle = Handle()
    client = client_of(handle, homes=[0])

    async def one_of_three() -> list[Any]:
        tasks = [asyncio.ensure_future(client.generate(ask(str(k)))) for k in range(3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    outcomes = asyncio.run(one_of_three())
    assert [type(outcome).__name__ for outcome in outcomes] == ["Completion", "CancelledError", "Completion"]
    assert not handle.responses[0].cancelled


@pytest.mark.parametrize(
    "outcome", [KeyError("a bug"), OSError("the object store is gone"), []], ids=["bug", "lost", "too few answers"]
)
def test_whatever_goes_wrong_reaches_everyone_who_waits(outcome: Any) -> None:
    """Nobody may wait for an answer that cannot come any more."""
    outcomes = run(client_of(Handle(outcome), homes=[0]), ask("a"), ask("b"), patience_s=1.0)
    assert all(isinstance(result, Exception) for result in outcomes)
    assert not any(isinstance(result, asyncio.CancelledError) for result in outcomes)


def test_a_call_that_fails_fails_its_own_requests_only() -> None:
    handle = Handle(task_error(EngineError("no")))
    outcomes = run(client_of(handle), *(ask(str(k)) for k in range(6)))
    assert sum(isinstance(outcome, GenerationFailedError) for outcome in outcomes) == 3
    assert sum(isinstance(outcome, Completion) for outcome in outcomes) == 3


@in_loop
async def test_cancelling_a_request_cancels_its_response() -> None:
    handle = Handle(FOREVER)
    task = asyncio.ensure_future(client_of(handle, coalesce=False).generate(ask("a")))
    await until(lambda: len(handle.responses) == 1)
    task.cancel()
    await until(lambda: handle.responses[0].cancelled)
    assert task.cancelled()


# --- Which replicas the env runners call home


@pytest.mark.parametrize("callers", range(1, 9))
@pytest.mark.parametrize("replicas", range(1, 9))
def test_every_replica_is_a_home_and_the_load_is_even(callers: int, replicas: int) -> None:
    of_callers = [list(homes(OWN, caller, callers, ServingSection(num_replicas=replicas))) for caller in range(callers)]
    assert all(of_callers)  # nobody is without
    seen = [place for places in of_callers for place in places]
    counts = [seen.count(place) for place in range(replicas)]
    assert max(counts) - min(counts) <= 1
    if callers <= replicas:
        assert counts == [1] * replicas


@pytest.mark.parametrize("callers", [1, 2, 3])
@pytest.mark.parametrize("running", range(1, 5))
def test_replicas_that_autoscaling_adds_get_their_part_of_the_requests(callers: int, running: int) -> None:
    """The router sends a home's requests to the replica at that place, modulo the replicas that run."""
    serving = ServingSection(num_replicas=1, autoscaling=AutoscalingSection(max_replicas=4))
    candidates = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=f"replica{k}")) for k in range(running)]
    state: Any = SimpleNamespace(_turn=itertools.count(), replica_queue_len_cache=SimpleNamespace(get=lambda _: 0))

    def first_choice(place: int) -> str:
        request: Any = SimpleNamespace(
            routing_context=SimpleNamespace(), metadata=SimpleNamespace(session_id=home_session(place))
        )
        ranked = asyncio.run(AffinityRouter.choose_replicas(state, candidates, request))  # type: ignore[arg-type]
        return ranked[0][0].replica_id.unique_id

    places = [place for caller in range(callers) for place in homes(OWN, caller, callers, serving)]
    assert {first_choice(place) for place in places} == {replica.replica_id.unique_id for replica in candidates}


# --- The Serve application as the backend of the HTTP side, with a registry that answers late, fails, or is restarted


class Registry:
    """Answers once it is let; `replies` are versions, or errors."""

    def __init__(self, *replies: int | Exception) -> None:
        self.replies, self.asked = list(replies), 0
        self.free = asyncio.Event()

    async def status(self) -> dict[str, Any]:
        self.asked += 1
        await self.free.wait()
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, Exception):
            raise reply
        return {"policies": {"policy": {"version": reply, "folder": ""}}, "reports": {}, "replicas": ["r"]}


def backend_of(registry: Registry, keeps_base: bool = True) -> ServeBackend:
    return ServeBackend(SimpleNamespace(), registry, "tiny", run_id="run", deadline_s=10.0, keeps_base=keeps_base)


async def names(backend: ServeBackend) -> list[str]:
    return [*await backend.models()]


@in_loop
async def test_the_first_requests_all_wait_for_the_registry() -> None:
    registry = Registry(3)
    backend = backend_of(registry)
    waiting = [asyncio.create_task(names(backend)) for _ in range(4)]
    await asyncio.sleep(0)
    waiting[0].cancel()  # a client that goes away does not take the answer from the others
    await asyncio.sleep(0)
    registry.free.set()
    assert await asyncio.gather(*waiting[1:]) == [["policy", "policy-v3", "tiny"]] * 3
    assert registry.asked <= 2


@in_loop
async def test_without_an_answer_nothing_is_served_in_place_of_the_adapter() -> None:
    registry = Registry(RayActorError(), 2)
    registry.free.set()
    backend = backend_of(registry)
    with pytest.raises(GenerationFailedError):
        await backend.models()
    await asyncio.sleep(module._REFRESH_S + 0.1)
    assert await names(backend) == ["policy", "policy-v2", "tiny"]


@in_loop
async def test_while_a_registry_is_restarted_the_last_answer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REFRESH_S", 0.0)

    registry = Registry(2, RayActorError(), 3)
    registry.free.set()
    backend = backend_of(registry)
    found = [(await names(backend))[1] for _ in range(3)]
    assert found == ["policy-v2", "policy-v2", "policy-v3"]


@in_loop
async def test_names_of_adapters_never_stand_for_the_models_own() -> None:
    registry = Registry(3)
    registry.free.set()
    status = await registry.status()
    for name, version in (("tiny", 5), ("a", 4), ("a-v4", 6), ("late", 0)):
        status["policies"][name] = {"version": version, "folder": "f"}
    backend = backend_of(SimpleNamespace(status=answering(status)))  # type: ignore[arg-type]
    found = {name: (one.policy, one.version, one.exact) for name, one in (await backend.models()).items()}
    assert found == {
        "policy": ("policy", 3, False), "policy-v3": ("policy", 3, True), "tiny": ("policy", -1, False),
        "tiny-v5": ("tiny", 5, True), "a-v4": ("a-v4", 6, False), "a-v4-v6": ("a-v4", 6, True), "a": ("a", 4, False),
    }  # fmt: skip


def answering(reply: Any) -> Any:
    async def answer() -> Any:
        return reply

    return answer


@in_loop
async def test_many_probes_ask_the_registry_once() -> None:
    registry = Registry(3)
    registry.free.set()
    backend = backend_of(registry)
    await asyncio.gather(*(backend.health() for _ in range(40)))
    assert registry.asked == 1
    backend._known |= {"reports": {"r": {"state": ReplicaState.SUSPECT}}}
    with pytest.raises(GenerationFailedError):
        await backend.health()
    backend._known |= {"replicas": []}
    with pytest.raises(GenerationFailedError):
        await backend.health()
