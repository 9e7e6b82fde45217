"""Requests, publications and kills at the same time: nothing is lost, nothing is answered by old weights."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from core_support import plain_model, reference_logprobs
from ray import serve
from ray.serve.schema import ReplicaState
from serving_support import RUN_ID, Adapters, ask, client, replicas, served

from rl_vlm.models.loading import resolve_model
from rl_vlm.models.lora import inject_lora, load_lora_state, lora_config
from rl_vlm.serving.registry import app_name
from rl_vlm.types import Completion


@dataclass
class Drill:
    """What happened."""

    answers: list[tuple[int, Completion]] = field(default_factory=list)  # the version that was asked for, the answer
    errors: list[BaseException] = field(default_factory=list)
    kills: list[float] = field(default_factory=list)
    retries: list[float] = field(default_factory=list)
    published: int = 0


def all_healthy(count: int = 2) -> bool:
    application = serve.status().applications[app_name(RUN_ID)]
    counts = application.deployments["policy"].replica_states
    return counts.get(ReplicaState.RUNNING, 0) == count and sum(counts.values()) == count


async def run_drill(
    service: Any, adapters: Adapters, folder: Path, requests: int, kills: int, pace_s: float, count: int = 2
) -> Drill:
    drill = Drill()
    done = asyncio.Event()

    async def pause(seconds: float) -> None:
        drill.retries.append(time.monotonic())
        await asyncio.sleep(seconds)

    policy_client = client(deadline_s=120.0, sleep=pause, homes=range(count))

    async def publish() -> None:
        while not done.is_set():
            payload = await asyncio.to_thread(adapters.payload, drill.published + 1)
            await asyncio.to_thread(service.publish, payload)
            drill.published += 1
            await asyncio.sleep(pace_s)

    async def kill() -> None:
        while not done.is_set() and len(drill.kills) < kills:
            await asyncio.sleep(1.0)
            if await asyncio.to_thread(all_healthy, count) and len(found := replicas()) == count:
                drill.kills.append(time.monotonic())
                found[len(drill.kills) % count].kill()
        if len(drill.kills) >= kills:
            done.set()

    async def send(first: int) -> None:
        number = first
        # Go on until all requests are sent and all kills have happened.
        while number < requests or not done.is_set():
            asked = drill.published
            request = ask(folder, f"Number {number}", f"r{number}", min_version=asked, temperature=1.0, seeds=(number,))
            try:
                drill.answers.append((asked, await policy_client.generate(request)))
            except Exception as error:
                drill.errors.append(error)
            number += 32

    helpers = [asyncio.ensure_future(publish()), asyncio.ensure_future(kill())]
    await asyncio.gather(*(send(first) for first in range(32)))
    done.set()
    await asyncio.gather(*helpers)
    return drill


def check(drill: Drill, requests: int, kills: int, folder: Path, adapters: Adapters, tolerance: float = 1e-4) -> None:
    assert drill.errors == []
    assert len(drill.answers) >= requests
    assert len({answer.request_id for _, answer in drill.answers}) == len(drill.answers)
    assert all(asked <= answer.policy_version <= drill.published for asked, answer in drill.answers)
    assert len(drill.kills) >= kills
    # A kill costs the requests inside that replica, at most all that are in flight, each of them a few attempts.
    assert all(any(0 <= retry - kill < 5 for kill in drill.kills) for retry in drill.retries)
    assert len(drill.retries) <= 4 * 32 * len(drill.kills)
    # What a sample says about its version is true: these weights give its tokens these probabilities.
    rng = np.random.default_rng(0)
    for place in rng.choice(len(drill.answers), 20, replace=False):
        answer = drill.answers[place][1]
        sample = answer.samples[0]
        hf = plain_model(folder)
        inject_lora(hf, lora_config(16, 32, "all"))
        load_lora_state(hf, adapters.payload(answer.policy_version).state())
        ids = np.concatenate([answer.prompt_ids, sample.token_ids])
        wanted = reference_logprobs(folder, hf, ids, (), 1.0).detach().numpy()[len(answer.prompt_ids) - 1 :]
        assert np.abs(wanted - sample.logprobs).max() < tolerance


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
@pytest.mark.parametrize("requests", [int(os.environ.get("RL_VLM_DRILL_REQUESTS", "10000"))])
def test_ten_thousand_requests_survive_kills_and_publications(
    tiny_folder: Path, tmp_path: Path, requests: int, count: int
) -> None:
    with served(tiny_folder, serving__num_replicas=count) as (run, service):
        adapters = Adapters(run, tiny_folder)
        drill = asyncio.run(run_drill(service, adapters, tiny_folder, requests, 5, 1.0, count))
    assert not ray.is_initialized()
    print(
        f"{len(drill.answers)} answers, {drill.published} versions, {len(drill.kills)} kills, {len(drill.retries)} retries, "
        f"by replica {Counter(answer.replica_id for _, answer in drill.answers)}"
    )
    check(drill, requests, 5, tiny_folder, adapters)


@pytest.mark.acceptance
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("tokens", [int(os.environ.get("RL_VLM_DRILL_TOKENS", "1000"))])
def test_a_replica_with_hours_of_work_is_not_taken_for_dead(tmp_path: Path, tokens: int) -> None:
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
def test_a_wedged_engine_core_is_found_and_replaced(tmp_path: Path) -> None:
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
