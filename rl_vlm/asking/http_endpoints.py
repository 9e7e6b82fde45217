"""Endpoints over HTTP: OpenAI's chat completions, and the plain `/generate` of RL-VLM-F with a local model."""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, TypeVar

import httpx
from pydantic import AfterValidator, AliasPath, BaseModel, BeforeValidator, Field, ValidationError

from rl_vlm.asking.endpoints import Answer, Ask, EndpointError, Question, choice_probabilities
from rl_vlm.config.labels import EndpointSection
from rl_vlm.envs.address import is_loopback, token_header, url_host
from rl_vlm.safe_text import excerpt, keep_secret
from rl_vlm.types import Message, Part, UserInputError, as_encoded

M = TypeVar("M", bound=BaseModel)

_RETRYABLE_STATUS = (408, 409, 425, 429, 500, 502, 503, 504)
_BUSY_STATUS = (429, 503)
_MAX_REPLY_BYTES = 2**20  # thoughts and log-probabilities included
_HIGHEST_LOGPROB = 0.1  # 0, and what rounding may add


def _at(default: Any, *path: str | int) -> Any:
    return Field(default, validation_alias=AliasPath(*path))  # type: ignore[arg-type]  # the first part is a key


def _log_probability(value: float) -> float:
    if not value <= _HIGHEST_LOGPROB:
        raise ValueError("no log-probability")
    return value


class _Alternative(BaseModel):
    token: str
    logprob: Annotated[float, AfterValidator(_log_probability)]


# A number of tokens as an endpoint reports it; 0 for what is none.
_Count = Annotated[int, BeforeValidator(lambda value: value if type(value) is int and 0 <= value <= 10**9 else 0)]


class ChatCompletion(BaseModel):
    """What is read of a chat completion."""

    message: dict[str, Any] = _at(..., "choices", 0, "message")
    content: str | None = _at(None, "choices", 0, "message", "content")
    finish_reason: Any = _at(None, "choices", 0, "finish_reason")
    first_token: list[_Alternative] = _at([], "choices", 0, "logprobs", "content", 0, "top_logprobs")
    prompt_tokens: _Count = _at(0, "usage", "prompt_tokens")
    sampled_tokens: _Count = _at(0, "usage", "completion_tokens")


class GenerateReply(BaseModel):
    text: str


class _HTTPEndpoint(ABC):
    """One address, and a client for it while it is open."""

    def __init__(self, settings: EndpointSection, url: str, transport: httpx.AsyncBaseTransport | None) -> None:
        self._settings, self._url, self._transport = settings, url, transport
        self._has_answered = False

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Ask]:
        """See `Endpoint.open`."""
        token = token_header(self._settings.token_env) if self._settings.token_env else {}
        client = httpx.AsyncClient(
            headers={"Content-Type": "application/json", "Accept-Encoding": "identity", **token},
            timeout=self._settings.timeout_s,
            # Every pair is in flight at once: no request may wait for a free connection.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
            transport=self._transport,
            trust_env=not is_loopback(self._url),
        )
        async with client:
            yield functools.partial(self._ask, client)

    @abstractmethod
    async def _ask(self, client: httpx.AsyncClient, question: Question) -> Answer:
        """Ask one question. Raises EndpointError."""

    async def _post(self, client: httpx.AsyncClient, body: dict[str, Any], kind: type[M], what: str) -> M:
        """The reply, which `what` names in an error. Raises EndpointError."""
        url = self._url
        try:
            async with client.stream("POST", url, content=json.dumps(body)) as response:
                content = await self._read(response)
        except httpx.HTTPError as error:
            # A server that has never answered may have another address, so it is not waited for. A session waits for it
            # as a whole.
            gone = self._has_answered and isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            raise EndpointError(f"{url} gave no answer: {type(error).__name__} {error}".rstrip(), busy=gone) from error
        status, said = response.status_code, excerpt(content.decode("utf-8", "replace"), 300)
        if not response.is_success:
            pause = response.headers.get("retry-after", "")[:9]
            raise EndpointError(
                f"{url} answered with HTTP {status}: {said}",
                retryable=status in _RETRYABLE_STATUS,
                status=status,
                retry_after_s=float(pause) if pause.isdecimal() else 0.0,  # it may be a date
                busy=status in _BUSY_STATUS,
            )
        try:
            reply = kind.model_validate_json(bytes(content))
        except ValidationError as error:
            # What is no JSON may come from a proxy whose server is starting; JSON of another form stays as it is.
            retryable = error.errors()[0]["type"] == "json_invalid"
            raise EndpointError(f"{url} answered with no {what}: {said!r}", retryable) from error
        self._has_answered = True
        return reply

    async def _read(self, response: httpx.Response) -> bytearray:
        """At most `_MAX_REPLY_BYTES` of a reply, and no compressed one: a megabyte may unpack to a gigabyte."""
        encoding = response.headers.get("content-encoding", "identity")
        if encoding not in ("", "identity"):
            raise EndpointError(f"{self._url} sent a reply that cannot be unpacked ({encoding[:40]!r}).")
        content = bytearray()
        async for chunk in response.stream:  # type: ignore[union-attr]  # not yet unpacked
            content += chunk
            if len(content) > _MAX_REPLY_BYTES:
                raise EndpointError(f"{self._url} sent a reply of more than {_MAX_REPLY_BYTES} bytes.", retryable=False)
        return content


class OpenAIEndpoint(_HTTPEndpoint):
    """Asks for OpenAI's chat completions. `settings.url` is the base, such as http://127.0.0.1:8000/v1.

    Choices are enforced as vLLM does it, unless the endpoint refuses such a request.
    """

    def __init__(self, settings: EndpointSection, transport: httpx.AsyncBaseTransport | None = None) -> None:
        base = _checked_url(settings.url).rstrip("/").removesuffix("/chat/completions")
        super().__init__(settings, f"{base}/chat/completions", transport)
        self._enforces_choices = True

    async def _ask(self, client: httpx.AsyncClient, question: Question) -> Answer:
        body = {
            "model": self._settings.model,
            **_body(question, lambda uri: {"type": "image_url", "image_url": {"url": uri}}),
            "seed": question.seed % 2**31,
        }
        if question.choices and self._settings.logprobs:
            body |= {"logprobs": True, "top_logprobs": 20}
        if question.choices and self._enforces_choices:
            guided = {**body, "structured_outputs": {"choice": list(question.choices)}}
            try:
                return _answer(await self._post(client, guided, ChatCompletion, "chat completion"), question)
            except EndpointError as error:
                if error.status not in (400, 422):
                    raise
        reply = await self._post(client, body, ChatCompletion, "chat completion")
        # Only an answer tells why the first request was refused: a question that is too long is refused in every form.
        self._enforces_choices &= not question.choices
        return _answer(reply, question)


def _answer(reply: ChatCompletion, question: Question) -> Answer:
    first = [(token.token, token.logprob) for token in reply.first_token]
    return Answer(
        reply.content or "",
        reply.prompt_tokens,
        reply.sampled_tokens,
        reply.finish_reason == "length",
        choice_probabilities(first, question.choices),
    )


class GenerateEndpoint(_HTTPEndpoint):
    """Asks a server that speaks the plain `POST /generate` of RL-VLM-F with a local model: the reply is text alone."""

    def __init__(self, settings: EndpointSection, transport: httpx.AsyncBaseTransport | None = None) -> None:
        super().__init__(settings, _checked_url(settings.url or server_url()), transport)

    async def _ask(self, client: httpx.AsyncClient, question: Question) -> Answer:
        body = _body(question, lambda uri: {"type": "image", "image": uri})
        return Answer((await self._post(client, body, GenerateReply, "text")).text)


def server_url() -> str:
    """The address of a `/generate` server: SERVER_URL, else http://SERVER_HOST:SERVER_PORT/generate."""
    host, port = os.environ.get("SERVER_HOST") or "localhost", os.environ.get("SERVER_PORT") or "8000"
    return os.environ.get("SERVER_URL") or f"http://{url_host(host)}:{port}/generate"


def _checked_url(url: str) -> str:
    with contextlib.suppress(httpx.InvalidURL):
        address = httpx.URL(url)
        keep_secret(address.password)
        if address.scheme in ("http", "https") and address.host and (address.port or 0) <= 65_535:
            return url
    # It is not shown: the part that is wrong may be a password.
    raise UserInputError(
        "The endpoint must be an http or https address, such as http://HOST:PORT/PATH, with special characters of a "
        "password as %XX."
    )


def _body(question: Question, image: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """What both kinds of server are sent; `image` turns a data URI into a part of a message."""

    def part_of(part: Part) -> dict[str, Any]:
        if isinstance(part, str):
            return {"type": "text", "text": part}
        return image(f"data:image/png;base64,{base64.b64encode(as_encoded([part])[0].png).decode()}")

    messages = [without_tool_role(message) for message in question.messages]
    return {
        "messages": [{"role": message.role, "content": [*map(part_of, message.parts)]} for message in messages],
        "max_tokens": question.max_new_tokens,
        "temperature": question.temperature,
    }


def without_tool_role(message: Message) -> Message:
    """A tool's reply as the user's message that Qwen's chat template makes of it.

    The calls are in the policy's text, so they have no ids, and OpenAI's `tool` messages need one and take no images.
    """
    if message.role != "tool":
        return message
    return Message("user", ("<tool_response>\n", *message.parts, "\n</tool_response>"))
