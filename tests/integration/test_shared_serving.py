"""Replicas that several runs share, on Ray Serve: policies, and users that come, crash and go."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve
from serving_support import ask, until
from shared_support import NAME, PolicyAdapters, client_of, registry, sharing, status, user

from rl_vlm.config import PolicyConfig
from rl_vlm.engines.base import BASE_MODEL
from rl_vlm.models.reference import ModelReference
from rl_vlm.serving.registry import app_name, shared_id
from rl_vlm.serving.service import PolicyService
from rl_vlm.types import Completion, UserInputError

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def run(tiny_folder: Path) -> Iterator[PolicyConfig]:
    with sharing(tiny_folder, serving__sharing__lease_s=6.0) as run, user(run, "keeps-it-up", tiny_folder):
        yield run


@pytest.fixture(scope="module")
def adapters(run: PolicyConfig, tiny_folder: Path) -> PolicyAdapters:
    return PolicyAdapters(run, tiny_folder)


def answers(service: PolicyService, *requests: Any) -> list[Completion]:
    async def gather() -> list[Completion]:
        client = client_of(service)
        return await asyncio.gather(*map(client.generate, requests))

    return asyncio.run(gather())


def test_policies_answer_with_their_own_weights(run: PolicyConfig, adapters: PolicyAdapters, tiny_folder: Path) -> None:
    asked = [ask(tiny_folder, "hello", str(k), max_new_tokens=8) for k in range(2)]
    with user(run, "a", tiny_folder) as a, user(run, "b", tiny_folder) as b:
        said: dict[tuple[str, int], list[int]] = {}
        for version in (1, 2):
            for number, service in enumerate((a, b)):
                service.publish(adapters.payload(number, version))
                for answer in answers(service, *(replace(one, min_version=version) for one in asked)):
                    assert (answer.policy, answer.policy_version) == (service.key.policy, version)
                    said[service.key.policy, version] = answer.samples[0].token_ids.tolist()
        assert len({tuple(tokens) for tokens in said.values()}) == 4  # no two alike
        base = [
            answers(one, replace(asked[0], min_version=BASE_MODEL))[0].samples[0].token_ids.tolist() for one in (a, b)
        ]
        assert base[0] == base[1] not in said.values()

    assert {"a", "b"}.isdisjoint(status()["policies"])


def test_a_run_that_does_not_fit_is_refused_before_it_starts_anything(run: PolicyConfig, tiny_folder: Path) -> None:
    other = run.model_copy(
        update={
            "model": run.model.model_copy(update={"dtype": "bfloat16"}),
            "serving": run.serving.model_copy(update={"max_context": 1024}),
        }
    )
    with pytest.raises(UserInputError, match="serving.max_context"):
        PolicyService(other, "does-not-fit", ModelReference.of(str(tiny_folder)))
    assert "does-not-fit" not in status()["policies"]


def test_a_registry_that_is_killed_comes_back_with_its_policies(
    run: PolicyConfig, adapters: PolicyAdapters, tiny_folder: Path
) -> None:
    with user(run, "survivor", tiny_folder) as service:
        service.publish(adapters.payload(0, 1))
        ray.kill(registry(), no_restart=False)
        service.publish(adapters.payload(0, 2))
        (before,) = answers(service, ask(tiny_folder, "hello", min_version=2))
        assert before.policy_version == 2
        ray.kill(registry(), no_restart=False)
        (answer,) = answers(service, ask(tiny_folder, "hello", min_version=2))  # replicas keep what they have
        assert (answer.policy_version, answer.replica_id) == (2, before.replica_id)
        asyncio.run(until(lambda: _version_of("survivor") == 2, 60))


def _version_of(policy: str) -> int:
    try:
        return int(status()["policies"][policy]["version"])
    except (ray.exceptions.RayError, ValueError, KeyError):
        return -1


CRASHES = """
import sys, time
import ray
from rl_vlm.config import PolicyConfig
from rl_vlm.models.reference import ModelReference
from rl_vlm.serving.service import PolicyService

ray.init(address=sys.argv[1], namespace="elsewhere", log_to_driver=False)
run = PolicyConfig.model_validate_json(sys.argv[2])
service = PolicyService(run, "crashes", ModelReference.of(sys.argv[3]))
print("joined", flush=True)
time.sleep(600)
"""


@pytest.mark.acceptance
def test_the_policy_of_a_user_that_is_killed_is_collected(run: PolicyConfig, tiny_folder: Path) -> None:
    """The user is another job on the cluster, in another namespace."""
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-c", CRASHES, address, run.model_dump_json(), str(tiny_folder)]
    # Ray would take a loopback address for the machine's other one, where a private cluster does not listen.
    environment = {**os.environ, "RAY_ADDRESS": address, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None and process.stdout.readline().strip() == "joined"
            assert "crashes" in status()["policies"]
            process.send_signal(signal.SIGKILL)
            asyncio.run(until(lambda: "crashes" not in status()["policies"], 60))
        finally:
            process.kill()


@pytest.mark.acceptance
def test_the_last_user_out_ends_the_service_and_the_next_one_starts_it_anew(
    tiny_folder: Path, run: PolicyConfig, adapters: PolicyAdapters
) -> None:
    other = run.model_copy(update={"serving": run.serving.model_copy(update={"shared": "second"})})
    name = app_name(shared_id("second"))
    for policy in ("first", "next"):
        with user(other, policy, tiny_folder) as service:
            service.publish(adapters.payload(0, 1))
            assert name in serve.status().applications
            (answer,) = answers(service, ask(tiny_folder, "hello", min_version=1))
            assert answer.policy_version == 1
        asyncio.run(until(lambda: name not in serve.status().applications, 60))
    assert app_name(shared_id(NAME)) in serve.status().applications
