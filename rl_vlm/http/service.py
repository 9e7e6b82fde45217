"""Answers requests with a backend: finds the model, enforces deadlines, and turns streams into server-sent events."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel
from starlette.responses import StreamingResponse

from rl_vlm.config import HTTPSection
from rl_vlm.engines.base import BASE_MODEL
from rl_vlm.http.errors import RequestError, error_body
from rl_vlm.http.gate import Deadlines
from rl_vlm.http.metrics import HTTPMetrics
from rl_vlm.http.reader import RequestReader
from rl_vlm.http.replies import ChatReply, fingerprint
from rl_vlm.http.schema import ChatRequest
from rl_vlm.http.text import without_thoughts
from rl_vlm.models.loading import TextSide
from rl_vlm.types import Completion, GenerationRequest, RLVLMError, SampleChunk, UserInputError

logger = logging.getLogger("rl_vlm.http")


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
    """One request: what the engine is asked, the model, and the deadline in the event loop's time."""

    request: GenerationRequest
    model: ServedModel
    deadline: float


def _event(content: BaseModel | dict[str, Any]) -> bytes:
    data = content.model_dump_json() if isinstance(content, BaseModel) else json.dumps(content)
    return f"data: {data}\n\n".encode()


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
        """One whole answer."""
        try:
            async with self._deadlines.at(call.deadline):
                completion = await self._backend.generate(call.request)
        except TimeoutError as error:
            raise self._too_late() from error
        _check_version(call.model, completion.policy_version)
        self.metrics.completed(completion)
        return completion

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
                    if pieces := reply.chunks(chunk):
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
        if self._deadlines.stopping:
            return RequestError(503, "The server is shutting down: try again later.")
        return RequestError(504, f"No complete answer within {self._limits.deadline_s:g} s: ask for less, or later.")


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
