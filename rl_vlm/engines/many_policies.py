"""The transformers engine for many policies: each (policy, version) has a lane of running samples, and policies take turns.

A lane's rows are decoded together, with its weights in place. A turn ends between two decode steps, so a policy with long answers
or thousands of requests delays the others by its share and no more, and a new version starts while samples of the older one finish.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from rl_vlm.engines.base import BASE_MODEL, EngineError, check_version
from rl_vlm.engines.calls import Call
from rl_vlm.engines.decoder import Decoder
from rl_vlm.engines.kv_cache import reserved_tokens
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.engines.turns import QUANTUM, Turns
from rl_vlm.engines.weights import BoundedWeights, UnmergedWeights, Version, Weights
from rl_vlm.models.lora import changes_tower
from rl_vlm.types import EncodedImage, GenerationRequest


@dataclass(slots=True, eq=False)
class Lane:
    """The running samples of one version of one policy."""

    policy: str
    version: Version
    decoder: Decoder


class ManyPoliciesEngine(TransformersEngine):
    """Serves a model folder to many policies with transformers.

    Args:
        merged_bytes: memory for weights with an adapter added; policies beyond it are computed with the adapter beside the weights.
        quantum: tokens of a turn.

    The others are `TransformersEngine`'s. `max_rows` is that of each policy, `max_kv_tokens` that of all together.
    """

    def __init__(self, *args: Any, merged_bytes: int, quantum: int = QUANTUM, **settings: Any) -> None:
        # The thread that uses these runs when the base class's constructor returns.
        self._merged_bytes = merged_bytes
        self._base = Version(BASE_MODEL)
        self._newest_of: dict[str, Version] = {}
        self._lanes: list[Lane] = []
        self._turns, self._quantum = Turns(quantum), quantum
        self._short_of_memory: str | None = None  # the policy that gets the memory that becomes free
        self._in_place = self._base
        self._tower: Version | None = None  # whose vision tower the cached features are of; None: the base model's
        super().__init__(*args, **settings)

    def _weights_of(self, model: nn.Module, merges: bool) -> Weights:
        return BoundedWeights(model, self._merged_bytes) if merges else UnmergedWeights(model)

    @property
    def version(self) -> int:
        """The newest version that is loaded, of any policy."""
        return max((version.number for version in list(self._newest_of.values())), default=0)

    @property
    def _num_rows(self) -> int:
        return sum(lane.decoder.num_rows for lane in list(self._lanes))

    def _serve_version(self, policy: str, version: Version) -> None:
        before = self._newest_of.get(policy)
        self._newest_of[policy] = version
        self._retire_unused(before)

    async def drop_policy(self, policy: str) -> None:
        """Forget a policy; calls of it that come later are answered without an adapter, so let none come."""
        with self._wake:
            self._retire_unused(self._newest_of.pop(policy, None))
            self._turns.forget(policy)

    def encode_images(self, images: Sequence[EncodedImage]) -> None:
        """Encode these images while the engine is idle, unless a policy has a vision tower of its own."""
        if not any(_adapts_tower(version) for version in list(self._newest_of.values())):
            super().encode_images(images)

    # What follows runs on the engine's thread.

    def _advance(self) -> None:
        with self._wake:
            busy = {lane.policy for lane in self._lanes} | {call.policy for call in self._waiting}
            policy = self._turns.next(busy)
        if policy is None:
            return
        before = self._decoder.counts.prompt_tokens
        self._admit_of(policy)
        cost = self._decoder.counts.prompt_tokens - before
        for lane in [lane for lane in self._lanes if lane.policy == policy]:
            if rows := lane.decoder.num_rows:
                self._put_in_place(lane.version)
                self._finish(lane.decoder.step())
                cost += rows
            if not lane.decoder.num_rows:
                with self._wake:
                    self._lanes.remove(lane)
                    self._retire_unused(lane.version)
        with self._wake:
            self._turns.charge(policy, cost or self._quantum)  # one that waits for memory ends its turn

    def _admit_of(self, policy: str) -> None:
        batches: dict[Lane, list[tuple[Call, int, GenerationRequest]]] = {}
        refused: list[tuple[Call, EngineError]] = []
        with self._wake:
            if self._short_of_memory not in (None, policy) and any(
                call.policy == self._short_of_memory for call in self._waiting
            ):
                return  # or a large request would never find enough
            self._short_of_memory = None
            sizes = {lane: (lane.decoder.num_rows, lane.decoder.row_length) for lane in self._lanes}
            rows = sum(lane.decoder.num_rows for lane in self._lanes if lane.policy == policy)
            for call in [call for call in self._waiting if call.policy == policy]:
                version = self._base if call.base_model else self._newest_version(policy)
                try:
                    for request in call.requests:
                        check_version(request, version.number)
                except EngineError as error:  # the policy was dropped while the call waited
                    refused.append((call, error))
                    continue
                lane = self._lane(policy, version)
                while call.admitted < len(call.requests):
                    request = call.requests[call.admitted]
                    if rows and rows + request.sampling.n > self._max_rows:
                        break
                    lane_rows, lane_length = sizes.get(lane, (0, 0))
                    size = lane_rows + request.sampling.n, max(lane_length, lane.decoder.longest(request))
                    if any(count for count, _ in sizes.values()) and not self._has_memory({**sizes, lane: size}):
                        self._short_of_memory = policy
                        break
                    sizes[lane] = size
                    batches.setdefault(lane, []).append((call, call.admitted, request))
                    rows += request.sampling.n
                    call.admitted += 1
                if call.admitted < len(call.requests):
                    break
                self._waiting.remove(call)
        for call, reason in refused:
            self._refuse(call, reason)
        for lane, batch in batches.items():
            self._put_in_place(lane.version)
            tower = lane.version if _adapts_tower(lane.version) else None
            if tower is not self._tower:
                self.backbone.forget_images()
                self._tower = tower
            self._start(batch, lane.decoder, lane.version.number)

    def _has_memory(self, sizes: Mapping[Lane, tuple[int, int]]) -> bool:
        """Whether there is memory for the keys and values of lanes with these rows, each up to a length."""
        limit = self._max_kv_tokens
        return limit is None or sum(reserved_tokens(*size) for size in sizes.values()) <= limit

    def _newest_version(self, policy: str) -> Version:
        return self._newest_of.setdefault(policy, Version(0))

    def _lane(self, policy: str, version: Version) -> Lane:
        for lane in self._lanes:
            if lane.policy == policy and lane.version is version:
                return lane
        self._lanes.append(Lane(policy, version, self._decoder.sibling()))
        return self._lanes[-1]

    def _put_in_place(self, version: Version) -> None:
        # Compared by identity: a policy may be dropped, and its name and numbers come again with other weights.
        if version is not self._in_place:
            self._weights.use(version.formed)
            self._in_place = version

    def _encode_ahead(self, images: Sequence[EncodedImage]) -> None:
        if self._tower is not None or _adapts_tower(self._in_place):
            self._put_in_place(self._base)
            self.backbone.forget_images()
            self._tower = None
        super()._encode_ahead(images)

    def _retire_unused(self, version: Version | None) -> None:
        """Release a version that is neither its policy's newest nor that of a lane."""
        if version is None or version.formed is None:
            return
        used = [*self._newest_of.values(), *(lane.version for lane in self._lanes)]
        if not any(version is other for other in used):
            self._weights.release(version.formed)

    def _fail(self, error: Exception) -> None:
        with self._wake:
            lanes, self._lanes = self._lanes, []
            for lane in lanes:
                self._retire_unused(lane.version)
        super()._fail(error)


def _adapts_tower(version: Version) -> bool:
    return version.formed is not None and changes_tower(version.formed)
