"""The HTTP application of a served model: OpenAI's chat completions, `/generate`, models, health, metrics."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any, TypeVar

from prometheus_client import generate_latest
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from rl_vlm.config import HTTPSection
from rl_vlm.engines.base import BASE_MODEL
from rl_vlm.engines.grammar_check import GrammarCheck
from rl_vlm.engines.grammars import Grammars
from rl_vlm.http.adapters import adapter_routes
from rl_vlm.http.backend import ServeBackend, ServedModel
from rl_vlm.http.gate import BODY, DEADLINE, JSON, Gate, RequestError, as_request_error, error_body
from rl_vlm.http.reader import RequestReader, return_freed_memory
from rl_vlm.http.replies import Asked, ChatReply, ReplyForm, TextReply
from rl_vlm.http.responses import ResponseReply, ResponsesRequest
from rl_vlm.http.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
    parse_body,
)
from rl_vlm.models.images import TextSide
from rl_vlm.safe_text import without_thoughts
from rl_vlm.types import Completion, GenerationRequest, RLVLMError, SampleChunk

_THREADS = 4  # that read requests: so many images are decoded at a time

B = TypeVar("B", bound=Any)


class ModelApp:
    """Answers HTTP requests with a backend; `gate` is the ASGI application. `max_context` bounds prompt and new tokens
    of one sample; `token`: see `Gate`. Without `strict_tools` a tool's `strict` binds required calls alone."""

    def __init__(
        self,
        backend: ServeBackend,
        text: TextSide,
        limits: HTTPSection,
        *,
        max_context: int,
        token: str | None = None,
        strict_tools: bool = True,
    ) -> None:
        return_freed_memory()
        self._backend, self._codec, self._limits = backend, text.codec, limits
        self._reader, self._max_context = RequestReader(text, limits, max_context, strict_tools), max_context
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="http-read")
        # One form is checked at a time, beside requests without one.
        self._forms = ThreadPoolExecutor(1, thread_name_prefix="http-form")
        self._grammars = Grammars(text)
        self._form_check = GrammarCheck(self._codec.tokenizer_json(), text.vocab_size, self._codec.end_of_turn_id)
        self._started = int(time.time())
        answered: dict[str, tuple[Any, ...]] = {
            "/v1/chat/completions": (ChatRequest, self._reader.chat, "chatcmpl", ChatReply),
            "/v1/completions": (CompletionRequest, self._reader.completions, "cmpl", TextReply),
            "/v1/responses": (ResponsesRequest, self._reader.chat, "resp", ResponseReply),
        }
        routes = [
            *(Route(path, partial(self._answer, *how), methods=["POST"]) for path, how in answered.items()),
            Route("/generate", self._generate, methods=["POST"]),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
            Route("/tokenizer_info", self._show_tokenizer),
            Route("/v1/models", self._list_models),
            Route("/v1/models/{name:path}", self._show_model),
            Route("/version", self._show_version),
            Route("/ping", self._show_health),
            Route("/health", self._show_health),
            Route("/metrics", self._show_metrics),
            *(adapter_routes(backend) if limits.adapter_root else ()),
        ]
        self.gate = Gate(routes, limits, token)

    async def _answer(
        self,
        kind: type[B],
        read: Callable[[B, str, int], list[Asked]],
        prefix: str,
        form: type[ReplyForm],
        request: Request,
    ) -> Response:
        """Sample answers: a whole reply, or with `stream` its events."""
        body, deadline = parse_body(request.scope.pop(BODY), kind), request.scope[DEADLINE]
        headers = {"X-Ignored-Fields": ", ".join(body.ignored_fields)} if body.ignored_fields else {}
        async with self._in_time(deadline):
            name, model = await self._find(body.model)
            asked = await self._read(read, body, prefix, model)
            reply = form(self._codec, asked, name, body)
            if not body.stream:
                completions = await asyncio.gather(*(self._complete(one.request) for one in asked))
                return Response(json_bytes(reply.whole(completions)), media_type=JSON, headers=headers)
        # A failure before the first token is an HTTP error, a later one an event.
        chunks = self._chunks(asked, deadline)
        first = await anext(chunks)
        headers["Cache-Control"] = "no-cache"
        return StreamingResponse(self._events(first, chunks, reply), media_type="text/event-stream", headers=headers)

    async def _generate(self, request: Request) -> Response:
        """A conversation in, a text out; thoughts are removed."""
        body = parse_body(request.scope.pop(BODY), GenerateRequest)
        async with self._in_time(request.scope[DEADLINE]):
            _, model = await self._find(None)
            (asked,) = await self._read(self._reader.generate, body, "generate", model)
            completion = await self._complete(asked.request)
        return JSONResponse({"text": without_thoughts(self._codec.decode(completion.samples[0].token_ids))})

    async def _tokenize(self, request: Request) -> Response:
        """The token ids of a prompt or a conversation."""
        body = parse_body(request.scope.pop(BODY), TokenizeRequest)
        async with self._in_time(request.scope[DEADLINE]):
            await self._find(body.model)
            ids = await asyncio.get_running_loop().run_in_executor(self._threads, self._reader.tokens, body)
        texts = [self._codec.text_of([token]) for token in ids] if body.return_token_strs else None
        answer = {"count": len(ids), "max_model_len": self._max_context, "tokens": ids.tolist(), "token_strs": texts}
        return JSONResponse(answer)

    async def _detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        body = parse_body(request.scope.pop(BODY), DetokenizeRequest)
        if max(body.tokens, default=0) >= self._codec.num_known_tokens:
            raise RequestError(400, f"{max(body.tokens)} is no token's id.", param="tokens")
        return JSONResponse({"prompt": self._codec.text_of(body.tokens)})

    async def _show_tokenizer(self, _: Request) -> Response:
        """The tokenizer's settings and its chat template."""
        return JSONResponse(self._codec.tokenizer_info())

    async def _show_version(self, _: Request) -> Response:
        """The version of this package."""
        return JSONResponse({"version": version("rl_vlm")})

    async def _list_models(self, _: Request) -> Response:
        """The names that the field `model` may have now."""
        models = await self._backend.models()
        return JSONResponse({"object": "list", "data": [self._card(*one) for one in models.items()]})

    async def _show_model(self, request: Request) -> Response:
        """One model's card: its context length and its modalities."""
        return JSONResponse(self._card(*await self._find(request.path_params["name"])))

    async def _show_health(self, _: Request) -> Response:
        """200 if a replica answers, else 503; `/health` needs no token."""
        state: dict[str, Any] = {"status": "ok", "models": [], "in_flight": self.gate.in_flight, "detail": ""}
        try:
            await self._backend.health()
            state["models"] = [*await self._backend.models()]
        except RLVLMError as error:
            state |= {"status": "unavailable", "detail": str(error)}
        return JSONResponse(state, 200 if state["status"] == "ok" else 503)

    async def _show_metrics(self, _: Request) -> Response:
        """Counts and times in Prometheus' text format."""
        text = generate_latest(self.gate.registry).decode() + await self._backend.metrics()
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    def _card(self, name: str, of: ServedModel) -> dict[str, Any]:
        card = {"id": name, "created": self._started, "object": "model", "owned_by": "rl_vlm"}
        can = {"max_model_len": self._max_context, "input_modalities": ["text", "image"], "output_modalities": ["text"]}
        return {**card, "root": of.folder or name, "parent": of.parent, **can}

    @asynccontextmanager
    async def _in_time(self, deadline: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout_at(deadline):
                yield
        except TimeoutError as error:
            late = f"No complete answer within {self._limits.deadline_s:g} s: ask for less, or later."
            raise RequestError(504, late) from error

    async def _find(self, name: str | None) -> tuple[str, ServedModel]:
        """A model and its name, `NAME@latest` too; the first one without a name. Raises RequestError."""
        models = await self._backend.models()
        if name is None:
            return next(iter(models.items()))
        newest = {f"{name}@latest": one for name, one in models.items() if one.parent and not one.exact}
        if (found := (newest | models).get(name)) is None:
            message = f"Model {name!r} is not served here: ask for one of {', '.join(models)}."
            raise RequestError(404, message, code="model_not_found", param="model")
        return name, found

    async def _read(
        self, read: Callable[[B, str, int], list[Asked]], body: B, prefix: str, model: ServedModel
    ) -> list[Asked]:
        """What the engine is asked, by a method of the reader on a thread; `prefix` begins the request's id."""
        name = f"{prefix}-{uuid.uuid4().hex}"
        try:
            loop = asyncio.get_running_loop()
            asked = await loop.run_in_executor(self._threads, read, body, name, model.version)
            if any(one.request.sampling.bound for one in asked):
                await loop.run_in_executor(self._forms, self._check_forms, asked)
            return [replace(one, request=replace(one.request, policy=model.policy, exact=model.exact)) for one in asked]
        finally:
            # The handler keeps the body until it has answered, and encoded images may take megabytes.
            for field in {"messages", "images"} & type(body).model_fields.keys():
                setattr(body, field, [])

    def _check_forms(self, asked: Sequence[Asked]) -> None:
        """Raise UserInputError for a form that cannot be followed: an engine would fail later, or end."""
        for lark in {self._grammars.lark(one.request.sampling) for one in asked} - {None}:
            self._form_check.check(lark or "")

    async def _complete(self, asked: GenerationRequest) -> Completion:
        completion = (await self._backend.call([asked]))[0]
        self._count(len(completion.prompt_ids), sum(len(sample.token_ids) for sample in completion.samples))
        return completion

    async def _chunks(self, asked: Sequence[Asked], deadline: float) -> AsyncGenerator[SampleChunk, None]:
        """The chunks of all prompts, one prompt after the other, their samples numbered through."""
        first = 0
        for one in asked:
            unfinished = count = one.request.sampling.n
            async with aclosing(self._backend.stream(one.request)) as source:
                while unfinished:
                    async with self._in_time(deadline):
                        chunk = await anext(source, None)
                    if chunk is None:
                        raise RequestError(500, "The stream broke off before its end: send the request again.")
                    unfinished -= chunk.stop_reason is not None
                    yield replace(chunk, number=first + chunk.number) if first else chunk
            first += count

    async def _events(
        self, chunk: SampleChunk | None, chunks: AsyncGenerator[SampleChunk, None], reply: ReplyForm
    ) -> AsyncGenerator[bytes, None]:
        version = BASE_MODEL
        try:
            async with aclosing(chunks):
                while chunk is not None:
                    version = chunk.policy_version
                    for content in reply.chunk(chunk):
                        yield _event(content)
                    chunk = await anext(chunks, None)
            for content in reply.end(version):
                yield _event(content)
            if reply.says_done:
                yield b"data: [DONE]\n\n"
        except Exception as error:  # whatever the error, the client gets it as an event
            yield _event(error_body(as_request_error(error)))
        finally:
            self._count(reply.num_prompt_tokens, reply.num_sampled)

    def _count(self, prompt_tokens: int, sampled: int) -> None:
        self.gate.tokens.labels("prompt").inc(prompt_tokens)
        self.gate.tokens.labels("sampled").inc(sampled)


def json_bytes(content: dict[str, Any]) -> bytes:
    """JSON as clients get it; a log-probability that is not finite is null."""
    return to_json(content, inf_nan_mode="null")


def _event(content: dict[str, Any]) -> bytes:
    kind = content.get("type")  # of the responses API
    return (f"event: {kind}\n".encode() if isinstance(kind, str) else b"") + b"data: " + json_bytes(content) + b"\n\n"
