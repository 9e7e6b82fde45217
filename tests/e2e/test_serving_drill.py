"""Requests, publications and kills at the same time, of one policy and of eight on shared replicas: nothing is lost, and nothing is answered
by old weights or by those of another policy."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
from core_support import gap, plain_model
from ray import serve
from ray.serve.schema import ReplicaState
from serving_support import RUN_ID, Adapters, ask, client, replicas, served
from shared_support import NAME, PolicyAdapters, client_of, registry, sharing, user

from rl_vlm.models.loading import resolve_model
from rl_vlm.models.lora import inject_lora, load_lora_state, lora_config
from rl_vlm.models.weights import AdapterPayload
from rl_vlm.serving.client import PolicyClient
from rl_vlm.serving.registry import app_name, shared_id
from rl_vlm.serving.service import PolicyService
from rl_vlm.types import Completion

REQUESTS = int(os.environ.get("RL_VLM_DRILL_REQUESTS", "10000"))
SENDERS = 32
POLICIES = 8
MakePayload = Callable[[int, int], AdapterPayload]  # of a policy's number and a version


@dataclass
class Drill:
    """What happened: per answer the policy and the version that were asked for."""

    policies: int = 1
    answers: list[tuple[int, int, Completion]] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    kills: list[float] = field(default_factory=list)
    retries: list[float] = field(default_factory=list)
    published: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.published = [0] * self.policies

    async def pause(self, seconds: float) -> None:
        """What a client does before it tries again."""
        self.retries.append(time.monotonic())
        await asyncio.sleep(seconds)

    async def ask(self, policy_client: PolicyClient, folder: Path, policy: int, number: int) -> None:
        """Ask for the newest version that is published."""
        asked, name = self.published[policy], f"p{policy} r{number}"
        request = ask(folder, f"Number {number}", name, min_version=asked, temperature=1.0, seeds=(number,))
        try:
            self.answers.append((policy, asked, await policy_client.generate(request)))
        except Exception as error:
            self.errors.append(error)

    def check(self, requests: int, kills: int) -> None:
        """Every request has one answer, of a version that was there."""
        assert self.errors == []
        assert len(self.answers) >= requests
        assert len({answer.request_id for _, _, answer in self.answers}) == len(self.answers)
        assert all(asked <= answer.policy_version <= self.published[p] for p, asked, answer in self.answers)
        assert len(self.kills) >= kills


def all_healthy(count: int = 2, run_id: str = RUN_ID) -> bool:
    counts = serve.status().applications[app_name(run_id)].deployments["policy"].replica_states
    return counts.get(ReplicaState.RUNNING, 0) == count and sum(counts.values()) == count


async def run_drill(
    drill: Drill,
    services: Sequence[PolicyService],
    clients: Sequence[PolicyClient],
    make: MakePayload,
    folder: Path,
    kills: int,
    count: int = 2,
    run_id: str = RUN_ID,
    pace_s: float = 1.0,
) -> Drill:
    """Ask and publish while one of `count` replicas after another is killed; where policies share them, each third time the registry."""
    done, making = asyncio.Event(), asyncio.Lock()
    senders = SENDERS // drill.policies

    async def publish(policy: int) -> None:
        while not done.is_set():
            async with making:  # the adapters are made by one model
                payload = await asyncio.to_thread(make, policy, drill.published[policy] + 1)
            await asyncio.to_thread(services[policy].publish, payload)
            drill.published[policy] += 1
            await asyncio.sleep(pace_s)

    async def kill() -> None:
        while not done.is_set() and len(drill.kills) < kills:
            await asyncio.sleep(1.0)
            if await asyncio.to_thread(all_healthy, count, run_id) and len(found := replicas()) == count:
                if drill.policies > 1 and len(drill.kills) % 3 == 2:
                    ray.kill(registry(), no_restart=False)
                else:
                    found[len(drill.kills) % count].kill()
                drill.kills.append(time.monotonic())
        if len(drill.kills) >= kills:
            done.set()

    async def send(policy: int, number: int) -> None:
        # Go on until all requests are sent and all kills have happened.
        while number < REQUESTS // drill.policies or not done.is_set():
            await drill.ask(clients[policy], folder, policy, number)
            number += senders

    policies = range(drill.policies)
    helpers = [asyncio.ensure_future(kill()), *(asyncio.ensure_future(publish(policy)) for policy in policies)]
    await asyncio.gather(*(send(policy, first) for policy in policies for first in range(senders)))
    done.set()
    await asyncio.gather(*helpers)
    return drill


def distances(
    answers: Sequence[tuple[int, int, Completion]], folder: Path, make: MakePayload, policies: int
) -> tuple[float, float]:
    """The largest distance of an answer's log-probabilities from those of its policy's version, and the least from another policy's."""
    hf, sampled = plain_model(folder), ask(folder, "", temperature=1.0)  # without images, as all were
    inject_lora(hf, lora_config(16, 32, "all"))
    by_version: dict[tuple[int, int], list[Completion]] = {}
    for policy, _, answer in answers:
        by_version.setdefault((policy, answer.policy_version), []).append(answer)
    worst, nearest = 0.0, float("inf")
    for (policy, version), found in by_version.items():
        if not version:
            continue
        load_lora_state(hf, make(policy, version).state())
        worst = max(worst, *(gap(folder, hf, sampled, answer) for answer in found))
        if policies > 1:
            load_lora_state(hf, make((policy + 1) % policies, version).state())
            nearest = min(nearest, gap(folder, hf, sampled, found[0]))
    return worst, nearest


@pytest.fixture
def processes() -> Iterator[None]:
    """Nothing is left of what a test starts."""
    yield
    time.sleep(2)
    left = [p.name() for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    assert not [name for name in left if name.startswith("ray::")], left


@pytest.mark.acceptance
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("count", [2, 4])
def test_ten_thousand_requests_survive_kills_and_publications(tiny_folder: Path, count: int) -> None:
    drill = Drill()
    with served(tiny_folder, serving__num_replicas=count) as (run, service):
        adapters = Adapters(run, tiny_folder)
        clients = [client(deadline_s=120.0, sleep=drill.pause, homes=range(count))]
        make: MakePayload = lambda policy, version: adapters.payload(version)  # noqa: E731
        asyncio.run(run_drill(drill, [service], clients, make, tiny_folder, kills=5, count=count))
    assert not ray.is_initialized()
    print(
        f"{len(drill.answers)} answers, {drill.published} versions, {len(drill.kills)} kills, {len(drill.retries)} retries, "
        f"by replica {Counter(answer.replica_id for _, _, answer in drill.answers)}"
    )
    drill.check(REQUESTS, 5)
    # A kill costs the requests inside that replica, at most all that are in flight, each of them a few attempts.
    assert all(any(0 <= retry - kill < 5 for kill in drill.kills) for retry in drill.retries)
    assert len(drill.retries) <= 4 * SENDERS * len(drill.kills)
    # What a sample says about its version is true: these weights give its tokens these probabilities.
    chosen = np.random.default_rng(0).choice(len(drill.answers), 20, replace=False)
    assert distances([drill.answers[place] for place in chosen], tiny_folder, make, 1)[0] < 1e-4


@pytest.mark.acceptance
@pytest.mark.timeout(3000)
def test_ten_thousand_requests_of_eight_policies_survive_kills(tiny_folder: Path) -> None:
    drill, started = Drill(POLICIES), time.monotonic()
    with sharing(tiny_folder, serving__num_replicas=2) as run:
        adapters = PolicyAdapters(run, tiny_folder)
        with ExitStack() as stack:
            services = [stack.enter_context(user(run, f"policy-{number}", tiny_folder)) for number in range(POLICIES)]
            clients = [client_of(service, deadline_s=180.0, sleep=drill.pause) for service in services]
            shared = {"run_id": shared_id(NAME), "pace_s": 2.0}
            asyncio.run(run_drill(drill, services, clients, adapters.payload, tiny_folder, kills=6, **shared))
    taken = time.monotonic() - started
    worst, nearest = distances(drill.answers, tiny_folder, adapters.payload, POLICIES)
    print(
        f"{len(drill.answers)} answers in {taken:.0f} s, versions {drill.published}, {len(drill.kills)} kills, "
        f"nearest other policy {nearest:.2f}, by replica {Counter(answer.replica_id for _, _, answer in drill.answers)}"
    )
    drill.check(REQUESTS, 6)
    assert all(answer.policy == f"policy-{policy}" for policy, _, answer in drill.answers)
    assert worst <= 1e-3 and nearest > 0.1  # the check can tell policies apart


@pytest.mark.acceptance
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("tokens", [int(os.environ.get("RL_VLM_DRILL_TOKENS", "1000"))])
def test_a_replica_with_hours_of_work_is_not_taken_for_dead(tokens: int) -> None:
    """512 samples, half of which wait: none ends for a long time, and no probe would be answered before they do."""
    folder = resolve_model("tiny-wide")
    settings = {"serving__engine": "vllm", "serving__num_replicas": 1, "serving__max_context": tokens + 64}
    probes = {"serving__probe_after_s": 1.0, "serving__probe_timeout_s": 5.0}
    with served(folder, **settings, **probes):
        requests = [ask(folder, "go on", str(k), n=64, max_new_tokens=tokens, ignore_eos=True) for k in range(8)]

        async def send() -> list[Completion]:
            policy_client = client(homes=[0], deadline_s=1500.0)
            return await asyncio.gather(*map(policy_client.generate, requests))

        started, before = time.monotonic(), [process.pid for process in replicas()]
        answers = asyncio.run(send())
        print(f"{512 * tokens} tokens in {time.monotonic() - started:.0f} s")
        assert [process.pid for process in replicas()] == before
    assert {len(sample.token_ids) for answer in answers for sample in answer.samples} == {tokens}
    assert len({answer.replica_id for answer in answers}) == 1


@pytest.mark.acceptance
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("processes")
def test_a_wedged_engine_core_is_found_and_replaced() -> None:
    """vLLM computes in a child process, which stops here; the replica itself goes on to answer everything else."""
    folder = resolve_model("tiny-wide")
    settings = {"serving__engine": "vllm", "serving__num_replicas": 1, "serving__probe_after_s": 2.0}
    with served(folder, serving__probe_timeout_s=4.0, **settings):
        request = ask(folder, "hello")
        before = asyncio.run(client(homes=[0]).generate(request))
        (replica,) = replicas()
        cores = [child for child in replica.children(recursive=True) if "EngineCore" in child.name()]
        assert len(cores) == 1
        cores[0].suspend()
        started = time.monotonic()
        after = asyncio.run(client(homes=[0], deadline_s=400.0).generate(request))
        print(f"answered by a new replica after {time.monotonic() - started:.0f} s")
        assert after.replica_id != before.replica_id
        assert after.samples[0].token_ids.tolist() == before.samples[0].token_ids.tolist()
        gone, left = psutil.wait_procs([replica, *cores], timeout=10)
        assert left == [], gone
