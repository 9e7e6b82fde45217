"""Versions of all weights, requests and kills at the same time: no answer comes from weights that are half of one version."""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_support import gap
from full_support import FullWeightsOf
from serving_support import ask, client, replicas, served
from test_serving_drill import Drill, all_healthy

from rl_vlm.models.loading import resolve_model
from rl_vlm.types import Completion, GenerationRequest

VERSIONS = int(os.environ.get("RL_VLM_DRILL_VERSIONS", "500"))
CLIENTS = 16
PER_VERSION = 8  # answers that are compared with plain transformers


async def run_full_drill(service: Any, weights: FullWeightsOf, folder: Path, kills: int, pace_s: float) -> Drill:
    """Publish VERSIONS versions; at each of `kills` of them a replica is killed while it fetches or loads it."""
    drill, done = Drill(), asyncio.Event()
    rng = np.random.default_rng(0)
    due = sorted(rng.choice(np.arange(5, VERSIONS - 5), kills, replace=False).tolist())

    policy_client = client(deadline_s=300.0, sleep=drill.pause)

    async def publish() -> None:
        while drill.published[0] < VERSIONS:
            payload = await asyncio.to_thread(weights.payload, drill.published[0] + 1)
            kill = bool(due) and drill.published[0] + 1 >= due[0] and await asyncio.to_thread(all_replicas_run)
            publishing = asyncio.create_task(asyncio.to_thread(service.publish, payload))
            if kill:
                due.pop(0)
                await asyncio.sleep(float(rng.uniform(0, 0.03)))
                found = replicas()
                found[len(drill.kills) % len(found)].kill()
                drill.kills.append(time.monotonic())
            await publishing
            drill.published[0] += 1
            if drill.published[0] == VERSIONS - 1:  # kills that were due while a replica started
                while due:
                    await asyncio.sleep(0.2)
                    if await asyncio.to_thread(all_replicas_run):
                        break
            await asyncio.sleep(pace_s)
        done.set()

    async def send(number: int) -> None:
        while not done.is_set():
            await drill.ask(policy_client, folder, 0, number)
            number += CLIENTS

    await asyncio.gather(publish(), *(send(first) for first in range(CLIENTS)))
    # The newest version is there on every replica, also on those that were started again.
    for k in range(8):
        last = ask(folder, "last", f"last{k}", min_version=VERSIONS)
        drill.answers.append((0, VERSIONS, await policy_client.generate(last)))
    return drill


def all_replicas_run() -> bool:
    """Whether both replicas are healthy and their processes are there: Serve learns of a kill a moment later."""
    return all_healthy() and len(replicas()) == 2


def check(drill: Drill, weights: FullWeightsOf, folder: Path) -> float:
    """Answers of every version are what its weights give; returns the largest difference."""
    assert drill.errors == []
    assert all(asked <= answer.policy_version <= VERSIONS for _, asked, answer in drill.answers)
    by_version: dict[int, list[Completion]] = defaultdict(list)
    for *_, answer in drill.answers:
        by_version[answer.policy_version].append(answer)
    largest, apart = 0.0, []
    for version, answers in by_version.items():
        if version == 0:
            continue
        model = weights.under(version)
        for answer in answers[
            :: max(len(answers) // PER_VERSION, 1)
        ]:  # in the order in which they came, the last ones too
            largest = max(largest, gap(folder, model, _request(folder, answer), answer))
        other = weights.under(version % VERSIONS + 1)
        apart.append(gap(folder, other, _request(folder, answers[0]), answers[0]))
    assert min(apart) > 1e-3  # the next version would have been told apart
    assert largest < 1e-4
    return largest


def _request(folder: Path, answer: Completion) -> GenerationRequest:
    greedy = answer.request_id.startswith("last")
    return ask(folder, "", answer.request_id, temperature=0.0 if greedy else 1.0)


@pytest.mark.acceptance
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("engine", "kills"), [("transformers", 8), ("vllm", 3)])
def test_replicas_killed_in_mid_transfer_come_back_at_the_newest_version(
    engine: str, kills: int, tiny_folder: Path
) -> None:
    folder = tiny_folder if engine == "transformers" else resolve_model("tiny-wide")
    weights = FullWeightsOf(folder)
    with served(folder, model__train="full", serving__engine=engine) as (_, service):
        started = time.monotonic()
        drill = asyncio.run(run_full_drill(service, weights, folder, kills, 0.02))
        took = time.monotonic() - started
        assert service.newest_version() == VERSIONS
    named = len({answer.policy_version for *_, answer in drill.answers})
    print(
        f"{engine}: {VERSIONS} versions, {len(drill.kills)} kills, {len(drill.answers)} answers of {named} versions, "
        f"{len(drill.retries)} retries, {took:.0f} s"
    )
    assert len(drill.kills) >= min(kills, 2)
    print(f"largest difference of an answer from the weights that it names: {check(drill, weights, folder):.1e} nats")
