"""The transformers engine: continuous batching on a thread of its own.

The running samples of one version of one policy form a batch, which is decoded with the weights of that version in
place. Batches take turns of a few decode steps, so a new version starts while samples of the older one finish, and a
policy with long answers delays the others by its share. With in-flight updates running samples take the newer version.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rl_vlm.engines.base import BASE_MODEL, EngineError, EngineStats, RequestTooLargeError, check_version, naming
from rl_vlm.engines.cache import reserved_tokens, whole_blocks
from rl_vlm.engines.decoder import Decoder
from rl_vlm.engines.rows import EngineCall, PreparedRequest
from rl_vlm.engines.streams import TokenStream, notify
from rl_vlm.engines.weights import AdapterWeights, FullWeights, Version, Weights
from rl_vlm.models.devices import choose_precision
from rl_vlm.models.families import make_backbone
from rl_vlm.models.families.generic import CACHE_BYTES
from rl_vlm.models.images import DEFAULT_PIXELS, PixelLimits
from rl_vlm.models.kernels import use_fast_products
from rl_vlm.models.loading import load_model, load_text_side, quiet_libraries
from rl_vlm.models.modules import DType, HeadDType, Quantization, towers
from rl_vlm.models.weights import WeightPayload
from rl_vlm.types import Completion, EncodedImage, GenerationRequest, InFlightUpdates, SampleChunk, UserInputError

logger = logging.getLogger(__name__)

_IDLE_BATCH = 8  # images encoded at once while idle; a call that arrives meanwhile waits for them
_SMALLEST_LAYER = 2**15  # weights; in smaller layers no product is large enough for oneDNN
_MAX_UPCOMING_IMAGES = 1024  # that wait to be encoded ahead of their requests
_STEPS_PER_TURN = 8  # of a batch, before the next one's weights are put in place


@dataclass(slots=True, eq=False)
class RunningBatch:
    """The running samples of one version of one policy."""

    policy: str
    version: Version
    decoder: Decoder


class TransformersEngine:
    """Serves a model folder with transformers, to one policy or many.

    Args:
        dtype: of the weights. Adapters are merged into float32 weights and computed beside others, which would round
            small ones away.
        max_context: prompt plus new tokens of a sample.
        max_rows: samples of each policy that run at once.
        max_kv_tokens: tokens, of all policies, whose keys and values have memory; requests beyond it wait.
        lockstep: run each call as one batch that no other joins, and each image alone, so that every bit of the result
            depends on the call alone.
        num_threads: torch threads of this process; None leaves torch's setting.
        in_flight: running samples take a new version between two tokens, and keep or recompute their keys and values.
        full: versions are all weights of the model, not adapters.
        merged_bytes: memory for weights with an adapter added; adapters beyond it are computed beside the weights.
        image_cache_bytes, head_dtype: see `Backbone`.
    """

    def __init__(
        self,
        model: Path,
        *,
        dtype: DType = "float32",
        device: str = "cpu",
        max_context: int = 4096,
        max_rows: int = 512,
        max_kv_tokens: int | None = None,
        lockstep: bool = False,
        num_threads: int | None = 1,
        quantization: Quantization = "none",
        pixels: PixelLimits = DEFAULT_PIXELS,
        in_flight: InFlightUpdates | None = None,
        full: bool = False,
        image_cache_bytes: int = CACHE_BYTES,
        head_dtype: HeadDType = "model",
        merged_bytes: float = math.inf,
    ) -> None:
        quiet_libraries()
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        choose_precision(dtype, device)
        text = load_text_side(model, pixels)
        loaded = load_model(model, dtype, device, quantization)
        suppressed = text.codec.suppressed_token_ids(text.vocab_size)
        self.backbone = make_backbone(loaded, text.images, suppressed, image_cache_bytes, head_dtype, lockstep)
        self._decoder = Decoder(self.backbone, text, max_context=max_context)
        self._tower_parts_done = 0  # attentions and MLPs of its blocks; a large photo takes minutes on a CPU
        parts = (part for tower in towers(loaded) for part in tower.modules() if isinstance(part, torch.nn.ModuleList))
        for part in (child for blocks in parts for block in blocks for child in block.children()):
            part.register_forward_hook(self._count_tower_part)
        merges = quantization == "none" and dtype == "float32"
        self._weights: Weights = FullWeights(loaded) if full else AdapterWeights(loaded, merged_bytes if merges else 0)
        use_fast_products(loaded, _SMALLEST_LAYER)
        self._max_rows, self._max_kv_tokens = max_rows, max_kv_tokens
        self._lockstep = lockstep
        self._in_flight = in_flight
        self._base = Version(BASE_MODEL)
        self._newest: dict[str, Version] = {}  # by policy
        self._batches: list[RunningBatch] = []  # in the order of their turns, the current one first
        self._steps_left = _STEPS_PER_TURN  # of the current one's turn
        self._in_place = self._base  # the version whose weights are
        self._open: set[EngineCall] = set()  # calls that are not answered yet
        self._upcoming: deque[EncodedImage] = deque(maxlen=_MAX_UPCOMING_IMAGES)  # of later requests
        self._waiting: list[EngineCall] = []  # not admitted entirely, the oldest first
        self._requests = self._swaps = 0
        self._last_swap_s = 0.0
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="transformers-engine", daemon=True)
        self._thread.start()

    def _count_tower_part(self, *_: Any) -> None:
        self._tower_parts_done += 1

    @property
    def version(self) -> int:
        return max((version.number for version in list(self._newest.values())), default=0)

    @property
    def dead(self) -> bool:
        return not (self._closed or self._thread.is_alive())

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        if not requests:
            return []
        if len({(request.policy, request.min_version == BASE_MODEL) for request in requests}) > 1:
            raise EngineError(
                "Requests for the base model and for the policy, or for two policies, cannot share a call: send two "
                "calls."
            )
        await self._read_grammars(requests)
        call = self._enqueue(requests)
        try:
            return await asyncio.wrap_future(call.future)
        except asyncio.CancelledError:
            self._drop(call)
            raise

    async def stream(self, request: GenerationRequest) -> AsyncIterator[SampleChunk]:
        await self._read_grammars([request])
        stream = TokenStream(request.sampling.n)
        call = self._enqueue([request], stream)
        try:
            async for chunk in stream.chunks():
                yield chunk
        finally:
            self._drop(call)

    def encode_images(self, images: Sequence[EncodedImage]) -> None:
        """Encode these images while the engine is idle; beyond a limit the oldest are dropped."""
        # Not with lockstep, where the features would come from another batch than the call's own, nor with an adapted
        # tower, whose next version would make them useless.
        if not (self._lockstep or any(map(self._has_own_tower, list(self._newest.values())))):
            with self._wake:
                self._upcoming.extend(images)
                self._wake.notify()

    async def _read_grammars(self, requests: Sequence[GenerationRequest]) -> None:
        """Beside decoding: a large grammar takes seconds, and is remembered."""
        for request in requests:
            if request.sampling.bound:
                with naming(request):
                    await asyncio.to_thread(self._decoder.grammars.matcher, request.sampling)

    def _enqueue(self, requests: Sequence[GenerationRequest], stream: TokenStream | None = None) -> EngineCall:
        for request in requests:
            samples, length, limit = request.sampling.n, self._decoder.longest(request), self._max_kv_tokens
            if limit is not None and samples * whole_blocks(length) > limit:
                raise RequestTooLargeError(
                    f"Request {request.request_id}: {samples} samples of up to {length} tokens are more than the "
                    f"{limit} tokens that this replica has memory for: ask for fewer samples or fewer tokens, or raise "
                    "serving.max_kv_gib."
                )
        call = EngineCall(list(requests), stream=stream)
        call.future.set_running_or_notify_cancel()  # a caller that is cancelled calls `_drop`
        with self._wake:
            if self._closed:
                raise EngineError("The engine is closed.")
            self._requests += len(call.requests)
            self._open.add(call)
            self._waiting.append(call)
            self._wake.notify()
        return call

    def stats(self) -> EngineStats:
        with self._wake:
            waiting = sum(r.sampling.n for call in self._waiting for r in call.requests[call.admitted :])
        counts, backbone = self._decoder.counts, self.backbone
        return EngineStats(
            requests=self._requests,
            running=sum(batch.decoder.num_rows for batch in self._batches),
            waiting=waiting,
            prompt_tokens=counts["prompt_tokens"],
            generated_tokens=counts["generated_tokens"],
            progress=self._decoder.progress + self._tower_parts_done,
            image_cache_hits=backbone.cache_hits,
            image_cache_misses=backbone.cache_misses,
            mean_batch=counts["step_rows"] / max(counts["steps"], 1),
            adapter_swaps=self._swaps,
            last_swap_s=self._last_swap_s,
        )

    async def load_adapter(self, payload: WeightPayload) -> None:
        """See Engine. A version is checked and merged while samples run; switching to it only changes pointers."""
        started = time.monotonic()
        if self._closed:
            raise EngineError("The engine is closed.")
        formed = await asyncio.to_thread(lambda: self._weights.form(payload.verify()))
        with self._wake:
            self._newest[payload.policy] = Version(payload.version, formed)
            self._swaps += 1
            self._last_swap_s = time.monotonic() - started
            self._wake.notify()

    def _has_own_tower(self, version: Version) -> bool:
        return self._weights.changes_tower(version.formed)

    async def sleep(self) -> None:
        """Does nothing: keys and values are freed with their samples."""

    async def wake(self) -> None:
        """Does nothing."""

    async def drop_policy(self, policy: str) -> None:
        with self._wake:
            self._newest.pop(policy, None)

    async def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join, 30.0)

    def _drop(self, call: EngineCall) -> None:
        """Stop working on a call; its rows are freed at the next step."""
        with self._wake:
            call.over = True
            self._open.discard(call)
            if call in self._waiting:
                self._waiting.remove(call)

    # What follows runs on the engine's thread.

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._closed or self._upcoming or self._batches or self._waiting):
                    self._wake.wait()
                if self._closed:
                    break
                count = 0 if self._batches or self._waiting else min(_IDLE_BATCH, len(self._upcoming))
                images = [self._upcoming.popleft() for _ in range(count)]
            try:
                if images:
                    self._encode_ahead(images)
                    continue
                self._advance()
                with self._wake:
                    streams = [call.stream for call in self._open if call.stream is not None]
                notify(streams)
            except Exception as error:
                self._fail(error)
        self._fail(EngineError("The engine is closed."))

    def _advance(self) -> None:
        """Start what may start, and sample one token of each row of one batch."""
        if self._in_flight:
            self._update_running()
        # The memory of rows whose clients have gone must be free before new calls are admitted.
        for batch in self._batches:
            self._finish(batch.decoder.drop_cancelled())
        self._admit()
        self._remove_empty_batches()
        if not self._batches:
            return
        if not self._steps_left:
            self._batches = [*self._batches[1:], self._batches[0]]
            self._steps_left = _STEPS_PER_TURN
        self._steps_left -= 1
        current = self._batches[0]
        self._put_in_place(current.version)
        self._finish(current.decoder.step())
        self._remove_empty_batches()

    def _remove_empty_batches(self) -> None:
        self._batches = [batch for batch in self._batches if batch.decoder.num_rows]

    def _put_in_place(self, version: Version) -> None:
        # Compared by identity: a policy may be dropped, and its name and numbers come again with other weights.
        if version is not self._in_place:
            if self._has_own_tower(version) or self._has_own_tower(self._in_place):
                self.backbone.forget_images()
            self._weights.use(version.formed)
            self._in_place = version

    def _encode_ahead(self, images: Sequence[EncodedImage]) -> None:
        if self._has_own_tower(self._in_place):
            return
        try:
            self.backbone.image_features(images)
        except UserInputError as error:
            logger.debug("an image cannot be encoded: %s", error)  # the request with this image reports the error

    def _update_running(self) -> None:
        """Let running samples go on with the newest version of their policy; those of the base model stay with it."""
        for batch in self._batches:
            newest = self._newest.get(batch.policy)
            if batch.version is self._base or newest is None or newest is batch.version:
                continue
            batch.version = newest
            self._put_in_place(newest)
            batch.decoder.change_version(newest.number, recompute=self._in_flight == "recompute")

    def _admit(self) -> None:
        """Start waiting requests, the oldest first, while there is room for them.

        Requests of other policies pass one whose policy has all its rows in use. None passes a request that finds no
        memory, so that large requests get in.
        """
        admitted: dict[RunningBatch, list[tuple[EngineCall, GenerationRequest]]] = defaultdict(list)
        with self._wake:
            sizes = {batch: (batch.decoder.num_rows, batch.decoder.row_length) for batch in self._batches}  # and length
            rows: Counter[str] = Counter()
            for batch in self._batches:
                rows[batch.policy] += batch.decoder.num_rows
            full: set[str] = set()
            for call in list(self._waiting):
                if call.policy in full:
                    continue
                if self._lockstep and rows.total():
                    break
                version = self._base if call.base_model else self._newest.setdefault(call.policy, Version(0))
                try:
                    for request in call.requests:
                        check_version(request, version.number)
                except EngineError as error:  # the policy was dropped while the call waited
                    self._reject(call, error)
                    continue
                batch = self._batch(call.policy, version)
                for request in call.requests[call.admitted :]:
                    count, length = sizes.get(batch, (0, 0))
                    size = count + request.sampling.n, max(length, self._decoder.longest(request))
                    if not self._lockstep:
                        if rows[call.policy] and rows[call.policy] + request.sampling.n > self._max_rows:
                            full.add(call.policy)
                            break
                        needed = sum(reserved_tokens(*each) for each in {**sizes, batch: size}.values())
                        if rows.total() and self._max_kv_tokens is not None and needed > self._max_kv_tokens:
                            break
                    sizes[batch] = size
                    admitted[batch].append((call, request))
                    rows[call.policy] += request.sampling.n
                    call.admitted += 1
                if call.admitted == len(call.requests):
                    self._waiting.remove(call)
                elif call.policy not in full:
                    break
        for batch, entries in admitted.items():
            self._put_in_place(batch.version)
            self._start(entries, batch)

    def _batch(self, policy: str, version: Version) -> RunningBatch:
        for batch in self._batches:
            if batch.policy == policy and batch.version is version:
                return batch
        self._batches.append(RunningBatch(policy, version, self._decoder.sibling()))
        return self._batches[-1]

    def _start(self, entries: Sequence[tuple[EngineCall, GenerationRequest]], batch: RunningBatch) -> None:
        """Prefill requests, each with its call, whose version is in place."""
        prepared = batch.decoder.prepare([request for _, request in entries])
        live: list[PreparedRequest] = []
        for (call, _), item in zip(entries, prepared, strict=True):
            if isinstance(item, EngineError):
                self._reject(call, item)
            elif not call.over:  # it may have been cancelled while its images were encoded
                item.call, item.version = call, batch.version.number
                if call.stream is not None:
                    call.stream.policy_version = item.version
                call.prepared.append(item)
                live.append(item)
        if live:
            self._finish(batch.decoder.admit(live))

    def _finish(self, prepared: Sequence[PreparedRequest]) -> None:
        for item in prepared:
            item.answer, call = self._decoder.completion(item), item.call
            assert call is not None
            call.unanswered -= 1
            if call.unanswered:
                continue
            with self._wake:
                self._open.discard(call)
            if call.stream is not None:
                notify([call.stream])
            elif not call.future.done():
                call.future.set_result([one.answer for one in call.prepared if one.answer is not None])

    def _reject(self, call: EngineCall, error: Exception) -> None:
        self._drop(call)
        call.fail(error)

    def _fail(self, error: Exception) -> None:
        """Fail all running and waiting calls; the engine continues unless it is closed."""
        with self._wake:
            calls = list(self._open)
            self._batches = []
            self._open.clear()
            self._waiting.clear()
        wrapped = error if isinstance(error, EngineError) else EngineError(f"Generation failed: {error!r}.")
        for call in calls:
            call.fail(wrapped)
