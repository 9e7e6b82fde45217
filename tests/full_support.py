"""Versions of all weights for tests: random ones that tell themselves apart, plain models that hold them, and served loops."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from core_support import plain_model
from policy_loop import Loop
from serving_support import client

from rl_vlm.models.shared_memory import VersionRoom
from rl_vlm.models.weights import FullPayload, WeightPayload, put_weights
from rl_vlm.serving.service import PolicyService
from rl_vlm.types import Completion, GenerationRequest


class FullWeightsOf:
    """Random versions of all weights of one model, near its own; a version has always the same weights."""

    def __init__(self, folder: Path, scale: float = 0.3) -> None:
        self.model = plain_model(folder)
        self._scale = scale
        self._base = {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}

    def payload(self, version: int) -> FullPayload:
        generator = torch.Generator().manual_seed(version)
        state = {}
        for name, tensor in self._base.items():
            spread = self._scale * (float(tensor.std()) if tensor.numel() > 1 else 0.0)
            state[name] = tensor + torch.randn(tensor.shape, generator=generator) * spread
        return FullPayload.build(version, state, "tiny")

    def under(self, version: int) -> Any:
        """Plain transformers with a version's weights; the next call changes it."""
        put_weights(self.model, self.payload(version))
        return self.model


def agreement(loop: Loop) -> float:
    """The largest difference between engine and learner over sampled tokens of the newest version."""
    groups = loop.sample(size=3)
    found = [one for group in groups for one in group.trajectories]
    assert {turn.policy_version for one in found for turn in one.turns} == {loop.version}
    learner = loop.updater.recompute(found)
    return max(
        float(np.abs(ours - one.logprobs[one.loss_mask]).max()) for ours, one in zip(learner, found, strict=True)
    )


def agreements(loop: Loop, updates: int) -> list[float]:
    """`agreement` after each of so many updates."""
    found = []
    for _ in range(updates):
        stats = loop.update(loop.sample(size=3))
        assert (stats["policy/optimizer_steps"], stats["policy/skipped_steps"], stats["policy/first_ratio_error"]) == (
            2,
            0,
            0.0,
        )
        found.append(agreement(loop))
    return found


class ServedEngine:
    """A served policy as an engine of this process, for `Loop`."""

    def __init__(self, service: PolicyService) -> None:
        self._service = service
        self.version = 0

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        policy_client = client()
        return list(await asyncio.gather(*(policy_client.generate(request) for request in requests)))

    async def load_adapter(self, payload: WeightPayload) -> None:
        if self._service.folder:  # as a learner on the same node does
            room = VersionRoom(Path(self._service.folder), len(payload.tensors))
            payload = FullPayload.build(payload.version, payload.state(), "", room=room)
        await asyncio.to_thread(self._service.publish, payload)
        self.version = payload.version

    async def close(self) -> None:
        """The service is stopped by who started it."""
