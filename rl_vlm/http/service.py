"""Answers requests with a backend: finds the model, enforces deadlines, and turns streams into server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from rl_vlm.config import HTTPSection
from rl_vlm.engines.base import BASE_MODEL
from rl_vlm.http.admission import Admission, Leases
from rl_vlm.http.deadlines import Deadlines
from rl_vlm.http.errors import RequestError, error_body
from rl_vlm.http.freed_memory import return_freed_memory
from rl_vlm.http.gate import BODY, DEADLINE
from rl_vlm.http.kv_room import KVRoom
from rl_vlm.http.metrics import HTTPMetrics
from rl_vlm.http.reader import RequestReader, num_values, shows_images
from rl_vlm.http.replies import ChatReply, fingerprint
from rl_vlm.http.schema import ChatRequest, GenerateRequest
from rl_vlm.http.text import without_thoughts
from rl_vlm.models.loading import TextSide
from rl_vlm.types import Completion, GenerationRequest, RLVLMError, SampleChunk, UserInputError

logger = logging.getLogger("rl_vlm.http")

_THREADS = 4  # that read requests with images, and as many without
_VALUES_HERE = 2000  # log-probabilities that are written on the event loop; more take milliseconds

B = TypeVar("B", bound=ChatRequest | GenerateRequest)
A = TypeVar("A")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A name that clients may ask for and the policy version behind it (`BASE_MODEL`: no adapter).

    `pinned`: only this very version may answer, not a newer one.
    """

    name: str
    version: int = BASE_MODEL
    pinned: bool = False


class Backend(Protocol):
    """The interface to an engine or a Serve application. Its errors are RLVLMErrors."""

    async def models(self) -> Sequence[ServedModel]:
        """The models that are served; the first is for clients that name none."""
        ...

    async def generate(self, request: GenerationRequest) -> Completion:
        """Answer one request; cancelling the call frees its place."""
        ...

    def stream(self, request: GenerationRequest) -> AsyncGenerator[SampleChunk, None]:
        """Answer one request piece by piece; closing the generator frees its place."""
        ...

    async def health(self) -> None:
        """Raise an RLVLMError when no request can be answered now."""
        ...

    async def metrics(self) -> str:
        """More lines in Prometheus' text format, or none."""
        ...


@dataclass(frozen=True, slots=True)
class Call:
    """One request: what the engine is asked, the tokens of its prompt, the model, and the deadline in the event loop's time."""

    request: GenerationRequest
    num_prompt_tokens: int
    model: ServedModel
    deadline: float


def _event(content: BaseModel | dict[str, Any] | str) -> bytes:
    data = content.model_dump_json() if isinstance(content, BaseModel) else content
    data = data if isinstance(data, str) else json.dumps(data)
    return f"data: {data}\n\n".encode()


class Service:
    """Answers requests with a backend."""

    def __init__(
        self,
        backend: Backend,
        text: TextSide,
        limits: HTTPSection,
        max_context: int,
        deadlines: Deadlines,
        kv_room: KVRoom | None = None,
    ) -> None:
        self._backend = backend
        self._codec = text.codec
        self._limits = limits
        self._deadlines = deadlines
        self.reader = RequestReader(text, limits, max_context, kv_room)
        self.metrics = HTTPMetrics()
        return_freed_memory()
        # Requests without images never wait for a thread that decodes one, nor short replies for one that writes a long one.
        self._with_images = ThreadPoolExecutor(_THREADS, thread_name_prefix="http-images")
        self._without_images = ThreadPoolExecutor(_THREADS, thread_name_prefix="http-texts")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="http-replies")
        self._admission = Admission(limits, deadlines, kv_room)

    async def encode(
        self,
        read: Callable[[B, str, int], tuple[GenerationRequest, int]],
        body: B,
        name: str,
        version: int,
        scope: Scope,
    ) -> tuple[GenerationRequest, int]:
        """What the engine is asked, by a method of `reader` on a thread; the body is let go."""
        pool = self._with_images if shows_images(body) else self._without_images
        loop = asyncio.get_running_loop()
        try:
            async with self._deadlines.at(scope[DEADLINE]):
                return await loop.run_in_executor(pool, read, body, name, version)
        except TimeoutError as error:
            raise self._too_late() from error
        finally:
            body.messages = []  # the texts of images, of which the handler would keep hold until it has answered
            scope[BODY].release()

    async def find(self, name: str | None) -> ServedModel:
        """The model of that name; the first one without a name."""
        models = await self._backend.models()
        found = next((model for model in models if name is None or model.name == name), None)
        if found is None:
            known = ", ".join(model.name for model in models)
            raise RequestError(
                404,
                f"Model {name!r} is not served here: ask for one of {known}.",
                code="model_not_found",
                param="model",
            )
        return found

    async def complete(self, call: Call) -> Completion:
        """One whole answer, without log-probabilities."""
        leases = await self._admission.enter(call.request, call.num_prompt_tokens, 0, call.deadline)
        try:
            return await self._completed(call)
        finally:
            leases.release()

    async def _completed(self, call: Call) -> Completion:
        try:
            async with self._deadlines.at(call.deadline):
                completion = await self._backend.generate(call.request)
        except TimeoutError as error:
            raise self._too_late() from error
        _check_version(call.model, completion.policy_version)
        self.metrics.completed(completion)
        return completion

    async def whole(self, call: Call, reply: ChatReply) -> Response:
        """One whole answer as JSON, once there is memory for it."""
        values = num_values(call.request.sampling) if reply.logprobs else 0
        leases = await self._admission.enter(call.request, call.num_prompt_tokens, values, call.deadline)
        try:
            completion = await self._completed(call)
            leases.leave_engine()
            content = await self._written(values, reply.whole, completion)
        finally:
            leases.release()
        return Response(content, media_type="application/json")

    async def _written(self, values: int, write: Callable[[A], T], what: A) -> T:
        """`write(what)`, on a thread where it takes long."""
        if values <= _VALUES_HERE:
            return write(what)
        return await asyncio.get_running_loop().run_in_executor(self._writer, write, what)

    def chat_reply(self, body: ChatRequest, request: GenerationRequest, num_prompt_tokens: int) -> ChatReply:
        """The writer of the answer to `request`."""
        return ChatReply(
            self._codec,
            request.request_id,
            body.model,
            sampling=request.sampling,
            num_prompt_tokens=num_prompt_tokens,
            logprobs=bool(body.logprobs),
        )

    def text(self, completion: Completion) -> str:
        """The answer of a request without stop strings, thoughts removed."""
        return without_thoughts(self._codec.decode(completion.samples[0].token_ids))

    async def stream(self, call: Call, reply: ChatReply, usage: bool) -> StreamingResponse:
        """Server-sent events. A failure before the first token is an HTTP error, a later one an event."""
        started = time.perf_counter()
        values = num_values(call.request.sampling) if reply.logprobs else 0
        leases = await self._admission.enter(call.request, call.num_prompt_tokens, values, call.deadline)
        try:
            source = self._backend.stream(call.request)
            first = await self._next(source, call.deadline)
        except BaseException:
            leases.release()
            raise
        self.metrics.first_token.observe(time.perf_counter() - started)
        events = self._events(first, source, call, reply, usage)
        return _LeasedStream(events, leases)

    async def _next(self, source: AsyncGenerator[SampleChunk, None], deadline: float) -> SampleChunk | None:
        try:
            async with self._deadlines.at(deadline):
                return await anext(source, None)
        except TimeoutError as error:
            raise self._too_late() from error

    async def _events(
        self,
        chunk: SampleChunk | None,
        source: AsyncGenerator[SampleChunk, None],
        call: Call,
        reply: ChatReply,
        usage: bool,
    ) -> AsyncGenerator[bytes, None]:
        version, unfinished = call.model.version, call.request.sampling.n
        async with aclosing(source):
            try:
                while chunk is not None:
                    version = chunk.policy_version
                    _check_version(call.model, version)
                    values = len(chunk.token_ids) * (1 + call.request.sampling.top_logprobs) if reply.logprobs else 0
                    if pieces := await self._written(values, reply.chunks, chunk):
                        yield b"".join(map(_event, pieces))
                    unfinished -= chunk.stop_reason is not None
                    chunk = await self._next(source, call.deadline)
                if unfinished:
                    raise RequestError(500, "The stream broke off before its end: send the request again.")
                if usage:
                    yield _event(reply.last_chunk())
                yield b"data: [DONE]\n\n"
            except Exception as error:  # whatever the error, the client gets it as an event
                self.metrics.stream_errors.inc()
                yield _event(error_body(as_request_error(error)))
            finally:
                self.metrics.answered(reply.num_prompt_tokens, reply.num_sampled, version)

    def _too_late(self) -> RequestError:
        return self._deadlines.too_late(self._limits.deadline_s)


class _LeasedStream(StreamingResponse):
    """Server-sent events that give something back when they are over, or are never sent because the client has gone."""

    def __init__(self, events: AsyncGenerator[bytes, None], leases: Leases) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._leases = leases

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._leases.release()


def _check_version(model: ServedModel, version: int) -> None:
    if model.pinned and version != model.version:
        raise RequestError(
            404,
            f"Model {model.name!r} was replaced by {fingerprint(version)} while the request waited.",
            code="model_not_found",
            param="model",
        )


def as_request_error(error: Exception) -> RequestError:
    """The error that a client may see; unexpected ones are logged and not shown."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, UserInputError):
        return RequestError(400, str(error))
    if isinstance(error, RLVLMError):
        # The first line only: Ray appends tracebacks.
        return RequestError(500, next(iter(str(error).splitlines()), "The engine failed."))
    logger.error("A request failed unexpectedly.", exc_info=error)
    return RequestError(500, "Internal error: the server's log says more.")
