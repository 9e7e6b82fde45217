"""The HTTP application: OpenAI's chat completions, `/generate`, models, health, metrics. It knows no Ray."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import FastAPI, HTTPException
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic_core import from_json
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from rl_vlm.config import HTTPSection
from rl_vlm.engines.base import BASE_MODEL
from rl_vlm.http import schema
from rl_vlm.http.errors import RequestError, error_body, error_response
from rl_vlm.http.gate import DEADLINE, Deadlines, Gate
from rl_vlm.http.metrics import HTTPMetrics
from rl_vlm.http.reader import RequestReader
from rl_vlm.http.replies import ChatReply, fingerprint
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
    """What the HTTP side needs of an engine or of a Serve application. Its errors are RLVLMErrors."""

    async def models(self) -> Sequence[ServedModel]:
        """What is served; the first is the one for clients that name none."""
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


class _JSONRequest(Request):
    async def json(self) -> Any:
        """Parsed strictly: no NaN, no lone surrogates, no bottomless nesting."""
        try:
            return from_json(await self.body(), allow_inf_nan=False, cache_strings="keys")
        except ValueError as error:
            raise HTTPException(400, f"The body is not valid JSON: {error}.") from error


class _JSONRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's own, with the parser above."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_JSONRequest(request.scope, request.receive))

        return handle


def _json(model: BaseModel) -> Response:
    return Response(model.model_dump_json(), media_type="application/json")


def _event(content: BaseModel | dict[str, Any]) -> bytes:
    data = content.model_dump_json() if isinstance(content, BaseModel) else json.dumps(content)
    return f"data: {data}\n\n".encode()


class _Service:
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

    async def complete(self, request: GenerationRequest, model: ServedModel, deadline: float) -> Completion:
        """One whole answer."""
        try:
            async with self._deadlines.at(deadline):
                completion = await self._backend.generate(request)
        except TimeoutError as error:
            raise self._too_late() from error
        _check_version(model, completion.policy_version)
        self.metrics.completed(completion)
        return completion

    def chat_reply(self, body: schema.ChatRequest, request: GenerationRequest, num_prompt_tokens: int) -> ChatReply:
        """The writer of the answer to `request`."""
        return ChatReply(
            self._codec,
            request.request_id,
            body.model,
            stop=request.sampling.stop,
            num_prompt_tokens=num_prompt_tokens,
            logprobs=bool(body.logprobs),
        )

    def text(self, completion: Completion) -> str:
        """The answer of a request without stop strings, thoughts removed."""
        return without_thoughts(self._codec.decode(completion.samples[0].token_ids))

    async def stream(
        self, request: GenerationRequest, model: ServedModel, reply: ChatReply, usage: bool, deadline: float
    ) -> StreamingResponse:
        """Server-sent events. What fails before the first token is an ordinary error, what fails later an event."""
        started = time.perf_counter()
        source = self._backend.stream(request)
        first = await self._next(source, deadline)
        self.metrics.first_token.observe(time.perf_counter() - started)
        events = self._events(first, source, request.sampling.n, model, reply, usage, deadline)
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
        unfinished: int,
        model: ServedModel,
        reply: ChatReply,
        usage: bool,
        deadline: float,
    ) -> AsyncGenerator[bytes, None]:
        version = model.version
        async with aclosing(source):
            try:
                while chunk is not None:
                    version = chunk.policy_version
                    _check_version(model, version)
                    if pieces := reply.chunks(chunk):
                        yield b"".join(map(_event, pieces))
                    unfinished -= chunk.stop_reason is not None
                    chunk = await self._next(source, deadline)
                if unfinished:
                    raise RequestError(500, "The stream broke off before its end: send the request again.")
                if usage:
                    yield _event(reply.last_chunk())
                yield b"data: [DONE]\n\n"
            except Exception as error:  # a stream never ends silently, whatever happened
                self.metrics.stream_errors.inc()
                yield _event(error_body(_as_request_error(error)))
            finally:
                self.metrics.answered(reply.num_prompt_tokens, reply.num_sampled, version)

    def _too_late(self) -> RequestError:
        if self._deadlines.hastened:
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


def _as_request_error(error: Exception) -> RequestError:
    """What a client may know of an error; surprises are logged and not shown."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, UserInputError):
        return RequestError(400, str(error))
    if isinstance(error, RLVLMError):
        return RequestError(500, str(error))
    logger.error("A request failed unexpectedly.", exc_info=error)
    return RequestError(500, "Internal error: the server's log says more.")


def _validation_error(error: RequestValidationError) -> RequestError:
    """The first thing that is wrong, in one sentence and without what was sent."""
    if isinstance(error.body, bytes):
        return RequestError(400, "The body must be a JSON object, sent with the header Content-Type: application/json.")
    first = error.errors()[0]
    place: list[str] = []
    for item in map(str, first["loc"][1:]):
        if item not in ("parts", *place[-1:]):  # tags of unions
            place.append(item)
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "this field is not known here: leave it out"
    param = ".".join(place)
    return RequestError(400, f"{param}: {message}." if param else f"{message}.", param=param or None)


def _documented(error: type[BaseModel], *statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": error} for status in statuses}


_FAILURES = (400, 401, 403, 404, 408, 413, 429, 500, 503, 504)


def build_http_app(
    backend: Backend,
    text: TextSide,
    limits: HTTPSection,
    *,
    max_context: int,
    token: str | None = None,
) -> Gate:
    """The ASGI application.

    Args:
        backend: answers requests.
        text: tokenizer, chat template and image geometry of the model.
        limits: what is refused.
        max_context: prompt and new tokens of one sample.
        token: the bearer token that clients must send; None: only this machine's own names are answered.
    """
    from rl_vlm import __version__

    deadlines = Deadlines()
    service = _Service(backend, text, limits, max_context, deadlines)
    started = int(time.time())
    app = FastAPI(title="rl_vlm", version=__version__, docs_url=None, redoc_url=None)
    app.router.route_class = _JSONRoute

    @app.exception_handler(RLVLMError)
    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return error_response(request.url.path, _as_request_error(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return error_response(request.url.path, _validation_error(error))

    @app.exception_handler(StarletteHTTPException)
    async def refused(request: Request, error: StarletteHTTPException) -> Response:
        return error_response(request.url.path, RequestError(error.status_code, str(error.detail)), error.headers)

    @app.post(
        "/v1/chat/completions",
        response_model=schema.ChatCompletion,
        responses={200: {"content": {"text/event-stream": {}}}, **_documented(schema.OpenAIError, *_FAILURES)},
    )
    async def chat_completions(body: schema.ChatRequest, request: Request) -> Response:
        """OpenAI's chat completions, with images as data URIs."""
        model, deadline = await service.find(body.model), request.scope[DEADLINE]
        name = f"chatcmpl-{uuid.uuid4().hex}"
        asked, length = await asyncio.to_thread(service.reader.chat, body, name, model.version)
        reply = service.chat_reply(body, asked, length)
        if body.stream:
            usage = bool(body.stream_options and body.stream_options.include_usage)
            return await service.stream(asked, model, reply, usage, deadline)
        return _json(reply.whole(await service.complete(asked, model, deadline)))

    @app.post("/generate", response_model=schema.GenerateReply, responses=_documented(schema.DetailError, *_FAILURES))
    async def generate(body: schema.GenerateRequest, request: Request) -> Response:
        """A conversation in, a text out; thoughts are removed."""
        model, deadline = await service.find(None), request.scope[DEADLINE]
        name = f"generate-{uuid.uuid4().hex}"
        asked, _ = await asyncio.to_thread(service.reader.generate, body, name, model.version)
        return _json(schema.GenerateReply(text=service.text(await service.complete(asked, model, deadline))))

    @app.get("/v1/models", response_model=schema.ModelList, responses=_documented(schema.OpenAIError, 401, 403))
    async def models() -> Response:
        """What is served."""
        cards = [schema.ModelCard(id=model.name, created=started) for model in await backend.models()]
        return _json(schema.ModelList(data=cards))

    @app.get(
        "/v1/models/{name:path}",
        response_model=schema.ModelCard,
        responses=_documented(schema.OpenAIError, 401, 403, 404),
    )
    async def one_model(name: str) -> Response:
        """One of them."""
        return _json(schema.ModelCard(id=(await service.find(name)).name, created=started))

    @app.get("/health", response_model=schema.Health, responses=_documented(schema.Health, 503))
    async def health() -> Response:
        """200 while requests can be answered."""
        state = schema.Health(status="draining" if gate.draining else "ok", in_flight=gate.in_flight)
        try:
            await backend.health()
            state.models = [model.name for model in await backend.models()]
        except RLVLMError as error:
            state.status, state.detail = "unavailable", str(error)
        return JSONResponse(state.model_dump(), 200 if state.status == "ok" else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Prometheus' text format."""
        text = service.metrics.text() + await backend.metrics()
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _schema(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
    routes = [route.path for route in app.routes if isinstance(route, APIRoute)]
    gate = Gate(app, limits, token, service.metrics, deadlines, routes)
    return gate


def _schema(app: FastAPI) -> dict[str, Any]:
    """FastAPI's, without the 422 that it expects every operation to answer with: bad input is a 400 here."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
    return document
