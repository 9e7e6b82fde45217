"""Load makes replicas grow and shrink; a new one serves the newest adapter from its first request."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from ray import serve
from ray.serve.schema import ReplicaState
from serving_support import RUN_ID, Adapters, ask, client, served, until

from rl_vlm.serving.registry import app_name

AUTOSCALING = {
    "min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2.0, "upscale_delay_s": 1.0, "downscale_delay_s": 3.0
}  # fmt: skip


def running() -> int:
    deployment = serve.status().applications[app_name(RUN_ID)].deployments["policy"]
    return deployment.replica_states.get(ReplicaState.RUNNING, 0)


@pytest.mark.acceptance
@pytest.mark.timeout(600)
def test_replicas_follow_the_load(tiny_folder: Path) -> None:
    settings: dict[str, Any] = {"serving__num_replicas": 1, "serving__autoscaling": AUTOSCALING}
    with served(tiny_folder, **settings) as (run, service):
        adapters = Adapters(run, tiny_folder)
        for version in (1, 2, 3):
            service.publish(adapters.payload(version))
        answers: list[Any] = []
        errors: list[BaseException] = []

        async def load() -> None:
            stop = asyncio.Event()
            policy_client = client(homes=[0])

            async def call(number: int) -> None:
                while not stop.is_set():
                    # Version 0 is allowed: it is the replica that must not answer before it has the newest.
                    request = ask(tiny_folder, "hello", str(number), n=16, max_new_tokens=200, temperature=1.0)
                    try:
                        answers.append(await policy_client.generate(request))
                    except Exception as error:
                        errors.append(error)

            callers = [asyncio.ensure_future(call(k)) for k in range(12)]
            await until(lambda: asyncio.to_thread(lambda: running() == 2), 120)
            await until(lambda: len({answer.replica_id for answer in answers}) == 2, 60)
            stop.set()
            await asyncio.gather(*callers)
            await until(lambda: asyncio.to_thread(lambda: running() == 1), 120)
            answers.append(await policy_client.generate(ask(tiny_folder, "still there?", min_version=3)))

        asyncio.run(load())
        assert errors == []
        assert len({answer.replica_id for answer in answers}) == 2
        assert {answer.policy_version for answer in answers} == {3}
