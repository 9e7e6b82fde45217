"""VLMServer: one replica of the Serve deployment, with one engine."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import replace
from pathlib import Path

import ray
from ray import serve
from ray.serve._private import replica

from rl_vlm.batches import in_batches
from rl_vlm.config import CommonConfig, PolicyConfig
from rl_vlm.engines.base import BASE_MODEL, Engine, EngineError
from rl_vlm.engines.memory import max_kv_tokens
from rl_vlm.machine import available_memory
from rl_vlm.models.loading import load_text_side
from rl_vlm.models.memory.reading import read_shape
from rl_vlm.models.reference import ModelReference
from rl_vlm.serving.counters import ReplicaTally
from rl_vlm.serving.fair_queue import QUANTUM, FairQueue, cost_of
from rl_vlm.serving.follower import Follower, NotLoadedError
from rl_vlm.serving.health import Lifecycle, ReplicaState
from rl_vlm.serving.ray_metrics import RayMetrics
from rl_vlm.serving.registry import app_name, registry_name
from rl_vlm.tracing import finished
from rl_vlm.types import (
    POLICY,
    Completion,
    EncodedImage,
    GenerationRequest,
    Message,
    RLVLMError,
    SampleChunk,
    SamplingParams,
)
from rl_vlm.waiting import all_or_none

logger = logging.getLogger("ray.serve")

_EXIT_DELAY_S = 0.5  # so that the reason reaches Serve's log
_STEP_POLL_S = 0.1  # how often a probe checks whether the engine has done a step
_QUEUE_TOKENS = 262_144  # prompt and new tokens of the samples that a shared replica works on at once, of all runs
_REPORT_S = 2.0  # how often counts go to Ray's metrics


def keep_to_loopback() -> None:
    """On a node whose address is loopback, as of a private cluster, let this process's replica listen there alone.

    Serve opens a port for calls between deployments on every interface, where whoever has Ray's token may send pickles.
    It has no setting for that; this replaces a private function of Serve's, which is why Ray's version is pinned
    exactly. Serve opens the port after it has made the deployment's object, so call this from the constructor.
    """
    if ray.is_initialized() and ipaddress.ip_address(ray.util.get_node_ip_address()).is_loopback:
        listen = replica.add_port_to_grpc_server
        replica.add_port_to_grpc_server = lambda server, address: listen(server, address.replace("[::]", "127.0.0.1"))


class ReplicaUnavailableError(RLVLMError):
    """This replica cannot answer now; the client tries again, on any replica.

    Do: nothing: the client tries again.
    """


def build_engine(model: Path, config: CommonConfig) -> Engine:
    """The engine that the configuration names; `auto` is vLLM on a GPU and transformers without one."""
    serving = config.serving
    in_flight = config.rollout.in_flight_updates if isinstance(config, PolicyConfig) else None
    import torch

    from rl_vlm.models.devices import replica_on_gpu

    on_gpu = replica_on_gpu(serving)
    name = serving.engine if serving.engine != "auto" else ("vllm" if on_gpu else "transformers")
    if name == "vllm":
        from rl_vlm.engines.vllm_engine import VLLMEngine

        return VLLMEngine(model, config, in_flight)
    from rl_vlm.engines.transformers_engine import TransformersEngine

    return TransformersEngine(
        model,
        dtype=config.model.dtype,
        device="cuda" if on_gpu else "cpu",
        max_context=serving.max_context,
        max_rows=serving.max_rows,
        max_kv_tokens=max_kv_tokens(
            config,
            read_shape(model),
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
        merged_bytes=serving.sharing.merged_gib * 2**30 if config.many_policies else math.inf,
    )


class VLMServer:
    """One replica: an engine that follows the registry of its service, and holds a request until it has the version
    that the request asks for. Requests of runs that share it enter in fair turns."""

    def __init__(self, model: ModelReference, config: CommonConfig, run_id: str, namespace: str) -> None:
        keep_to_loopback()
        folder = model.on_this_node()
        self._engine = build_engine(folder, config)
        self._serving, self._run_id = config.serving, run_id
        self.replica_id: str = serve.get_replica_context().replica_id.unique_id
        self._life = Lifecycle(config.serving.probe_after_s, load_patience_s=config.serving.publish_timeout_s)
        self._tally = ReplicaTally()
        self._metrics = RayMetrics(
            run=config.name, policy=POLICY, part="serving", app=app_name(run_id), replica=self.replica_id
        )
        text = load_text_side(folder, config.model.pixels)
        self._count_image_tokens = text.images.count_tokens
        self._probe_ids = text.codec.encode_prompt([Message.of("user", "1")]).token_ids
        self._changed = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []
        self._queue = FairQueue(_QUEUE_TOKENS) if config.serving.shared else None
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
        if not self._tasks:  # there is no event loop before the first call
            work = {"following the registry": self._follower.run(), "reporting metrics": self._report()}
            self._tasks = [asyncio.create_task(coroutine, name=name) for name, coroutine in work.items()]

    def _forget(self, policy: str) -> None:
        if self._queue is not None:
            self._queue.forget(policy)
        self._tally.forget(policy)

    def _end_application(self) -> None:
        """Delete the application of a run that was killed: its replicas would hold their GPUs for ever."""
        logger.error("replica %s: the registry of %s is gone; its application ends", self.replica_id, self._run_id)
        # Asking Serve's controller blocks.
        threading.Thread(target=lambda: serve.delete(app_name(self._run_id), _blocking=False), daemon=True).start()

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(_REPORT_S)
            try:
                self._tally.send(self._metrics, self._engine.stats(), self._engine.version)
            except Exception as error:  # a replica goes on without metrics
                logger.warning("replica %s cannot report its metrics: %r", self.replica_id, error)

    async def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        """Answer a batch of one policy. Raises ReplicaUnavailableError or EngineError."""
        arrived, arrived_ns = time.monotonic(), time.time_ns()
        policy = await self._admit(requests)
        admitted = time.monotonic()
        with self._counting_errors():
            completions = await self._in_turns(policy, requests)
        seconds = time.monotonic() - arrived
        for request, completion in zip(requests, completions, strict=True):
            self._sign(request, completion, arrived_ns, admitted - arrived, seconds)
        self._forget_if_gone(policy)
        return completions

    async def _in_turns(self, policy: str, requests: list[GenerationRequest]) -> list[Completion]:
        if (queue := self._queue) is None:
            return await self._engine.generate(requests)

        async def enter(part: list[GenerationRequest]) -> list[Completion]:
            async with queue.entered(policy, sum(map(cost_of, part))):
                return await self._engine.generate(part)

        # In parts of about one turn each, so that a large call cannot hold the engine for long.
        parts = in_batches(requests, lambda part, one: sum(map(cost_of, [*part, one])) <= QUANTUM)
        answers = await all_or_none([enter(part) for part in parts])
        return [completion for part in answers for completion in part]

    def _forget_if_gone(self, policy: str) -> None:
        if policy not in self._follower.policies:  # it went while the request ran, which has counted it anew
            self._forget(policy)

    def _sign(
        self, request: GenerationRequest, completion: Completion, arrived_ns: int, admitted_s: float, seconds: float
    ) -> None:
        """Write into an answer who gave it and, where it is traced, when what was done; and count it."""
        prompt_tokens, version = len(completion.prompt_ids), completion.policy_version
        tokens = sum(len(sample.token_ids) for sample in completion.samples)
        object.__setattr__(completion, "replica_id", self.replica_id)
        if request.trace:
            parts = {"admit": admitted_s, "queue": completion.queue_s, "generate": completion.generate_s}
            spans = finished(
                request.trace, f"replica-{self.replica_id}", "engine", arrived_ns, seconds, parts,
                version=version, prompt_tokens=prompt_tokens, tokens=tokens,
            )  # fmt: skip
            object.__setattr__(completion, "spans", spans)
        times = {"queue_seconds": completion.queue_s, "request_seconds": seconds}
        self._tally.answered(completion.policy, prompt_tokens, tokens, version, **times)

    async def stream(self, request: GenerationRequest) -> AsyncIterator[SampleChunk]:
        """Answer one request piece by piece. Raises what `generate` raises, also between two pieces."""
        arrived = time.monotonic()
        policy = await self._admit([request])
        first: float | None = None
        sampled, version = 0, BASE_MODEL
        async with AsyncExitStack() as stack:
            if self._queue is not None:
                await stack.enter_async_context(self._queue.entered(policy, cost_of(request)))
            stack.enter_context(self._counting_errors())
            chunks = await stack.enter_async_context(aclosing(self._engine.stream(request)))  # type: ignore[type-var]
            async for chunk in chunks:
                first = first or time.monotonic() - arrived
                sampled, version = sampled + len(chunk.token_ids), max(version, chunk.policy_version)
                yield replace(chunk, replica_id=self.replica_id)
        images = sum(self._count_image_tokens(image.width, image.height) - 1 for image in request.images)
        times = {"time_to_first_token_seconds": first, "request_seconds": time.monotonic() - arrived}
        self._tally.answered(policy, len(request.prompt_ids) + images, sampled, version, **times)
        self._forget_if_gone(policy)

    async def encode_images(self, images: list[EncodedImage]) -> None:
        """Note images that coming requests will show; the engine may encode them while it has nothing else to do."""
        self._ensure_started()
        self._engine.encode_images(images)

    async def _admit(self, requests: Sequence[GenerationRequest]) -> str:
        """Return once these requests may start, and the policy that they ask for."""
        self._ensure_started()
        policy, wanted = requests[0].policy, max(request.min_version for request in requests)
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
        """Raises ReplicaUnavailableError when the request must go elsewhere."""
        if self._life.rejects:
            raise ReplicaUnavailableError(
                f"Replica {self.replica_id} is {self._life.state}. {self._life.death or self._life.load_error}".strip()
            )
        try:
            return self._follower.serves(policy, wanted) and self._life.ready
        except NotLoadedError as error:
            raise ReplicaUnavailableError(f"Replica {self.replica_id}: {error}") from error

    @contextmanager
    def _counting_errors(self) -> Iterator[None]:
        try:
            yield
        except EngineError as error:
            self._tally.counts["errors_total", type(error).__name__] += 1
            if self._engine.dead:
                self._life.die(f"Its engine has died: {error}")
                raise ReplicaUnavailableError(f"The engine of replica {self.replica_id} has died: {error}") from error
            raise

    async def check_health(self) -> None:
        """Serve replaces the replica when this raises: an idle engine must generate a token, and following the registry
        may neither end nor fail for long."""
        self._ensure_started()
        if self._engine.dead:
            self._life.die("Its engine has died.")
        if ended := [task for task in self._tasks if task.done()]:
            self._life.die(f"Its task {ended[0].get_name()!r} has ended.")
        self._life.observe(self._engine.stats().progress, time.monotonic())
        if self._life.probe_due(time.monotonic()):
            await self._probe()
            while not (self._life.proven or self._life.death):  # so that Serve counts it among failed starts
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

        async def next_step() -> None:
            before = self._engine.stats().progress
            while self._engine.stats().progress == before:
                await asyncio.sleep(_STEP_POLL_S)

        # The probe may wait in a queue behind hundreds of samples: a step of these proves that the engine works, too.
        step = asyncio.ensure_future(next_step())
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

    async def __del__(self) -> None:
        """Serve awaits this when it stops the replica."""
        for task in self._tasks:
            task.cancel()
        await self._engine.close()
