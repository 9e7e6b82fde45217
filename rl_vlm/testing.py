"""Stand-ins for tests, yours included: an engine, a client, an env runner and an endpoint without Ray, weights or GPU.

They keep the protocols of the real ones, answer as a function says, and record what they were asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from rl_vlm.asking import Answer, Ask, Question
from rl_vlm.config import PolicyConfig
from rl_vlm.engines.base import Engine, EngineError, EngineStats, check_version, expand_prompt
from rl_vlm.models.images import TextSide
from rl_vlm.models.loading import load_text_side, resolve_model
from rl_vlm.models.weights import WeightPayload
from rl_vlm.rollout.env_runner import RolloutWorker
from rl_vlm.rollout.tasks import RolloutResult, RolloutTask
from rl_vlm.types import (
    Completion,
    EncodedImage,
    GenerationRequest,
    RLVLMError,
    Sample,
    SampleChunk,
    StopReason,
    TrajectoryGroup,
)

# The answer to sample k of a request: a text that ends its turn, a text with another reason to stop, or an error.
Script = Callable[[GenerationRequest, int], "str | tuple[str, StopReason] | Exception"]


class ScriptedEngine:
    """An engine whose samples are the texts of `script(request, k)`; see `engines.base.Engine`.

    It writes the texts in the tokens of `text`. Token k of a sample has the log-probability -(0.5 + k / 100). A text
    that is longer than `max_new_tokens` is cut off.
    """

    def __init__(self, text: TextSide, script: Script = lambda request, k: "ok", max_context: int = 4096) -> None:
        self.text, self.script, self.max_context = text, script, max_context
        self.requests: list[GenerationRequest] = []
        self.loaded: list[WeightPayload] = []
        self.announced: list[EncodedImage] = []  # by `encode_images`
        self.dropped: list[str] = []  # policies
        self.version, self.dead, self.asleep = 0, False, False
        self._sampled = 0

    def _sample(self, request: GenerationRequest, number: int) -> Sample:
        said = self.script(request, number)
        if isinstance(said, Exception):
            raise said
        words, stop = said if isinstance(said, tuple) else (said, StopReason.END_OF_TURN)
        ids = self.text.codec.encode_text(words)
        if stop is StopReason.END_OF_TURN:
            ids = np.append(ids, np.int32(self.text.codec.end_of_turn_id))
        if len(ids) > (limit := request.sampling.max_new_tokens):
            ids, stop = ids[:limit], StopReason.LENGTH
        self._sampled += len(ids)
        return Sample(ids.astype(np.int32), -0.5 - np.arange(len(ids), dtype=np.float32) / 100, stop)

    async def _answer(self, request: GenerationRequest) -> Completion:
        self.requests.append(request)
        await asyncio.sleep(0)
        while self.asleep and not self.dead:
            await asyncio.sleep(0.001)
        if self.dead:
            raise EngineError("The engine is closed.")
        check_version(request, self.version)
        prompt = expand_prompt(request, self.text, self.max_context)
        samples = tuple(self._sample(request, k) for k in range(request.sampling.n))
        return Completion(request.request_id, prompt, samples, self.version, policy=request.policy)

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        return [await self._answer(request) for request in requests]

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[SampleChunk, None]:
        """One token at a time."""
        completion = await self._answer(request)
        for number, sample in enumerate(completion.samples):
            last = len(sample.token_ids) - 1
            for k in range(last + 1):
                part, stop = slice(k, k + 1), sample.stop_reason if k == last else None
                yield SampleChunk(number, sample.token_ids[part], sample.logprobs[part], self.version, stop)

    def encode_images(self, images: Sequence[EncodedImage]) -> None:
        self.announced += images

    async def load_adapter(self, payload: WeightPayload) -> None:
        self.loaded.append(payload)
        self.version = payload.version

    async def drop_policy(self, policy: str) -> None:
        self.dropped.append(policy)

    async def sleep(self) -> None:
        self.asleep = True

    async def wake(self) -> None:
        self.asleep = False

    def stats(self) -> EngineStats:
        return EngineStats(requests=len(self.requests), generated_tokens=self._sampled, adapter_swaps=len(self.loaded))

    async def close(self) -> None:
        self.dead = True


class EngineClient:
    """A client (see `serving.client.PolicyClient`) of any engine in this process."""

    def __init__(self, engine: Engine, replica_id: str = "here") -> None:
        self.engine, self.replica_id = engine, replica_id
        self.requests: list[GenerationRequest] = []
        self.announced: list[EncodedImage] = []
        self.retries = 0

    async def generate(self, request: GenerationRequest) -> Completion:
        self.requests.append(request)
        return replace((await self.engine.generate([request]))[0], replica_id=self.replica_id)

    async def encode_images(self, images: Sequence[Sequence[EncodedImage]]) -> None:
        shown = [image for entry in images for image in entry]
        self.announced += shown
        self.engine.encode_images(shown)


class LocalRunner:
    """An env runner in this process: plays the episodes of a run's environments and rewards them.

    `engine` answers, or, where it is a `Script`, a `ScriptedEngine` with the chat template of `run.model.path`.
    """

    def __init__(self, run: PolicyConfig, engine: Engine | Script) -> None:
        model = resolve_model(run.model.path)
        if inspect.isroutine(engine):
            engine = ScriptedEngine(load_text_side(model, run.model.pixels), engine, run.serving.max_context)
        self.client = EngineClient(cast(Engine, engine))
        self._worker = RolloutWorker(run, "test", model, client=self.client)

    def sample(self, *, tasks: list[RolloutTask]) -> RolloutResult:
        """Sample all tasks. Failures are data in the result, never exceptions."""
        return asyncio.run(self._worker.run(tasks))

    def play(self, index: int, size: int = 1, **task: Any) -> TrajectoryGroup:
        """`size` episodes of an item, with their conversations; `task` are further fields of `RolloutTask`.

        Raises RLVLMError where an episode fails.
        """
        given = {"split": "train", "seed": index, "sampling_seed": index, "temperature": 1.0, "min_version": 0}
        one = RolloutTask(group_id=f"g{index}", index=index, size=size, **{**given, "record": True, **task})
        result = self.sample(tasks=[one])
        if result.lost:
            raise RLVLMError(result.lost[one.group_id])
        return result.groups[0]

    def stop(self) -> None:
        """Close the environments."""
        self._worker.close_envs()


class ScriptedEndpoint:
    """An endpoint (see `asking.Endpoint`) that answers each question as a function says: with a text, an `Answer`, an
    awaitable of one, or by raising an error."""

    def __init__(self, answer: Callable[[Question], Any]) -> None:
        self.answer = answer
        self.questions: list[Question] = []

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Ask]:
        yield self._ask

    async def _ask(self, question: Question) -> Answer:
        self.questions.append(question)
        found = self.answer(question)
        if inspect.isawaitable(found):
            found = await found
        return found if isinstance(found, Answer) else Answer(found, prompt_tokens=10, sampled_tokens=2)


class LocalActor:
    """An object in this process that is called as a Ray actor is: `actor.method.remote(...)` returns what the method
    returns."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return _Method(getattr(self._target, name))


class _Method:
    def __init__(self, call: Callable[..., Any]) -> None:
        self.remote = call
