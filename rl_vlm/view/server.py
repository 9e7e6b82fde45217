"""The server of the page: files of the front end, JSON, pictures. It reads, and changes nothing."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote

from pydantic_core import to_json
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.requests import Request, cookie_parser
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from rl_vlm.config import HTTPSection
from rl_vlm.http.gate import Gate, RequestError
from rl_vlm.view.library import Library
from rl_vlm.view.reader import NotThereError

PAGE = Path(__file__).parent / "page"
# Nothing in a run can become a program: scripts and styles are the files of this package, and nothing else is loaded.
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": CSP,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_COOKIE = "rl_vlm_token"
_TYPES = {"index.html": "text/html", "app.js": "text/javascript", "app.css": "text/css"}
_MEDIA = {"images": "image/png", "films": "image/gif"}


def page_app(library: Library, limits: HTTPSection, token: str | None) -> PageDoor:
    """The ASGI application of the page."""

    async def answer(request: Request) -> Response:
        text = request.query_params.get("text", "")
        content = await _in_thread(lambda: library.answer(request.path_params["path"], text))
        return Response(to_json(content, inf_nan_mode="null"), media_type="application/json")

    async def file(kind: str, request: Request) -> Response:
        run, name = request.path_params["run"], request.path_params["name"]
        content = await _in_thread(lambda: library.reader(run).file(kind, name))
        # A name stands for one content.
        return Response(
            content, media_type=_MEDIA[kind], headers={"Cache-Control": "private, max-age=86400, immutable"}
        )

    async def page(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in _TYPES:
            raise RequestError(404, "There is no such path.")
        return Response((PAGE / name).read_bytes(), media_type=_TYPES[name], headers={"Cache-Control": "no-cache"})

    routes = [
        Route("/", page),
        Route("/{name}", page),
        *(Route(f"/api/v1/runs/{{run}}/{kind}/{{name}}", partial(file, kind)) for kind in _MEDIA),
        Route("/api/v1/{path:path}", answer),
    ]
    return PageDoor(Gate(routes, limits, token), token)


class PageDoor:
    """An ASGI application before the gate: lets a browser in that was given the token in the address, once, and keeps
    it out of the address from then on. Every answer forbids programs other than the page's own."""

    def __init__(self, gate: Gate, token: str | None) -> None:
        self._gate, self._token = gate, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        if scope["type"] != "http" or self._token is None:
            await self._gate(scope, receive, guarded)
            return
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if scope["method"] == "GET" and scope["path"] == "/" and _equal(given, self._token):
            answer = RedirectResponse("./", 303)
            answer.set_cookie(_COOKIE, quote(self._token, safe=""), httponly=True, samesite="strict")
            await answer(scope, receive, guarded)
            return
        headers = MutableHeaders(scope=scope)
        cookie = cookie_parser(headers.get("cookie", "")).get(_COOKIE)
        if cookie and "authorization" not in headers:
            headers["authorization"] = f"Bearer {unquote(cookie)}"
        await self._gate(scope, receive, guarded)


def _equal(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(), token.encode())


async def _in_thread(read: Callable[[], Any]) -> Any:
    """What `read` reads in a thread; what a run does not hold is answered by 404."""
    try:
        return await run_in_threadpool(read)
    except NotThereError as error:
        raise RequestError(404, str(error)) from error
