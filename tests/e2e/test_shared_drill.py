"""Requests of eight policies, publications, kills of replicas and of the registry at the same time: nothing is lost, nothing is answered by
another policy's weights or by old ones."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from core_support import plain_model, reference_logprobs
from ray import serve
from ray.serve.schema import ReplicaState
from serving_support import ask, replicas
from shared_support import NAME, PolicyAdapters, client_of, registry, sharing, user

from rl_vlm.models.lora import inject_lora, load_lora_state, lora_config
from rl_vlm.serving.registry import app_name, shared_id
from rl_vlm.serving.service import PolicyService
from rl_vlm.types import Completion

POLICIES = 8
SENDERS = 4  # of each policy


@dataclass
class Drill:
    """What happened: per answer the policy and version that were asked for."""

    answers: list[tuple[int, int, Completion]] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    published: list[int] = field(default_factory=lambda: [0] * POLICIES)
    kills: Counter[str] = field(default_factory=Counter)


def all_healthy() -> bool:
    counts = serve.status().applications[app_name(shared_id(NAME))].deployments["policy"].replica_states
    return counts.get(ReplicaState.RUNNING, 0) == 2 and sum(counts.values()) == 2


async def run_drill(
    services: list[PolicyService], adapters: PolicyAdapters, folder: Path, requests: int, kills: int
) -> Drill:
    drill, done, chosen = Drill(), asyncio.Event(), random.Random(0)
    clients = [client_of(service, deadline_s=180.0) for service in services]
    making = asyncio.Lock()

    async def publish(policy: int) -> None:
        while not done.is_set():
            async with making:  # the adapters are made by one model
                payload = await asyncio.to_thread(adapters.payload, policy, drill.published[policy] + 1)
            await asyncio.to_thread(services[policy].publish, payload)
            drill.published[policy] += 1
            await asyncio.sleep(2.0)

    async def kill() -> None:
        while not done.is_set() and sum(drill.kills.values()) < kills:
            await asyncio.sleep(1.0)
            if not (await asyncio.to_thread(all_healthy) and len(found := replicas()) == 2):
                continue
            if sum(drill.kills.values()) % 3 == 2:
                ray.kill(registry(), no_restart=False)
                drill.kills["registry"] += 1
            else:
                chosen.choice(found).kill()
                drill.kills["replica"] += 1
        if sum(drill.kills.values()) >= kills:
            done.set()

    async def send(policy: int, first: int) -> None:
        number = first
        while number < requests // POLICIES or not done.is_set():
            asked = drill.published[policy]
            one = ask(
                folder, f"Number {number}", f"p{policy} r{number}", min_version=asked, temperature=1.0, seeds=(number,)
            )
            try:
                drill.answers.append((policy, asked, await clients[policy].generate(one)))
            except Exception as error:
                drill.errors.append(error)
            number += SENDERS

    helpers = [asyncio.ensure_future(publish(policy)) for policy in range(POLICIES)] + [asyncio.ensure_future(kill())]
    await asyncio.gather(*(send(policy, first) for policy in range(POLICIES) for first in range(SENDERS)))
    done.set()
    await asyncio.gather(*helpers)
    return drill


def wrong(drill: Drill, folder: Path, adapters: PolicyAdapters) -> tuple[int, float]:
    """How many answers are not as likely under their policy's version as they say; and the least distance that another policy gave.

    Answers are grouped by version, so that each adapter is made once; all of them are checked.
    """
    hf = plain_model(folder)
    inject_lora(hf, lora_config(16, 32, "all"))
    by_version: dict[tuple[int, int], list[Completion]] = {}
    for policy, _, answer in drill.answers:
        by_version.setdefault((policy, answer.policy_version), []).append(answer)
    bad, nearest = 0, float("inf")
    for (policy, version), answers in by_version.items():
        for other in (False, True):
            if version:
                load_lora_state(hf, adapters.payload((policy + other) % POLICIES, version).state())
            for answer in answers if not other else answers[:1]:
                sample = answer.samples[0]
                ids = np.concatenate([answer.prompt_ids, sample.token_ids])
                found = reference_logprobs(folder, hf, ids, (), 1.0).detach().numpy()[len(answer.prompt_ids) - 1 :]
                distance = float(np.abs(found - sample.logprobs).max())
                if other and version:
                    nearest = min(nearest, distance)
                elif not other and version:
                    bad += distance > 1e-3
    return bad, nearest


@pytest.mark.acceptance
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("requests", [int(os.environ.get("RL_VLM_DRILL_REQUESTS", "10000"))])
def test_ten_thousand_requests_of_eight_policies_survive_kills(
    tiny_folder: Path, tmp_path: Path, requests: int
) -> None:
    kills = 6
    started = time.monotonic()
    with sharing(tiny_folder, serving__num_replicas=2) as run:
        adapters = PolicyAdapters(run, tiny_folder)
        with ExitStack() as stack:
            services = [stack.enter_context(user(run, f"policy-{number}", tiny_folder)) for number in range(POLICIES)]
            drill: Any = asyncio.run(run_drill(services, adapters, tiny_folder, requests, kills))
    taken = time.monotonic() - started
    bad, nearest = wrong(drill, tiny_folder, adapters)
    print(
        f"{len(drill.answers)} answers in {taken:.0f} s, versions {drill.published}, kills {dict(drill.kills)}, {bad} wrong, "
        f"nearest other policy {nearest:.2f}, by replica {Counter(answer.replica_id for _, _, answer in drill.answers)}"
    )
    assert drill.errors == []
    assert len(drill.answers) >= requests and len({a.request_id for _, _, a in drill.answers}) == len(drill.answers)
    assert all(answer.policy == f"policy-{policy}" for policy, _, answer in drill.answers)
    assert all(asked <= answer.policy_version <= drill.published[p] for p, asked, answer in drill.answers)
    assert sum(drill.kills.values()) >= kills and bad == 0
    assert nearest > 0.1  # the check can tell policies apart
