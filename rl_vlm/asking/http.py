"""Questions over HTTP: OpenAI's chat completions, and the plain `/generate` of RL-VLM-F with a local model."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import AliasPath, BaseModel, BeforeValidator, Field, ValidationError

from rl_vlm.config.labels import UNNAMED_MODEL, EndpointSection
from rl_vlm.envs.address import is_loopback, token_header, url_host
from rl_vlm.safe_text import excerpt, keep_secret
from rl_vlm.types import Message, Part, UserInputError, as_encoded

if TYPE_CHECKING:  # slow to import, and an env runner without a judge needs neither
    import httpx

from rl_vlm.asking import Answer, Ask, EndpointError, Question, choice_probabilities, without_tool_role

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=BaseModel)
_RETRYABLE_STATUS = (408, 409, 425, 429, 500, 502, 503, 504)
_BUSY_STATUS = (429, 503)
_MAX_REPLY_BYTES = 2**20  # thoughts and log-probabilities included


def _at(default: Any, *path: str | int) -> Any:
    return Field(default, validation_alias=AliasPath(*path))  # type: ignore[arg-type]  # the first part is a key


class _Alternative(BaseModel):
    token: str
    logprob: float = Field(le=0.1)  # 0, and what rounding may add


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


class _Model(BaseModel):
    id: str


class ModelList(BaseModel):
    """What a server says of the models that it serves."""

    data: list[_Model]


class HTTPEndpoint:
    """A server that speaks OpenAI's chat completions, or `plain`ly RL-VLM-F's `/generate`, whose reply is text alone.

    `settings.url` is OpenAI's base, such as http://127.0.0.1:8000/v1, or the address of `/generate`. Choices
    and grammars are enforced as OpenAI or vLLM do it, unless the server rejects such a request.
    """

    def __init__(
        self, settings: EndpointSection, plain: bool = False, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        url = settings.url or (server_url() if plain else "")
        _check_url(url)
        self._base = url.rstrip("/").removesuffix("/chat/completions")
        self._url = url if plain else f"{self._base}/chat/completions"
        self._settings, self._plain, self._transport, self._model = settings, plain, transport, settings.model
        self._rejected, self._has_answered = set[str](), False

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Ask]:
        import httpx

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
            yield lambda question: self._ask_by_name(client, question)

    async def _ask_by_name(self, client: httpx.AsyncClient, question: Question) -> Answer:
        """A server that has one model is asked for that one where the settings name none."""
        try:
            return await self._ask(client, question)
        except EndpointError as error:
            if error.status != 404 or self._plain or self._settings.model != UNNAMED_MODEL:
                raise
            served: list[_Model] = []
            with contextlib.suppress(EndpointError):
                served = (await self._send(client, "GET", f"{self._base}/models", ModelList, "list of models")).data
            if len(served) != 1:
                if not served:
                    raise
                names = ", ".join(excerpt(model.id, 80) for model in served[:20])
                raise EndpointError(f"{error} It serves {names}: name one.", retryable=False) from error
            self._model = served[0].id
        return await self._ask(client, question)

    async def _ask(self, client: httpx.AsyncClient, question: Question) -> Answer:
        body = {
            "messages": [self._message(message) for message in question.messages],
            "max_tokens": question.max_new_tokens,
            "temperature": question.temperature,
        }
        if self._plain:
            return Answer((await self._post(client, body, GenerateReply, "text")).text)
        body |= {"model": self._model, "seed": question.seed % 2**31}
        if question.choices and self._settings.logprobs:
            body |= {"logprobs": True, "top_logprobs": 20}
        form = {name: value for name, value in _form(question).items() if name not in self._rejected}
        try:
            reply = await self._post(client, body | form, ChatCompletion, "chat completion")
        except EndpointError as error:
            if not form or error.status not in (400, 422):
                raise
            reply = await self._post(client, body, ChatCompletion, "chat completion")
            # Only an answer says why the server rejected it: it rejects a question that is too long in every form.
            self._rejected.update(form)
            what = "choices" if question.choices else "a grammar"
            logger.warning("The endpoint cannot be held to %s, so its answers are read as they come: %s", what, error)
        first = [(token.token, token.logprob) for token in reply.first_token]
        known = choice_probabilities(first, question.choices)
        cut_off = reply.finish_reason == "length"
        return Answer(reply.content or "", reply.prompt_tokens, reply.sampled_tokens, cut_off, known)

    def _message(self, message: Message) -> dict[str, Any]:
        def part_of(part: Part) -> dict[str, Any]:
            if isinstance(part, str):
                return {"type": "text", "text": part}
            uri = f"data:image/png;base64,{base64.b64encode(as_encoded(part).png).decode()}"
            return {"type": "image", "image": uri} if self._plain else {"type": "image_url", "image_url": {"url": uri}}

        message = without_tool_role(message)
        return {"role": message.role, "content": [*map(part_of, message.parts)]}

    async def _post(self, client: httpx.AsyncClient, body: dict[str, Any], kind: type[M], what: str) -> M:
        return await self._send(client, "POST", self._url, kind, what, json.dumps(body))

    async def _send(
        self, client: httpx.AsyncClient, method: str, url: str, kind: type[M], what: str, body: str | None = None
    ) -> M:
        """The reply, which `what` names in an error. Raises EndpointError."""
        import httpx

        try:
            async with client.stream(method, url, content=body) as response:
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


def _form(question: Question) -> dict[str, Any]:
    """What a chat says of the form of its answer: JSON as OpenAI names it, else as vLLM does."""
    if question.grammar is None:
        return {"structured_outputs": {"choice": list(question.choices)}} if question.choices else {}
    kind, text = question.grammar.kind, question.grammar.text
    if kind != "json_schema":
        return {"structured_outputs": {kind: text}}
    schema = {"name": "answer", "strict": True, "schema": json.loads(text)}
    return {"response_format": {"type": kind, kind: schema}}


def server_url() -> str:
    """The address of a `/generate` server: SERVER_URL, else http://SERVER_HOST:SERVER_PORT/generate."""
    host, port = os.environ.get("SERVER_HOST") or "localhost", os.environ.get("SERVER_PORT") or "8000"
    return os.environ.get("SERVER_URL") or f"http://{url_host(host)}:{port}/generate"


def _check_url(url: str) -> None:
    import httpx

    with contextlib.suppress(httpx.InvalidURL):
        address = httpx.URL(url)
        keep_secret(address.password)
        if address.scheme in ("http", "https") and address.host and (address.port or 0) <= 65_535:
            return
    # It is not shown: the part that is wrong may be a password.
    raise UserInputError(
        "The endpoint must be an http or https address, such as http://HOST:PORT/PATH, with special characters of a "
        "password as %XX."
    )
