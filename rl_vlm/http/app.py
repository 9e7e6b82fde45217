"""The HTTP application of a served model: OpenAI's chat completions, `/generate`, models, health, metrics."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

from prometheus_client import generate_latest
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from rl_vlm.config import HTTPSection
from rl_vlm.http.backend import ServeBackend, ServedModel
from rl_vlm.http.gate import BODY, DEADLINE, JSON, Gate, RequestError, as_request_error, error_body
from rl_vlm.http.reader import RequestReader, return_freed_memory
from rl_vlm.http.replies import ChatReply
from rl_vlm.http.schema import ChatRequest, GenerateRequest, parse_body
from rl_vlm.models.loading import TextSide
from rl_vlm.safe_text import without_thoughts
from rl_vlm.types import Completion, GenerationRequest, RLVLMError, SampleChunk

_THREADS = 4  # that read requests: so many images are decoded at a time

B = TypeVar("B", ChatRequest, GenerateRequest)


class ModelApp:
    """Answers HTTP requests with a backend.

    Args:
        backend: answers generation requests.
        text: tokenizer, chat template and image geometry of the model.
        limits: the server's limits.
        max_context: prompt and new tokens of one sample.
        token: the bearer token that clients must send; None: only this machine's own names are answered.

    Attributes:
        gate: the ASGI application.
    """

    def __init__(
        self, backend: ServeBackend, text: TextSide, limits: HTTPSection, *, max_context: int, token: str | None = None
    ) -> None:
        return_freed_memory()
        self._backend = backend
        self._codec = text.codec
        self._limits = limits
        self._reader = RequestReader(text, limits, max_context)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="http-read")
        self._started = int(time.time())
        routes = [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/generate", self._generate, methods=["POST"]),
            Route("/v1/models", self._list_models),
            Route("/v1/models/{name:path}", self._show_model),
            Route("/health", self._show_health),
            Route("/metrics", self._show_metrics),
        ]
        self.gate = Gate(routes, limits, token)

    async def _chat(self, request: Request) -> Response:
        """OpenAI's chat completions, with images as data URIs."""
        body, deadline = parse_body(request.scope.pop(BODY), ChatRequest), request.scope[DEADLINE]
        async with self._in_time(deadline):
            model = await self._find(body.model)
            asked, prompt_tokens = await self._read(self._reader.chat, body, "chatcmpl", model)
            reply = ChatReply(self._codec, asked, body.model, prompt_tokens, body.logprobs)
            if not body.stream:
                completion = await self._complete(asked)
                return Response(json_bytes(reply.whole(completion)), media_type=JSON)
        # A failure before the first token is an HTTP error, a later one an event.
        chunks = self._chunks(asked, deadline)
        first = await anext(chunks)
        usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        events = self._events(first, chunks, reply, prompt_tokens, usage)
        return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def _generate(self, request: Request) -> Response:
        """A conversation in, a text out; thoughts are removed."""
        body = parse_body(request.scope.pop(BODY), GenerateRequest)
        async with self._in_time(request.scope[DEADLINE]):
            model = await self._find(None)
            asked, _ = await self._read(self._reader.generate, body, "generate", model)
            completion = await self._complete(asked)
        return JSONResponse({"text": without_thoughts(self._codec.decode(completion.samples[0].token_ids))})

    async def _list_models(self, _: Request) -> Response:
        """The models that are served."""
        return JSONResponse({"object": "list", "data": [self._card(model) for model in await self._backend.models()]})

    async def _show_model(self, request: Request) -> Response:
        """One model by its name."""
        return JSONResponse(self._card(await self._find(request.path_params["name"])))

    async def _show_health(self, _: Request) -> Response:
        """200 while requests can be answered."""
        state: dict[str, Any] = {"status": "ok", "models": [], "in_flight": self.gate.in_flight, "detail": ""}
        try:
            await self._backend.health()
            state["models"] = [model.name for model in await self._backend.models()]
        except RLVLMError as error:
            state |= {"status": "unavailable", "detail": str(error)}
        return JSONResponse(state, 200 if state["status"] == "ok" else 503)

    async def _show_metrics(self, _: Request) -> Response:
        """Prometheus' text format."""
        text = generate_latest(self.gate.metrics.registry).decode() + await self._backend.metrics()
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    def _card(self, model: ServedModel) -> dict[str, Any]:
        return {"id": model.name, "created": self._started, "object": "model", "owned_by": "rl_vlm"}

    @asynccontextmanager
    async def _in_time(self, deadline: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout_at(deadline):
                yield
        except TimeoutError as error:
            late = f"No complete answer within {self._limits.deadline_s:g} s: ask for less, or later."
            raise RequestError(504, late) from error

    async def _find(self, name: str | None) -> ServedModel:
        """The model of that name; the first one without a name. Raises RequestError."""
        models = await self._backend.models()
        chosen = next((model for model in models if name is None or model.name == name), None)
        if chosen is None:
            known = ", ".join(model.name for model in models)
            message = f"Model {name!r} is not served here: ask for one of {known}."
            raise RequestError(404, message, code="model_not_found", param="model")
        return chosen

    async def _read(
        self, read: Callable[[B, str, int], tuple[GenerationRequest, int]], body: B, prefix: str, model: ServedModel
    ) -> tuple[GenerationRequest, int]:
        """What the engine is asked, by a method of the reader on a thread; `prefix` begins the request's id."""
        name = f"{prefix}-{uuid.uuid4().hex}"
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, read, body, name, model.version)
        finally:
            # The handler keeps the body until it has answered, and encoded images may take megabytes.
            body.messages = []

    async def _complete(self, asked: GenerationRequest) -> Completion:
        """One whole answer."""
        completion = await self._backend.generate(asked)
        self._count(len(completion.prompt_ids), sum(len(sample.token_ids) for sample in completion.samples))
        return completion

    async def _chunks(self, asked: GenerationRequest, deadline: float) -> AsyncGenerator[SampleChunk, None]:
        """A stream, which must be whole and in time."""
        unfinished = asked.sampling.n
        async with aclosing(self._backend.stream(asked)) as source:
            while unfinished:
                async with self._in_time(deadline):
                    chunk = await anext(source, None)
                if chunk is None:
                    raise RequestError(500, "The stream broke off before its end: send the request again.")
                unfinished -= chunk.stop_reason is not None
                yield chunk

    async def _events(
        self,
        first: SampleChunk,
        chunks: AsyncGenerator[SampleChunk, None],
        reply: ChatReply,
        prompt_tokens: int,
        usage: bool,
    ) -> AsyncGenerator[bytes, None]:
        chunk: SampleChunk | None = first
        try:
            async with aclosing(chunks):
                while chunk is not None:
                    version = chunk.policy_version
                    if content := reply.chunk(chunk):
                        yield _event(content)
                    chunk = await anext(chunks, None)
            if usage:
                yield _event(reply.last_chunk(version))
            yield b"data: [DONE]\n\n"
        except Exception as error:  # whatever the error, the client gets it as an event
            yield _event(error_body(as_request_error(error)))
        finally:
            self._count(prompt_tokens, reply.num_sampled)

    def _count(self, prompt_tokens: int, sampled: int) -> None:
        self.gate.metrics.tokens.labels("prompt").inc(prompt_tokens)
        self.gate.metrics.tokens.labels("sampled").inc(sampled)


def json_bytes(content: dict[str, Any]) -> bytes:
    """JSON as clients get it; a log-probability that is not finite is null."""
    return to_json(content, inf_nan_mode="null")


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json_bytes(content) + b"\n\n"
