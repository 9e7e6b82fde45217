"""A served policy in the test's own process, its replicas as processes, and adapters that tell versions apart."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from core_support import run_config

from rl_vlm.chat import ChatCodec
from rl_vlm.config import PolicyConfig
from rl_vlm.learning.policy_model import PolicyModel
from rl_vlm.models.loading import load_text_side
from rl_vlm.models.reference import ModelReference
from rl_vlm.models.weights import AdapterPayload
from rl_vlm.runs.ray_session import ray_cluster
from rl_vlm.serving.client import PolicyClient
from rl_vlm.serving.service import PolicyService
from rl_vlm.types import GenerationRequest, Message, SamplingParams

RUN_ID = "test"


class Adapters:
    """Random adapters of one model; a version has always the same weights."""

    def __init__(self, run: PolicyConfig, folder: Path, scale: float = 0.2) -> None:
        self._policy, self._scale = PolicyModel(folder, run), scale

    def payload(self, version: int) -> AdapterPayload:
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in self._policy.parameters:
                parameter.normal_(0.0, self._scale, generator=generator)
        return self._policy.payload(version)


@contextmanager
def served(folder: Path, **dotted: Any) -> Iterator[tuple[PolicyConfig, PolicyService]]:
    """A private Ray cluster that serves a model."""
    settings = {"serving__cpus_per_replica": 0.25, "resources__num_cpus": 2, "serving__max_context": 512, **dotted}
    run = run_config(folder, **settings)
    with ray_cluster(run):
        service = PolicyService(run, RUN_ID, ModelReference.of(str(folder)))
        try:
            service.wait_until_ready()
            yield run, service
        finally:
            service.stop()


def client(**settings: Any) -> PolicyClient:
    """A client of `served`."""
    return PolicyClient(RUN_ID, **{"deadline_s": 60.0, "homes": range(2), "coalesce": False, **settings})


def replicas() -> list[psutil.Process]:
    """The replicas' processes, started by this one."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if _name(child).startswith("ray::ServeReplica")]


def _name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) if process.status() != psutil.STATUS_ZOMBIE else ""
    except psutil.Error:
        return ""


def ask(folder: Path, text: str, name: str = "r", **sampling: Any) -> GenerationRequest:
    """A request without an image."""
    version = sampling.pop("min_version", 0)
    params = SamplingParams(**{"max_new_tokens": 16, "temperature": 0.0, **sampling})
    codec: ChatCodec = load_text_side(folder).codec
    return GenerationRequest(name, codec.encode_prompt([Message.of("user", text)]).token_ids, params, (), version)


async def until(condition: Any, timeout_s: float = 60.0) -> None:
    """Wait for something to become true; `condition` may be a coroutine function."""
    async with asyncio.timeout(timeout_s):
        while True:
            found = condition()
            if await found if asyncio.iscoroutine(found) else found:
                return
            await asyncio.sleep(0.05)
