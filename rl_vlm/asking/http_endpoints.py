"""Endpoints by HTTP: OpenAI's chat completions, and the plain `/generate` of RL-VLM-F with a local model."""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import os
import reprlib
import zlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx

from rl_vlm.asking.endpoints import Answer, Ask, EndpointError, Question, choice_probabilities
from rl_vlm.config.labels import EndpointSection
from rl_vlm.envs.adapters.address import is_loopback
from rl_vlm.safe_text import excerpt, keep_secret
from rl_vlm.types import Message, UserInputError, as_encoded

_RETRYABLE_STATUS = (408, 409, 425, 429, 500, 502, 503, 504)
_BUSY_STATUS = (429, 503)
_MAX_REPLY_BYTES = 8 * 2**20
_MAX_ANSWER = 2**20  # characters, thoughts included
_MOST_TOKENS = 10**9
_LAST_PORT = 65_535
_BAD_URL = (
    "The endpoint's address cannot be read: give http://HOST:PORT/PATH, with special characters of a password as %XX."
)
_MAX_ALTERNATIVES = 100  # of the first token
# Ways to enforce choices, in the order in which `auto` tries them.
_FORMS = ("structured_outputs", "guided_choice", "none")


class OpenAIEndpoint:
    """Asks an endpoint that speaks OpenAI's chat completions. `settings.url` is the base, such as http://127.0.0.1:8000/v1.

    Where choices are enforced with guidance `auto`, it begins with the first of `_FORMS` and goes on to the next form when a
    request is refused or an answer is none of the choices.
    """

    def __init__(self, settings: EndpointSection, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._settings, self._transport = settings, transport
        self._url = _checked_url(settings.url).rstrip("/")
        if not self._url.endswith("/chat/completions"):
            self._url += "/chat/completions"
        self._form = 0 if settings.guidance == "auto" else _FORMS.index(settings.guidance)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Ask]:
        """See `Endpoint.open`."""
        async with _http(self._settings, self._url, self._transport) as client:
            server = _Server(client, self._url)
            yield functools.partial(self._ask, server)

    async def _ask(self, server: _Server, question: Question) -> Answer:
        form = self._form
        while True:
            unguided = self._settings.guidance != "auto" or not question.choices or _FORMS[form] == "none"
            try:
                reply = await server.post(self._body(question, _FORMS[form]))
            except EndpointError as error:
                if unguided or error.status not in (400, 422):
                    raise
            else:
                answer = _read_completion(reply, question)
                if unguided or answer.text.strip() in question.choices:
                    # Not before: a question that is refused in every form, such as one that is too long, says nothing about forms.
                    self._form = max(self._form, form)
                    return answer
            # Refused or ignored. Other questions in flight may have found a later form.
            form = max(self._form, form + 1)

    def _body(self, question: Question, form: str) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._settings.model,
            "messages": [_message(message, _openai_image) for message in question.messages],
            "max_tokens": question.max_new_tokens,
            "temperature": question.temperature,
            "seed": question.seed % 2**31,
        }
        if not question.choices:
            return body
        if form == "structured_outputs":
            body["structured_outputs"] = {"choice": list(question.choices)}
        elif form == "guided_choice":
            body["guided_choice"] = list(question.choices)
        if self._settings.logprobs:
            body |= {"logprobs": True, "top_logprobs": 20}
        return body


class GenerateEndpoint:
    """Asks a server that speaks the plain `POST /generate` of RL-VLM-F with a local model: the reply is text alone."""

    def __init__(self, settings: EndpointSection, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._settings, self._transport = settings, transport
        self._url = _checked_url(settings.url or server_url())

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Ask]:
        """See `Endpoint.open`."""
        async with _http(self._settings, self._url, self._transport) as client:
            server = _Server(client, self._url)

            async def ask(question: Question) -> Answer:
                body = {
                    "messages": [_message(message, _plain_image) for message in question.messages],
                    "max_tokens": question.max_new_tokens,
                    "temperature": question.temperature,
                }
                reply = await server.post(body)
                if not isinstance(reply.get("text"), str):
                    raise EndpointError(f"The server's reply holds no text: {_excerpt(reply)}", retryable=False)
                return Answer(_bounded(reply["text"]))

            yield ask


def server_url(environment: dict[str, str] | None = None) -> str:
    """The address of a `/generate` server: SERVER_URL, else http://SERVER_HOST:SERVER_PORT/generate."""
    known = dict(os.environ) if environment is None else environment
    host, port = known.get("SERVER_HOST") or "localhost", known.get("SERVER_PORT") or "8000"
    return known.get("SERVER_URL") or f"http://{url_host(host)}:{port}/generate"


def url_host(host: str) -> str:
    """A host as a URL has it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _checked_url(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise UserInputError(f"The endpoint {url!r} must be an http or https address.")
    try:
        address = httpx.URL(url)
    except httpx.InvalidURL as error:  # neither is shown: the part that is wrong may be a password
        raise UserInputError(_BAD_URL) from error
    keep_secret(address.password)
    if not address.host or (address.port or 0) > _LAST_PORT:
        raise UserInputError(_BAD_URL)
    return url


def _http(settings: EndpointSection, url: str, transport: httpx.AsyncBaseTransport | None) -> httpx.AsyncClient:
    headers = {"Accept-Encoding": "gzip, deflate", **(_token_header(settings.token_env) if settings.token_env else {})}
    # Every pair is in flight at once: no request may wait for a free connection.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
    direct = is_loopback(url)
    return httpx.AsyncClient(
        headers=headers, timeout=settings.timeout_s, limits=limits, transport=transport, trust_env=not direct
    )


def _token_header(variable: str) -> dict[str, str]:
    """The header with a variable's token. Raises UserInputError, which does not show it, for one that no header can hold."""
    token = os.environ.get(variable, "").strip()  # a token that was read from a file ends with a line break
    if not (token.isascii() and (token.isprintable() or not token)):
        raise UserInputError(f"The token in {variable} must be printable ASCII text on one line: set it again.")
    keep_secret(token)  # whatever the variable is called: an endpoint may send it back
    return {"Authorization": f"Bearer {token}"} if token else {}


class _Server:
    """One address, while a client for it is open."""

    def __init__(self, client: httpx.AsyncClient, url: str) -> None:
        self._client, self._url = client, url
        self._has_answered = False

    async def post(self, body: dict[str, Any]) -> dict[str, Any]:
        """The reply, a JSON object. Raises EndpointError."""
        url, content = self._url, bytearray()
        try:
            async with self._client.stream("POST", url, json=body) as response:
                unpack = _Unpacker(response.headers.get("content-encoding", ""))
                assert isinstance(response.stream, httpx.AsyncByteStream)
                async for chunk in response.stream:  # as it was sent: see _Unpacker
                    content += unpack(chunk, _MAX_REPLY_BYTES + 1 - len(content))
                    if len(content) > _MAX_REPLY_BYTES:
                        raise EndpointError(
                            f"{url} sent a reply of more than {_MAX_REPLY_BYTES} bytes.", retryable=False
                        )
        except UnicodeEncodeError as error:
            raise EndpointError(f"A question holds text that is no Unicode ({error}).", retryable=False) from error
        except (zlib.error, ValueError) as error:
            raise EndpointError(f"{url} sent a reply that cannot be unpacked ({error}).") from error
        except httpx.HTTPError as error:
            # One that has not answered before may have another address: that is an error soon, and a session waits for it as a whole.
            gone = self._has_answered and isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            raise EndpointError(f"{url} gave no answer: {type(error).__name__} {error}".rstrip(), busy=gone) from error
        text = content.decode("utf-8", "replace")
        if response.status_code != 200:
            raise EndpointError(
                f"{url} answered with HTTP {response.status_code}: {excerpt(text, 300)}",
                retryable=response.status_code in _RETRYABLE_STATUS,
                status=response.status_code,
                retry_after_s=_seconds(response.headers.get("retry-after", "")),
                busy=response.status_code in _BUSY_STATUS,
            )
        try:
            reply = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise EndpointError(f"{url} answered with something that is no JSON: {excerpt(text, 200)!r}") from error
        if not isinstance(reply, dict):
            raise EndpointError(f"{url} answered with a {type(reply).__name__}, not an object.", retryable=False)
        self._has_answered = True
        return reply


class _Unpacker:
    """Undoes gzip and deflate, as far as asked: httpx would unpack a megabyte to a gigabyte before anyone could look."""

    def __init__(self, encoding: str) -> None:
        """Raises ValueError for an encoding that was not asked for."""
        name = encoding.strip().lower()
        if name not in ("", "identity", "gzip", "x-gzip", "deflate"):
            raise ValueError(f"encoding {name[:40]!r}")
        self._deflate = None if name in ("", "identity") else zlib.decompressobj(zlib.MAX_WBITS | 32)
        self._raw_deflate = name == "deflate"

    def __call__(self, chunk: bytes, limit: int) -> bytes:
        """What `chunk` unpacks to, at most `limit` bytes of it. Raises zlib.error."""
        if self._deflate is None:
            return chunk
        try:
            found = self._deflate.decompress(chunk, max(limit, 1))
        except zlib.error:
            if not self._raw_deflate:
                raise
            self._deflate = zlib.decompressobj(-zlib.MAX_WBITS)  # some servers leave zlib's header out
            found = self._deflate.decompress(chunk, max(limit, 1))
        self._raw_deflate = False
        return found


def _seconds(text: str) -> float:
    """A Retry-After in seconds; 0 where there is none, or a date."""
    return float(text[:9]) if text.isdecimal() else 0.0


def _excerpt(reply: Any) -> str:
    """The beginning of a reply; its depth and length are the endpoint's choice."""
    return excerpt(reprlib.repr(reply), 200)


def _bounded(text: str) -> str:
    if len(text) > _MAX_ANSWER:
        raise EndpointError(
            f"The endpoint's answer has {len(text)} characters, more than {_MAX_ANSWER}.", retryable=False
        )
    return text


def _count(value: Any) -> int:
    """A number of tokens as an endpoint reports it; 0 for what is none."""
    plain = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MOST_TOKENS
    return int(value) if plain else 0


def _read_completion(reply: dict[str, Any], question: Question) -> Answer:
    try:
        choice = reply["choices"][0]
        content = choice["message"].get("content")
        text = "" if content is None else content
        if not isinstance(text, str):  # its Python form would be graded as the answer
            raise TypeError("content")
        usage = reply.get("usage") or {}
        probabilities = None
        tokens = (choice.get("logprobs") or {}).get("content") or []
        if question.choices and tokens:
            alternatives = tokens[0]["top_logprobs"][:_MAX_ALTERNATIVES]
            first = [(str(entry["token"]), float(entry["logprob"])) for entry in alternatives]
            probabilities = choice_probabilities(first, question.choices)
        return Answer(
            _bounded(text),
            _count(usage.get("prompt_tokens")),
            _count(usage.get("completion_tokens")),
            choice.get("finish_reason") == "length",
            probabilities,
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise EndpointError(
            f"The endpoint's reply is no chat completion: {_excerpt(reply)}", retryable=False
        ) from error


def _message(message: Message, image: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """The message as JSON; `image` turns a data URI into a part."""
    message = _without_tool_role(message)
    content: list[dict[str, Any]] = []
    for part in message.parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
        else:
            png = base64.b64encode(as_encoded([part])[0].png).decode()
            content.append(image(f"data:image/png;base64,{png}"))
    return {"role": message.role, "content": content}


def _without_tool_role(message: Message) -> Message:
    """A tool's reply as the user's message that Qwen's chat template makes of it.

    The calls are in the policy's text, so they have no ids, and OpenAI's `tool` messages need one and take no images.
    """
    if message.role != "tool":
        return message
    return Message("user", ("<tool_response>\n", *message.parts, "\n</tool_response>"))


def _openai_image(uri: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": uri}}


def _plain_image(uri: str) -> dict[str, Any]:
    return {"type": "image", "image": uri}
