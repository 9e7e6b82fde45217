"""Answers requests with a backend: finds the model, enforces deadlines, and turns streams into server-sent events."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pydantic_core import to_json
from starlette.responses import StreamingResponse

from rl_vlm.config import HTTPSection
from rl_vlm.engines.base import BASE_MODEL, RequestTooLargeError
from rl_vlm.http.gate import Deadlines, HTTPMetrics, RequestError, error_body
from rl_vlm.http.reader import RequestReader
from rl_vlm.http.replies import ChatReply, fingerprint
from rl_vlm.http.schema import ChatRequest, GenerateRequest
from rl_vlm.models.loading import TextSide
from rl_vlm.safe_text import without_thoughts
from rl_vlm.types import Completion, GenerationRequest, RLVLMError, SampleChunk, UserInputError

_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
_LARGE = 1 << 20  # bytes


def return_freed_memory() -> None:
    """Let this process allocate blocks of a MiB and more with mmap, so that `free` returns them. Needs glibc.

    By default glibc raises this threshold to 32 MiB. Pixels then lie in the heaps of the decoding threads between small
    blocks that stay, and the process keeps their memory (4.6 GiB after 128 images of 8 megapixels on four threads).
    """
    try:
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE)
    except (AttributeError, OSError):  # another C library
        return


logger = logging.getLogger("rl_vlm.http")

_THREADS = 4  # that read requests: so many images are decoded at a time

B = TypeVar("B", bound=ChatRequest | GenerateRequest)


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
    """One request to the engine, with the tokens of its prompt, its model and its deadline (the event loop's time)."""

    request: GenerationRequest
    num_prompt_tokens: int
    model: ServedModel
    deadline: float


class Service:
    """Answers requests with a backend."""

    def __init__(
        self, backend: Backend, text: TextSide, limits: HTTPSection, max_context: int, deadlines: Deadlines
    ) -> None:
        self._backend = backend
        self._codec = text.codec
        self._limits = limits
        self._deadlines = deadlines
        self.reader = RequestReader(text, limits, max_context)
        self.metrics = HTTPMetrics()
        return_freed_memory()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="http-read")

    async def find(self, name: str | None) -> ServedModel:
        """The model of that name; the first one without a name. Raises RequestError."""
        models = await self._backend.models()
        chosen = next((model for model in models if name is None or model.name == name), None)
        if chosen is None:
            known = ", ".join(model.name for model in models)
            raise _model_not_found(f"Model {name!r} is not served here: ask for one of {known}.")
        return chosen

    async def read(
        self,
        read: Callable[[B, str, int], tuple[GenerationRequest, int]],
        body: B,
        model: ServedModel,
        prefix: str,
        deadline: float,
    ) -> Call:
        """What the engine is asked, by a method of `reader` on a thread; `prefix` begins the request's id.

        Raises RequestError.
        """
        name = f"{prefix}-{uuid.uuid4().hex}"
        try:
            async with self._deadlines.at(deadline):
                reading = asyncio.get_running_loop().run_in_executor(self._threads, read, body, name, model.version)
                request, num_prompt_tokens = await reading
        except TimeoutError as error:
            raise self._too_late() from error
        finally:
            # The handler keeps the body until it has answered, and encoded images may take megabytes.
            body.messages = []
        return Call(request, num_prompt_tokens, model, deadline)

    async def complete(self, call: Call) -> Completion:
        """One whole answer. Raises RequestError."""
        try:
            async with self._deadlines.at(call.deadline):
                completion = await self._backend.generate(call.request)
        except TimeoutError as error:
            raise self._too_late() from error
        _check_version(call.model, completion.policy_version)
        self.metrics.completed(completion)
        return completion

    def chat_reply(self, body: ChatRequest, call: Call) -> ChatReply:
        """The writer of the answer to a call."""
        request, logprobs = call.request, bool(body.logprobs)
        return ChatReply(
            self._codec, request.request_id, body.model, request.sampling, call.num_prompt_tokens, logprobs
        )

    def text(self, completion: Completion) -> str:
        """The answer of a request without stop strings, thoughts removed."""
        return without_thoughts(self._codec.decode(completion.samples[0].token_ids))

    async def stream(self, call: Call, reply: ChatReply, usage: bool) -> StreamingResponse:
        """Server-sent events. A failure before the first token is an HTTP error, a later one an event."""
        started = time.perf_counter()
        source = self._backend.stream(call.request)
        first = await self._next(source, call.deadline)
        self.metrics.first_token.observe(time.perf_counter() - started)
        events = self._events(first, source, call, reply, usage)
        return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

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
                    if contents := reply.chunks(chunk):
                        yield b"".join(map(_event, contents))
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
        late = f"No complete answer within {self._limits.deadline_s:g} s: ask for less, or later."
        return self._deadlines.too_late(504, late)


def json_bytes(content: dict[str, Any]) -> bytes:
    """JSON as clients get it; a log-probability that is not finite is null."""
    return to_json(content, inf_nan_mode="null")


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json_bytes(content) + b"\n\n"


def _check_version(model: ServedModel, version: int) -> None:
    if model.pinned and version != model.version:
        raise _model_not_found(f"Model {model.name!r} was replaced by {fingerprint(version)} while the request waited.")


def _model_not_found(message: str) -> RequestError:
    return RequestError(404, message, code="model_not_found", param="model")


def as_request_error(error: Exception) -> RequestError:
    """The error that a client may see; unexpected ones are logged and not shown."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, RLVLMError):
        # The first line only: Ray appends tracebacks.
        sentence = next(iter(str(error).splitlines()), "The engine failed.")
        return RequestError(400 if _is_clients(error) else 500, sentence)
    logger.error("A request failed unexpectedly.", exc_info=error)
    return RequestError(500, "Internal error: the server's log says more.")


def _is_clients(error: BaseException) -> bool:
    """Whether the client must change its request.

    A replica's error is the `cause` of the RayTaskError that ours comes from.
    """
    reason = getattr(error.__cause__, "cause", error)
    return isinstance(error, UserInputError) or isinstance(reason, RequestTooLargeError)
