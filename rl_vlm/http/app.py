"""The HTTP application: OpenAI's chat completions, `/generate`, models, health, metrics. It does not import Ray."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Callable, Coroutine
from typing import Any, Literal, TypeVar, get_args

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema
from pydantic_core import from_json
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from rl_vlm.config import HTTPSection
from rl_vlm.http import schema
from rl_vlm.http.deadlines import Deadlines
from rl_vlm.http.errors import RequestError, error_response
from rl_vlm.http.gate import BODY, DEADLINE, JSON, Gate
from rl_vlm.http.kv_room import KVRoom
from rl_vlm.http.service import Backend, Call, Service, as_request_error
from rl_vlm.models.loading import TextSide
from rl_vlm.types import RLVLMError, Role

_MAX_SHOWN = 200  # characters of an error that may come from the client
_MAX_FIELDS = 256  # of a body; more are not even named
_HEALTH_AGE_S = 0.5

M = TypeVar("M", bound=BaseModel)


async def _read(request: Request, kind: type[M]) -> M:
    """The body as a model. Parsed strictly: NaN, lone surrogates and deep nesting are refused. Raises RequestError."""
    try:
        content = from_json(request.scope[BODY].take(), allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise RequestError(400, f"The body is not valid JSON: {error}."[:_MAX_SHOWN]) from error
    if isinstance(content, dict) and len(content) > _MAX_FIELDS:
        raise RequestError(400, f"The body has {len(content)} fields: leave out those that are not known here.")
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise _validation_error(error) from None  # the error holds the client's data


def _json(model: BaseModel) -> Response:
    return Response(model.model_dump_json(), media_type="application/json")


def _validation_error(error: ValidationError) -> RequestError:
    """The first error in one sentence, without the client's data."""
    first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "model_type":
        return RequestError(400, "The body must be a JSON object, sent with the header Content-Type: application/json.")
    place: list[str] = []
    for item in map(str, first["loc"]):
        # Tags of pydantic's unions are not fields of the request: content's forms, kinds of parts, roles of messages.
        of_message = place[-2:-1] == ["messages"] and item in get_args(Role)
        of_stop = place[-1:] == ["stop"] and item == "text"
        if not (of_message or of_stop) and item not in ("parts", "developer", *place[-1:]):
            place.append(item)
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "this field is not known here: leave it out"
    param, message = ".".join(place)[:_MAX_SHOWN], message[:_MAX_SHOWN]
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
    kv_room: KVRoom | None = None,
) -> Gate:
    """The ASGI application.

    Args:
        backend: answers requests.
        text: tokenizer, chat template and image geometry of the model.
        limits: the server's limits.
        max_context: prompt and new tokens of one sample.
        token: the bearer token that clients must send; None: only this machine's own names are answered.
        kv_room: bounds what is in the engine at a time; None: the engine does so itself.
    """
    from rl_vlm import __version__

    deadlines = Deadlines()
    service = Service(backend, text, limits, max_context, deadlines, kv_room)
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
        response_model=schema.ChatCompletion,
        responses={200: {"content": {"text/event-stream": {}}}, **_documented(schema.OpenAIError, *_FAILURES)},
        openapi_extra=_takes(schema.ChatRequest),
    )
    async def chat_completions(request: Request) -> Response:
        """OpenAI's chat completions, with images as data URIs."""
        body = await _read(request, schema.ChatRequest)
        model, name = await service.find(body.model), f"chatcmpl-{uuid.uuid4().hex}"
        asked, length = await service.encode(service.reader.chat, body, name, model.version, request.scope)
        call, reply = Call(asked, length, model, request.scope[DEADLINE]), service.chat_reply(body, asked, length)
        if body.stream:
            usage = bool(body.stream_options and body.stream_options.include_usage)
            return await service.stream(call, reply, usage)
        return await service.whole(call, reply)

    @app.post(
        "/generate",
        response_model=schema.GenerateReply,
        responses=_documented(schema.DetailError, *_FAILURES),
        openapi_extra=_takes(schema.GenerateRequest),
    )
    async def generate(request: Request) -> Response:
        """A conversation in, a text out; thoughts are removed."""
        body = await _read(request, schema.GenerateRequest)
        model, name = await service.find(None), f"generate-{uuid.uuid4().hex}"
        asked, length = await service.encode(service.reader.generate, body, name, model.version, request.scope)
        completion = await service.complete(Call(asked, length, model, request.scope[DEADLINE]))
        return _json(schema.GenerateReply(text=service.text(completion)))

    @app.get("/v1/models", response_model=schema.ModelList, responses=_documented(schema.OpenAIError, 401, 403))
    async def models() -> Response:
        """The models that are served."""
        cards = [schema.ModelCard(id=model.name, created=started) for model in await backend.models()]
        return _json(schema.ModelList(data=cards))

    @app.get(
        "/v1/models/{name:path}",
        response_model=schema.ModelCard,
        responses=_documented(schema.OpenAIError, 401, 403, 404),
    )
    async def one_model(name: str) -> Response:
        """One model by its name."""
        return _json(schema.ModelCard(id=(await service.find(name)).name, created=started))

    checked = _Shared(backend.health, _HEALTH_AGE_S)

    @app.get("/health", response_model=schema.Health, responses=_documented(schema.Health, 503))
    async def health() -> Response:
        """200 while requests can be answered."""
        state = schema.Health(status="draining" if gate.draining else "ok", in_flight=gate.in_flight)
        try:
            await checked.result()
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


class _Shared:
    """A call that many ask for at once, such as a probe without a token: it is made once, and its outcome told for `age_s`."""

    def __init__(self, call: Callable[[], Coroutine[Any, Any, None]], age_s: float) -> None:
        self._call, self._age_s = call, age_s
        self._made: asyncio.Task[None] | None = None
        self._ended = -math.inf

    async def result(self) -> None:
        """Raise what the call raises."""
        if self._made is None or (self._made.done() and time.monotonic() - self._ended > self._age_s):
            self._made = asyncio.ensure_future(self._call())
            self._made.add_done_callback(self._note)
        await asyncio.shield(self._made)

    def _note(self, made: asyncio.Task[None]) -> None:
        self._ended = time.monotonic()
        if not made.cancelled():
            made.exception()  # it has been seen, even where all who asked have gone


def _takes(body: type[BaseModel]) -> dict[str, Any]:
    """The operation's body for the schema: FastAPI does not see it, because it would keep it in memory until the answer is sent."""
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
