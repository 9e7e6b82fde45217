"""SharedVLMServer: a replica for several runs. Each has a policy, a token for it, and its share of the engine."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from rl_vlm.config import CommonConfig
from rl_vlm.coroutines import all_or_none
from rl_vlm.engines.base import BASE_MODEL
from rl_vlm.engines.turns import QUANTUM
from rl_vlm.models.reference import ModelReference
from rl_vlm.serving.fair_queue import Gate, cost_of
from rl_vlm.serving.policy_key import PolicyRefusedError
from rl_vlm.serving.server import Follower, ReplicaUnavailableError, StaleReplicaError, VLMServer
from rl_vlm.serving.shelf import NotLoadedError, PolicyShelf
from rl_vlm.types import Completion, EncodedImage, GenerationRequest, SampleChunk


class SharedVLMServer(VLMServer):
    """One replica of a shared service. Every call names its policy and brings its token; requests enter the engine in fair turns."""

    def __init__(self, model: ModelReference, run: CommonConfig, run_id: str, namespace: str) -> None:
        super().__init__(model, run, run_id, namespace)
        self._gate = Gate(run.serving.sharing.queue_tokens, QUANTUM)

    def _make_follower(self, find_registry: Callable[[], Any]) -> Follower:
        self._shelf = PolicyShelf(
            self.replica_id,
            self._engine,
            self._life,
            self._tally,
            find_registry=find_registry,
            abandoned=self._end_application,
            load_timeout_s=self._serving.publish_timeout_s,
            notify=self._notify,
            forget=self._forget,
        )
        return self._shelf

    def _forget(self, policy: str) -> None:
        self._gate.queue.forget(policy)
        self._tally.by_policy.pop(policy, None)

    async def generate(  # type: ignore[override]
        self, requests: list[GenerationRequest], policy: str = "", token: str = ""
    ) -> list[Completion]:
        """Answer a batch of one policy. Raises PolicyRefusedError and what a replica of one run raises."""
        arrived, arrived_ns = time.monotonic(), time.time_ns()
        await self._open(policy, token, requests)
        requests = self._images.whole(requests)
        admitted = time.monotonic()
        parts = [self._enter(policy, part) for part in _parts(requests)]
        with self._counting_errors():
            answers = await all_or_none(parts)
        completions = [completion for part in answers for completion in part]
        self._sign(requests, completions, arrived_ns, admitted - arrived, time.monotonic() - arrived)
        if policy not in self._shelf.policies:
            self._forget(policy)  # it went while this was computed: nobody would take it off the figures again
        return completions

    async def _enter(self, policy: str, requests: list[GenerationRequest]) -> list[Completion]:
        async with self._gate.entered(policy, sum(map(cost_of, requests))):
            return await self._engine.generate(requests)

    async def stream(  # type: ignore[override]
        self, request: GenerationRequest, policy: str = "", token: str = ""
    ) -> AsyncIterator[SampleChunk]:
        """Answer one request piece by piece. Raises what `generate` raises, also between two pieces."""
        arrived = time.monotonic()
        await self._open(policy, token, [request])
        (request,) = self._images.whole([request])
        async with (
            self._gate.entered(policy, cost_of(request)),
            aclosing(self._pieces(request, arrived)) as pieces,  # type: ignore[type-var]
        ):
            async for piece in pieces:
                yield piece
        if policy not in self._shelf.policies:
            self._forget(policy)

    async def encode_images(self, images: list[EncodedImage], policy: str = "", token: str = "") -> str:  # type: ignore[override]
        """Note images that coming requests of a policy will show; see `VLMServer`."""
        self._ensure_started()
        await self._shelf.open(policy, token, BASE_MODEL)
        return self._note(images)

    async def _open(self, policy: str, token: str, requests: Sequence[GenerationRequest]) -> None:
        """Return once these requests may be queued."""
        if {request.policy for request in requests} != {policy}:
            raise PolicyRefusedError(f"A call for policy {policy!r} may hold requests of no other.")
        await self._admit(BASE_MODEL)
        wanted = max(request.min_version for request in requests)
        try:
            await self._shelf.open(policy, token, wanted)
        except TimeoutError as error:
            raise StaleReplicaError(
                f"Replica {self.replica_id} did not get version {wanted} of policy {policy} within "
                f"{self._serving.publish_timeout_s:g} s."
            ) from error
        except NotLoadedError as error:
            raise ReplicaUnavailableError(f"Replica {self.replica_id}: {error}") from error

    async def status(self) -> dict[str, Any]:
        """This replica's id and report, and per policy the loaded version and how many parts of calls wait."""
        waiting = self._gate.queue.waiting()
        policies = {
            name: {"version": policy.loaded, "waiting": waiting.get(name, 0), "error": policy.error}
            for name, policy in self._shelf.policies.items()
        }
        return {**await super().status(), "policies": policies}


def _parts(requests: Sequence[GenerationRequest]) -> Iterator[list[GenerationRequest]]:
    """Requests in order, in parts of about one turn each, so that a large call cannot hold the engine for long."""
    part: list[GenerationRequest] = []
    cost = 0
    for request in requests:
        own = cost_of(request)
        if part and cost + own > QUANTUM:
            yield part
            part, cost = [], 0
        part.append(request)
        cost += own
    if part:
        yield part
