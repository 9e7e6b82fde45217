"""The HTTP application: OpenAI's chat completions, `/generate`, models, health, metrics. It does not import Ray."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeVar, get_args

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from openai.types import Model
from openai.types.chat import ChatCompletion
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema
from pydantic_core import from_json
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from rl_vlm.config import HTTPSection
from rl_vlm.http import schema
from rl_vlm.http.gate import DEADLINE, JSON, Deadlines, Gate, RequestError, error_response
from rl_vlm.http.service import Backend, ServedModel, Service, as_request_error, json_bytes
from rl_vlm.models.loading import TextSide
from rl_vlm.types import RLVLMError, Role

_MAX_SHOWN = 200  # characters of an error that may come from the client
_MAX_FIELDS = 256  # of a body; more are not even named
_HEALTH_AGE_S = 0.5

M = TypeVar("M", bound=BaseModel)


async def _read(request: Request, kind: type[M]) -> M:
    """The body as a model. Parsed strictly: NaN, lone surrogates and deep nesting are errors. Raises RequestError."""
    message = await request.receive()  # not `request.body()`, which would keep it until the answer is sent
    try:
        content = from_json(message.pop("body"), allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise RequestError(400, f"The body is not valid JSON: {error}."[:_MAX_SHOWN]) from error
    if isinstance(content, dict) and len(content) > _MAX_FIELDS:
        raise RequestError(400, f"The body has {len(content)} fields: leave out those that are not known here.")
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise _validation_error(error) from None  # the error holds the client's data


def _json(model: BaseModel) -> Response:
    return Response(model.model_dump_json(), media_type=JSON)


def _validation_error(error: ValidationError) -> RequestError:
    """The first error in one sentence, without the client's data."""
    first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "model_type" and not first["loc"]:
        return RequestError(400, "The body must be a JSON object, sent with the header Content-Type: application/json.")
    path: list[str] = []
    for item in map(str, first["loc"]):
        # Tags of pydantic's unions are not fields of the request: content's forms, kinds of parts, roles of messages.
        of_message = path[-2:-1] == ["messages"] and item in get_args(Role)
        of_stop = path[-1:] == ["stop"] and item == "text"
        if not (of_message or of_stop) and item not in ("parts", "developer", *path[-1:]):
            path.append(item)
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "this field is not known here, or not with this value: leave it out"
    elif first["type"] == "model_type":
        message = "this must be a JSON object"
    param, message = ".".join(path)[:_MAX_SHOWN], message[:_MAX_SHOWN]
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
        limits: the server's limits.
        max_context: prompt and new tokens of one sample.
        token: the bearer token that clients must send; None: only this machine's own names are answered.
    """
    from rl_vlm import __version__

    deadlines = Deadlines()
    service = Service(backend, text, limits, max_context, deadlines)
    started = int(time.time())
    app = FastAPI(title="rl_vlm", version=__version__, docs_url=None, redoc_url=None)

    @app.exception_handler(RLVLMError)
    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return error_response(request.url.path, as_request_error(error))

    @app.exception_handler(StarletteHTTPException)
    async def refused(request: Request, error: StarletteHTTPException) -> Response:
        return error_response(request.url.path, RequestError(error.status_code, str(error.detail)), error.headers)

    @app.post(
        "/v1/chat/completions",
        response_model=ChatCompletion,
        responses={200: {"content": {"text/event-stream": {}}}, **_documented(schema.OpenAIError, *_FAILURES)},
        openapi_extra=_takes(schema.ChatRequest),
    )
    async def chat_completions(request: Request) -> Response:
        """OpenAI's chat completions, with images as data URIs."""
        body = await _read(request, schema.ChatRequest)
        model, deadline = await service.find(body.model), request.scope[DEADLINE]
        call = await service.read(service.reader.chat, body, model, "chatcmpl", deadline)
        reply = service.chat_reply(body, call)
        if body.stream:
            usage = bool(body.stream_options and body.stream_options.include_usage)
            return await service.stream(call, reply, usage)
        completion = await service.complete(call)
        return Response(json_bytes(reply.whole(completion)), media_type=JSON)

    @app.post(
        "/generate",
        response_model=schema.GenerateReply,
        responses=_documented(schema.DetailError, *_FAILURES),
        openapi_extra=_takes(schema.GenerateRequest),
    )
    async def generate(request: Request) -> Response:
        """A conversation in, a text out; thoughts are removed."""
        body = await _read(request, schema.GenerateRequest)
        model, deadline = await service.find(None), request.scope[DEADLINE]
        call = await service.read(service.reader.generate, body, model, "generate", deadline)
        completion = await service.complete(call)
        return _json(schema.GenerateReply(text=service.text(completion)))

    def card(model: ServedModel) -> Model:
        return Model(id=model.name, created=started, object="model", owned_by="rl_vlm")

    @app.get("/v1/models", response_model=schema.ModelList, responses=_documented(schema.OpenAIError, 401, 403))
    async def models() -> Response:
        """The models that are served."""
        return _json(schema.ModelList(data=[card(model) for model in await backend.models()]))

    @app.get(
        "/v1/models/{name:path}",
        response_model=Model,
        responses=_documented(schema.OpenAIError, 401, 403, 404),
    )
    async def one_model(name: str) -> Response:
        """One model by its name."""
        return _json(card(await service.find(name)))

    probe = _Probe(backend.health)

    @app.get("/health", response_model=schema.Health, responses=_documented(schema.Health, 503))
    async def health() -> Response:
        """200 while requests can be answered."""
        state = schema.Health(status="draining" if gate.draining else "ok", in_flight=gate.in_flight)
        try:
            await probe.check()
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


class _Probe:
    """Asks the backend at most every half second, because anybody may ask for the health."""

    def __init__(self, ask: Callable[[], Awaitable[None]]) -> None:
        self._ask = ask
        self._lock = asyncio.Lock()
        self._asked = float("-inf")
        self._error: RLVLMError | None = None

    async def check(self) -> None:
        """Raise what the backend raises."""
        async with self._lock:
            if time.monotonic() - self._asked > _HEALTH_AGE_S:
                self._error = None
                try:
                    await self._ask()
                except RLVLMError as error:
                    self._error = error
                self._asked = time.monotonic()
        if self._error is not None:
            raise self._error


def _takes(body: type[BaseModel]) -> dict[str, Any]:
    """The body of an operation for the schema. FastAPI does not see it: it would keep it until the answer is sent."""
    reference = {"$ref": f"#/components/schemas/{body.__name__}"}
    return {"requestBody": {"required": True, "content": {JSON: {"schema": reference}}}}


def _schema(app: FastAPI) -> dict[str, Any]:
    """FastAPI's schema with the bodies of requests; bad input is a 400 here, never FastAPI's 422."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    schemas = document["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    bodies: list[tuple[type[BaseModel], Literal["validation"]]] = [
        (schema.ChatRequest, "validation"),
        (schema.GenerateRequest, "validation"),
    ]
    schemas.update(models_json_schema(bodies, ref_template="#/components/schemas/{model}")[1]["$defs"])
    return document
