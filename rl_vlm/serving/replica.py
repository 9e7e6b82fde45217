"""VLMServer: one replica of the Serve deployment, with one engine."""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import logging
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve._private import replica

from rl_vlm.config import CommonConfig, PolicyConfig, ServedModelSection
from rl_vlm.engines.base import BASE_MODEL, Engine, EngineError
from rl_vlm.machine import available_memory
from rl_vlm.models.loading import load_text_side
from rl_vlm.models.memory.needs import kv_cache_bytes, max_kv_tokens
from rl_vlm.models.memory.shape import ModelShape
from rl_vlm.models.reference import ModelReference
from rl_vlm.serving.fair_queue import QUANTUM, Gate, cost_of
from rl_vlm.serving.follower import (
    Admission,
    Follower,
    Lifecycle,
    NotLoadedError,
    PolicyTally,
    RayMetrics,
    ReplicaState,
    ReplicaTally,
)
from rl_vlm.serving.registry import app_name, registry_name
from rl_vlm.tracing import finished
from rl_vlm.types import (
    Completion,
    EncodedImage,
    GenerationRequest,
    Message,
    RLVLMError,
    SampleChunk,
    SamplingParams,
)
from rl_vlm.waiting import all_or_none

# The port of Serve's replicas for calls between deployments.
#
# Serve opens it on every interface and has no setting for that; this replaces a function of Serve's, which is why
# Ray's version is pinned exactly. Whoever connects and has Ray's token may send pickles.

EVERY_INTERFACE, LOOPBACK = "[::]", "127.0.0.1"


def keep_to_loopback() -> None:
    """On a node whose address is loopback, as of a private cluster, let this process's replica listen there alone.
    Serve opens the port after it has made the deployment's object, so call this from the constructor.
    """
    if not (ray.is_initialized() and ipaddress.ip_address(ray.util.get_node_ip_address()).is_loopback):
        return
    listen = replica.add_port_to_grpc_server

    def on_loopback(server: Any, address: str) -> int:
        return listen(server, address.replace(EVERY_INTERFACE, LOOPBACK))

    replica.add_port_to_grpc_server = on_loopback


# Each image travels to a replica once: `SentImages` leaves out what it has been sent, `ImageCache` puts it back there.
#
# A conversation shows its earlier pictures again in every turn, and rows of a data set come again in every epoch. An
# image without its bytes still has its hash, by which the replica finds it. A replica that has not got it, because it
# is another one than the client believes or because it has dropped it, says so, and is sent the whole request.

_LEAST = 4 << 20  # bytes of a cache: a client leaves images out in any case
_REPLICAS, _HASHES = 64, 4096  # that a client remembers: the replicas that it met last, and of each the images


class ImagesMissingError(RLVLMError):
    """A request leaves out bytes of images that this replica does not have: send it whole."""


class ImageCache:
    """The images that a replica has been sent, up to `limit` bytes; what was shown longest ago is dropped."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0

    @classmethod
    def of(cls, model: ServedModelSection) -> ImageCache:
        """A replica's cache: a quarter of the memory that it may use for image features."""
        return cls(max(model.image_cache_bytes // 4, _LEAST))

    def whole(self, requests: Sequence[GenerationRequest]) -> list[GenerationRequest]:
        """The requests with the bytes of all their images. Raises ImagesMissingError."""
        found = self.images(image for request in requests for image in request.images)
        return [
            replace(request, images=tuple(found[image.sha256] for image in request.images))
            if any(not image.png for image in request.images)
            else request
            for request in requests
        ]

    def images(self, shown: Iterable[EncodedImage]) -> dict[str, EncodedImage]:
        """These images with their bytes, by hash; they are kept.

        Raises ImagesMissingError, and RLVLMError for an image that has not got the hash that it says.
        """
        found: dict[str, EncodedImage] = {}
        missing: set[str] = set()
        for image in shown:
            png = image.png or self._kept.get(image.sha256)
            if png is None:
                missing.add(image.sha256)
                continue
            self._keep(image.sha256, png)
            found.setdefault(image.sha256, image if image.png else replace(image, png=png))
        if lacking := missing - found.keys():  # one may come whole behind a copy without bytes
            raise ImagesMissingError(f"{len(lacking)} images were left out that this replica does not have.")
        while self._bytes > self._limit:
            self._bytes -= len(self._kept.popitem(last=False)[1])
        return found

    def _keep(self, sha256: str, png: bytes) -> None:
        # On shared replicas one policy's image must not take the place of another's: features are kept by hash, too.
        known = self._kept.get(sha256)
        if known != png:
            if known is not None or hashlib.sha256(png).hexdigest() != sha256:
                raise RLVLMError(f"Image {sha256[:12]} has other bytes than its hash says.")
            self._kept[sha256] = png
            self._bytes += len(png)
        self._kept.move_to_end(sha256)


class SentImages:
    """What a client has sent to which replica.

    A call is made to a target: a replica's id, or a home (`home_session`), which is taken for the replica that answered
    there last.
    """

    def __init__(self) -> None:
        self._of: OrderedDict[str, OrderedDict[str, None]] = OrderedDict()  # replica -> hashes, the latest last
        self._homes: dict[str, str] = {}
        self.left_out = self.sent = 0  # bytes

    def lean(self, images: Iterable[EncodedImage], target: str) -> tuple[EncodedImage, ...]:
        """The images, without the bytes of those that the replica at `target` has been sent."""
        known = self._of.get(self._homes.get(target, target), OrderedDict())
        return tuple(replace(image, png=b"") if image.sha256 in known else image for image in images)

    def lean_requests(self, requests: Sequence[GenerationRequest], target: str) -> list[GenerationRequest]:
        """The requests with their images so reduced, in a new list."""
        return [
            replace(request, images=self.lean(request.images, target)) if request.images else request
            for request in requests
        ]

    def answered(self, requests: Sequence[GenerationRequest], completions: Sequence[Completion], target: str) -> None:
        """These requests were answered: the replica that did it has their images."""
        if completions:
            self.arrived((image for request in requests for image in request.images), completions[0].replica_id, target)

    def arrived(self, images: Iterable[EncodedImage], replica: str, target: str) -> None:
        """The replica has these images."""
        if target and target != replica:
            self._homes[target] = replica
        known = self._of.setdefault(replica, OrderedDict())
        self._of.move_to_end(replica)
        for image in images:
            if image.sha256 in known:
                self.left_out += len(image.png)
            else:
                self.sent += len(image.png)
            known[image.sha256] = None
            known.move_to_end(image.sha256)
        while len(known) > _HASHES:
            known.popitem(last=False)
        while len(self._of) > _REPLICAS:
            self._of.popitem(last=False)

    def forget(self, target: str) -> None:
        """The replica at `target` lacks what it was taken to have."""
        self._of.pop(self._homes.pop(target, target), None)


logger = logging.getLogger("ray.serve")

_EXIT_DELAY_S = 0.5  # so that the reason reaches Serve's log
_STEP_POLL_S = 0.1  # how often a probe checks whether the engine has done a step
_REPORT_S = 2.0  # how often counts go to Ray's metrics


class ReplicaUnavailableError(RLVLMError):
    """This replica cannot answer now; the client tries again, on any replica."""


def build_engine(model: Path, config: CommonConfig) -> Engine:
    """The engine that the configuration names; `auto` is vLLM on a GPU and transformers without one."""
    serving = config.serving
    in_flight = config.rollout.in_flight_updates if isinstance(config, PolicyConfig) else None
    import torch

    on_gpu = serving.gpus_per_replica > 0 and torch.cuda.is_available()
    name = serving.engine if serving.engine != "auto" else ("vllm" if on_gpu else "transformers")
    if name == "vllm":
        from rl_vlm.engines.vllm_engine import VLLMEngine

        return VLLMEngine(
            model,
            dtype=config.model.dtype,
            head_dtype=config.model.head_dtype,
            serving=serving,
            max_lora_rank=config.max_lora_rank,
            max_loras=config.lora_slots,
            pixels=config.model.pixels,
            in_flight=in_flight,
            kv_cache=partial(kv_cache_bytes, config, ModelShape.read(model)),
            full=config.trains_full,
        )
    from rl_vlm.engines.transformers_engine import TransformersEngine

    return TransformersEngine(
        model,
        dtype=config.model.dtype,
        device="cuda" if on_gpu else "cpu",
        max_context=serving.max_context,
        max_rows=serving.max_rows,
        max_kv_tokens=max_kv_tokens(
            config,
            ModelShape.read(model),
            card=torch.cuda.get_device_properties(0).total_memory if on_gpu else 0,
            # All replicas are taken to be on this machine.
            free=available_memory()[1] // serving.num_replicas,
        ),
        lockstep=config.deterministic,
        num_threads=None if on_gpu else serving.num_threads,
        quantization="nf4" if serving.quantization == "nf4" else "none",
        pixels=config.model.pixels,
        in_flight=in_flight,
        full=config.trains_full,
        head_dtype=config.model.head_dtype,
        image_cache_bytes=config.model.image_cache_bytes,
        image_by_image=config.deterministic,
        merged_bytes=serving.sharing.merged_gib * 2**30 if serving.shared else math.inf,
    )


class VLMServer:
    """One replica: an engine that follows the registry of its service.

    It starts when the registry has answered and what must be loaded is loaded (`Follower`), keeps a call to the
    registry open from then on, and holds a request until it has the version that the request asks for. `Lifecycle`
    decides about requests and health checks. Where several runs share the replica, their requests enter the engine in
    fair turns.
    """

    def __init__(self, model: ModelReference, config: CommonConfig, run_id: str, namespace: str) -> None:
        keep_to_loopback()
        folder = model.on_this_node()
        self._engine = build_engine(folder, config)
        self._serving, self._run_id = config.serving, run_id
        self.replica_id: str = serve.get_replica_context().replica_id.unique_id
        self._life = Lifecycle(config.serving.probe_after_s, load_patience_s=config.serving.publish_timeout_s)
        self._tally = ReplicaTally()
        self._images = ImageCache.of(config.model)
        self._metrics = RayMetrics(config.name, app_name(run_id), self.replica_id)
        text = load_text_side(folder, config.model.pixels)
        self._count_image_tokens = text.images.count_tokens
        self._probe_ids = text.codec.encode_prompt([Message.of("user", "1")]).token_ids
        self._changed = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []
        self._gate = Gate(config.serving.sharing.queue_tokens, QUANTUM) if config.serving.shared else None
        self._follower = Follower(
            self.replica_id,
            self._engine,
            self._life,
            self._tally,
            find_registry=lambda: ray.get_actor(registry_name(run_id), namespace=namespace),
            abandoned=self._end_application,
            load_timeout_s=config.serving.publish_timeout_s,
            changed=self._changed,
            eager=not config.serving.shared,
            forget=self._forget,
        )

    def _ensure_started(self) -> None:
        """Start the background tasks; called by every method, because there is no event loop before the first call."""
        if not self._tasks:
            work = {"following the registry": self._follower.run(), "reporting metrics": self._report()}
            self._tasks = [asyncio.create_task(coroutine, name=name) for name, coroutine in work.items()]

    def _forget(self, policy: str) -> None:
        if self._gate is not None:
            self._gate.queue.forget(policy)
        self._tally.by_policy.pop(policy, None)

    def _end_application(self) -> None:
        """Delete the application of a run that was killed: its replicas would hold their GPUs for ever."""
        logger.error("replica %s: the registry of %s is gone; its application ends", self.replica_id, self._run_id)
        # Asking Serve's controller blocks.
        threading.Thread(target=lambda: serve.delete(app_name(self._run_id), _blocking=False), daemon=True).start()

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(_REPORT_S)
            try:
                self._metrics.send(self._tally, self._engine.stats(), self._engine.version)
            except Exception as error:  # a replica goes on without metrics
                logger.warning("replica %s cannot report its metrics: %r", self.replica_id, error)

    async def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        """Answer a batch of one policy; every completion names this replica.

        Raises ReplicaUnavailableError, ImagesMissingError or EngineError.
        """
        arrived, arrived_ns = time.monotonic(), time.time_ns()
        requests = self._images.whole(requests)
        policy = await self._admit(requests)
        admitted = time.monotonic()
        with self._counting_errors():
            completions = await self._in_turns(policy, requests)
        self._sign(requests, completions, arrived_ns, admitted - arrived, time.monotonic() - arrived)
        self._forget_if_gone(policy)
        return completions

    async def _in_turns(self, policy: str, requests: list[GenerationRequest]) -> list[Completion]:
        if (gate := self._gate) is None:
            return await self._engine.generate(requests)

        async def enter(part: list[GenerationRequest]) -> list[Completion]:
            async with gate.entered(policy, sum(map(cost_of, part))):
                return await self._engine.generate(part)

        answers = await all_or_none([enter(part) for part in _parts(requests)])
        return [completion for part in answers for completion in part]

    def _forget_if_gone(self, policy: str) -> None:
        if policy not in self._follower.policies:
            self._forget(policy)  # it went while the request ran, which has counted it anew

    def _sign(
        self,
        requests: Sequence[GenerationRequest],
        completions: Sequence[Completion],
        arrived_ns: int,
        admitted_s: float,
        seconds: float,
    ) -> None:
        """Write into the answers who gave them and, where one is traced, when what was done; and count them."""
        for request, completion in zip(requests, completions, strict=True):
            object.__setattr__(completion, "replica_id", self.replica_id)
            if request.trace:
                parts = {"admit": admitted_s, "queue": completion.queue_s, "generate": completion.generate_s}
                spans = finished(
                    request.trace, f"replica-{self.replica_id}", "engine", arrived_ns, seconds, parts,
                    version=completion.policy_version, prompt_tokens=len(completion.prompt_ids),
                    tokens=sum(len(sample.token_ids) for sample in completion.samples),
                )  # fmt: skip
                object.__setattr__(completion, "spans", spans)
            self._tally.answered(completion, seconds)

    async def stream(self, request: GenerationRequest) -> AsyncIterator[SampleChunk]:
        """Answer one request piece by piece. Raises what `generate` raises, also between two pieces."""
        arrived = time.monotonic()
        (request,) = self._images.whole([request])
        policy = await self._admit([request])
        async with AsyncExitStack() as stack:
            if self._gate is not None:
                await stack.enter_async_context(self._gate.entered(policy, cost_of(request)))
            pieces = await stack.enter_async_context(aclosing(self._pieces(request, arrived)))  # type: ignore[type-var]
            async for piece in pieces:
                yield piece
        self._forget_if_gone(policy)

    async def _pieces(self, request: GenerationRequest, arrived: float) -> AsyncIterator[SampleChunk]:
        """What the engine streams, signed and, at its end, counted."""
        first: float | None = None
        sampled, version = 0, BASE_MODEL
        with self._counting_errors():
            async with aclosing(self._engine.stream(request)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    first = first or time.monotonic() - arrived
                    sampled, version = sampled + len(chunk.token_ids), max(version, chunk.policy_version)
                    yield replace(chunk, replica_id=self.replica_id)
        images = sum(self._count_image_tokens(image.width, image.height) - 1 for image in request.images)
        counted = PolicyTally(1, len(request.prompt_ids) + images, sampled, version)
        self._tally.streamed(request.policy, counted, first, time.monotonic() - arrived)

    async def encode_images(self, images: list[EncodedImage]) -> str:
        """Note images that coming requests will show; the engine may encode them while it has nothing else to do.

        Returns this replica's id. Raises ImagesMissingError.
        """
        self._ensure_started()
        self._engine.encode_images(list(self._images.images(images).values()))
        return self.replica_id

    async def _admit(self, requests: Sequence[GenerationRequest]) -> str:
        """Return once these requests may start, and the policy that they ask for."""
        self._ensure_started()
        policies = {request.policy for request in requests}
        if len(policies) != 1:
            raise EngineError("Requests for two policies cannot share a call: send two calls.")
        (policy,), wanted = policies, max(request.min_version for request in requests)
        if self._may_start(policy, wanted):
            return policy
        try:
            async with asyncio.timeout(self._serving.publish_timeout_s), self._changed:
                await self._changed.wait_for(lambda: self._may_start(policy, wanted))
        except TimeoutError as error:
            raise ReplicaUnavailableError(
                f"Replica {self.replica_id} is {self._life.state} and did not get version {wanted} of policy {policy} "
                f"within {self._serving.publish_timeout_s:g} s."
            ) from error
        return policy

    def _may_start(self, policy: str, wanted: int) -> bool:
        """Whether a request may start now. Raises ReplicaUnavailableError when it must go elsewhere."""
        admission = self._life.admission
        if admission is Admission.ELSEWHERE:
            raise ReplicaUnavailableError(
                f"Replica {self.replica_id} is {self._life.state}. {self._life.death or self._life.load_error}".strip()
            )
        try:
            return self._follower.serves(policy, wanted) and admission is Admission.NOW
        except NotLoadedError as error:
            raise ReplicaUnavailableError(f"Replica {self.replica_id}: {error}") from error

    @contextmanager
    def _counting_errors(self) -> Iterator[None]:
        try:
            yield
        except EngineError as error:
            self._tally.failed(error)
            if self._engine.dead:
                self._life.die(f"Its engine has died: {error}")
                raise ReplicaUnavailableError(f"The engine of replica {self.replica_id} has died: {error}") from error
            raise

    async def check_health(self) -> None:
        """Serve replaces the replica when this raises.

        An idle engine must generate a token, and following the registry may neither end nor fail for long.
        """
        self._ensure_started()
        if self._engine.dead:
            self._life.die("Its engine has died.")
        if ended := [task for task in self._tasks if task.done()]:
            self._life.die(f"Its task {ended[0].get_name()!r} has ended.")
        self._life.observe(self._engine.stats().progress, time.monotonic())
        if self._life.probe_due(time.monotonic()):
            await self._probe()
            async with self._changed:
                self._changed.notify_all()  # a request that waits for its version goes elsewhere
        if self._life.state is ReplicaState.DEAD:
            # Serve would ask twice more before it replaces the replica; a process that has ended it replaces at once.
            logger.error("replica %s ends itself. %s", self.replica_id, self._life.death)
            asyncio.get_running_loop().call_later(_EXIT_DELAY_S, os._exit, 1)
            raise EngineError(f"Replica {self.replica_id} is dead. {self._life.death}")

    async def _probe(self) -> None:
        timeout = self._serving.probe_timeout_s
        request = GenerationRequest("probe", self._probe_ids, SamplingParams(1, temperature=0.0))
        token = asyncio.ensure_future(self._engine.generate([request]))
        # The probe may wait in a queue behind hundreds of samples: a step of these proves that the engine works, too.
        step = asyncio.ensure_future(self._next_step())
        done, _ = await asyncio.wait({token, step}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for task in (token, step):
            task.cancel()
        if not done:
            self._life.fail_probe(f"Its engine did nothing for {timeout:g} s, nor did it generate a token")
        elif token in done and (error := token.exception()) is not None:
            self._life.fail_probe(f"Its engine could not generate a token: {error}")
            logger.warning("replica %s failed its probe: %s", self.replica_id, error)
        else:
            self._life.pass_probe(time.monotonic())

    async def _next_step(self) -> None:
        before = self._engine.stats().progress
        while self._engine.stats().progress == before:
            await asyncio.sleep(_STEP_POLL_S)

    async def __del__(self) -> None:
        """Serve awaits this when it stops the replica."""
        for task in self._tasks:
            task.cancel()
        await self._engine.close()

    async def status(self) -> dict[str, Any]:
        """This replica's id and report, and per policy the loaded version and how many parts of calls wait."""
        report = self._tally.report(self._engine.stats(), self._engine.version, self._life.state)
        waiting = self._gate.queue.waiting() if self._gate is not None else {}
        policies = {
            name: {"version": policy.loaded, "waiting": waiting.get(name, 0), "error": policy.error}
            for name, policy in self._follower.policies.items()
        }
        return {"replica_id": self.replica_id, **report, "policies": policies}


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
