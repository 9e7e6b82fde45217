"""The HTTP application: OpenAI's chat completions, `/generate`, models, health, metrics. It does not import Ray."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine
from typing import Any, get_args

from fastapi import FastAPI, HTTPException
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic_core import from_json
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from rl_vlm.config import HTTPSection
from rl_vlm.http import schema
from rl_vlm.http.errors import RequestError, error_response
from rl_vlm.http.gate import DEADLINE, Deadlines, Gate
from rl_vlm.http.service import Backend, Call, Service, as_request_error
from rl_vlm.models.loading import TextSide
from rl_vlm.types import RLVLMError, Role

_MAX_SHOWN = 200  # characters of an error that may come from the client


class _JSONRequest(Request):
    async def json(self) -> Any:
        """Parse the body strictly: NaN, lone surrogates and deep nesting are refused."""
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


def _validation_error(error: RequestValidationError) -> RequestError:
    """The first error in one sentence, without the client's data."""
    if isinstance(error.body, bytes):
        return RequestError(400, "The body must be a JSON object, sent with the header Content-Type: application/json.")
    first = error.errors()[0]
    place: list[str] = []
    for item in map(str, first["loc"][1:]):
        # Tags of pydantic's unions are not fields of the request: content's forms, kinds of parts, roles of messages.
        of_message = place[-2:-1] == ["messages"] and item in get_args(Role)
        if not of_message and item not in ("parts", "developer", *place[-1:]):
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
    app.router.route_class = _JSONRoute

    @app.exception_handler(RLVLMError)
    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return error_response(request.url.path, as_request_error(error))

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
        model, name = await service.find(body.model), f"chatcmpl-{uuid.uuid4().hex}"
        asked, length = await asyncio.to_thread(service.reader.chat, body, name, model.version)
        call, reply = Call(asked, model, request.scope[DEADLINE]), service.chat_reply(body, asked, length)
        if body.stream:
            usage = bool(body.stream_options and body.stream_options.include_usage)
            return await service.stream(call, reply, usage)
        return _json(reply.whole(await service.complete(call)))

    @app.post("/generate", response_model=schema.GenerateReply, responses=_documented(schema.DetailError, *_FAILURES))
    async def generate(body: schema.GenerateRequest, request: Request) -> Response:
        """A conversation in, a text out; thoughts are removed."""
        model, name = await service.find(None), f"generate-{uuid.uuid4().hex}"
        asked, _ = await asyncio.to_thread(service.reader.generate, body, name, model.version)
        completion = await service.complete(Call(asked, model, request.scope[DEADLINE]))
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
    """FastAPI's schema without its status 422 for every operation: bad input is a 400 here."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
    return document
