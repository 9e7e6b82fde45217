"""Where a labeller's questions go: the served model by token ids, or an endpoint by HTTP. Nothing here knows Ray.

A backend answers one question; many are in flight at once. What goes wrong is a `BackendError`, never an answer.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import httpx
import numpy as np

from rl_vlm.engines.base import BASE_MODEL, Engine
from rl_vlm.types import (
    Completion,
    EncodedImage,
    GenerationRequest,
    Message,
    RLVLMError,
    SamplingParams,
    StopReason,
    UserInputError,
    as_encoded,
)

if TYPE_CHECKING:
    from rl_vlm.models.loading import TextSide  # transformers: an endpoint needs none of it

_RETRYABLE_STATUS = (408, 409, 425, 429, 500, 502, 503, 504)


class BackendError(RLVLMError):
    """A question got no answer. `retryable` says whether asking again may help, `retry_after_s` how soon at the earliest."""

    def __init__(self, message: str, retryable: bool = True, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation to be answered. `choices` are the only answers where the backend can enforce that."""

    messages: tuple[Message, ...]
    max_new_tokens: int
    temperature: float = 0.0
    choices: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """`probabilities` are those of the choices, summing to 1, where the backend tells them."""

    text: str
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    cut_off: bool = False
    probabilities: dict[str, float] | None = None


Ask = Callable[[Question], Awaitable[Answer]]


class Backend(Protocol):
    """Answers questions."""

    def open(self) -> contextlib.AbstractAsyncContextManager[Ask]:
        """What answers questions until the context ends; raises BackendError."""
        ...


class Client(Protocol):
    """The served policy's client, or an engine in this process."""

    async def generate(self, request: GenerationRequest) -> Completion:
        """Answer one request."""
        ...


class EngineClient:
    """An engine in this process as a client: requests of one moment run in one batch."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def generate(self, request: GenerationRequest) -> Completion:
        """Answer one request. Raises EngineError."""
        return (await self._engine.generate([request]))[0]


class ServedBackend:
    """Asks a served model through a generation client.

    `min_version` is the oldest policy version that may answer; by default the base model does, without an adapter.
    """

    def __init__(self, client: Client, text: TextSide, min_version: int = BASE_MODEL) -> None:
        self._client = client
        self._text = text
        self._min_version = min_version
        self._numbers = itertools.count()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Ask]:
        """See `Backend.open`."""
        yield self._ask

    async def _ask(self, question: Question) -> Answer:
        codec = self._text.codec
        prompt = codec.encode_prompt(question.messages)
        sampling = SamplingParams(
            max_new_tokens=question.max_new_tokens,
            temperature=question.temperature,
            seeds=(question.seed,),
            choices=question.choices,
            top_logprobs=len(question.choices),
        )
        request = GenerationRequest(
            f"label-{next(self._numbers)}", prompt.token_ids, sampling, prompt.images, self._min_version
        )
        completion = await self._client.generate(request)
        (sample,) = completion.samples
        probabilities = None
        if sample.top_logprobs:
            first = [(codec.decode(np.array([token])), logprob) for token, logprob in sample.top_logprobs[0]]
            probabilities = choice_probabilities(first, question.choices)
        return Answer(
            codec.decode(sample.token_ids),
            len(completion.prompt_ids),
            len(sample.token_ids),
            sample.stop_reason == StopReason.LENGTH,
            probabilities,
        )


def choice_probabilities(first: Iterable[tuple[str, float]], choices: Sequence[str]) -> dict[str, float] | None:
    """The probability of each choice from (text, log-probability) of the first token's alternatives.

    A token counts for the one choice that begins with it. None where a token may begin two choices, or none of the
    tokens begins any.
    """
    mass = dict.fromkeys(choices, 0.0)
    for text, logprob in first:
        begun = text.strip()
        owners = [choice for choice in choices if begun and choice.startswith(begun)]
        if len(owners) > 1:
            return None
        if owners:
            mass[owners[0]] += math.exp(logprob)
    total = sum(mass.values())
    return {choice: value / total for choice, value in mass.items()} if total > 0 else None


class EndpointBackend:
    """Asks an endpoint that speaks OpenAI's chat completions.

    Args:
        url: the base, such as http://127.0.0.1:8000/v1.
        model: the model's name there.
        token: sent as a bearer token.
        timeout_s: how long one HTTP request may take.
        guidance: how choices are enforced there: `structured_outputs` and `guided_choice` are vLLM's new and old field,
            `none` leaves the answer free and reads it as text.
        logprobs: ask for log-probabilities of the first token of an answer among choices.
        max_in_flight: questions at once, for endpoints with a rate limit; None: all of a session.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        token: str = "",
        timeout_s: float = 60.0,
        guidance: Literal["structured_outputs", "guided_choice", "none"] = "none",
        logprobs: bool = True,
        max_in_flight: int | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._max_in_flight = max_in_flight
        self._url = _checked_url(url).rstrip("/")
        if not self._url.endswith("/chat/completions"):
            self._url += "/chat/completions"
        self._model = model
        self._token = token
        self._timeout_s = timeout_s
        self._guidance = guidance
        self._logprobs = logprobs
        self._transport = transport

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Ask]:
        """See `Backend.open`."""
        gate = asyncio.Semaphore(self._max_in_flight) if self._max_in_flight else contextlib.nullcontext()
        async with _http(self._token, self._timeout_s, self._transport) as client:

            async def ask(question: Question) -> Answer:
                async with gate:
                    return _read_completion(await _post(client, self._url, self._body(question)), question)

            yield ask

    def _body(self, question: Question) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [_message(message, _openai_image) for message in question.messages],
            "max_tokens": question.max_new_tokens,
            "temperature": question.temperature,
            "seed": question.seed % 2**31,
        }
        if question.choices and self._guidance == "structured_outputs":
            body["structured_outputs"] = {"choice": list(question.choices)}
        elif question.choices and self._guidance == "guided_choice":
            body["guided_choice"] = list(question.choices)
        if question.choices and self._logprobs:
            body |= {"logprobs": True, "top_logprobs": 20}
        return body


class GenerateBackend:
    """Asks a server that speaks the plain `POST /generate` of RL-VLM-F with a local model: text back, nothing else."""

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        timeout_s: float = 60.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._url = _checked_url(url)
        self._token = token
        self._timeout_s = timeout_s
        self._transport = transport

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Ask]:
        """See `Backend.open`."""
        async with _http(self._token, self._timeout_s, self._transport) as client:

            async def ask(question: Question) -> Answer:
                body = {
                    "messages": [_message(message, _plain_image) for message in question.messages],
                    "max_tokens": question.max_new_tokens,
                    "temperature": question.temperature,
                }
                reply = await _post(client, self._url, body)
                if not isinstance(reply.get("text"), str):
                    raise BackendError(f"The server's reply holds no text: {str(reply)[:200]}", retryable=False)
                return Answer(reply["text"])

            yield ask


def server_url(environment: dict[str, str] | None = None) -> str:
    """The address of a `/generate` server: SERVER_URL, else http://SERVER_HOST:SERVER_PORT/generate."""
    known = dict(os.environ) if environment is None else environment
    host, port = known.get("SERVER_HOST") or "localhost", known.get("SERVER_PORT") or "8000"
    return known.get("SERVER_URL") or f"http://{host}:{port}/generate"


def _checked_url(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise UserInputError(f"The labeller's endpoint {url!r} must be an http or https address.")
    return url


def _http(token: str, timeout_s: float, transport: httpx.AsyncBaseTransport | None) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    # Every pair is in flight at once: no request may wait for a free connection.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
    return httpx.AsyncClient(headers=headers, timeout=timeout_s, limits=limits, transport=transport)


async def _post(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> dict[str, Any]:
    try:
        response = await client.post(url, json=body)
    except httpx.HTTPError as error:
        raise BackendError(f"{url} gave no answer: {type(error).__name__} {error}".rstrip()) from error
    if response.status_code != 200:
        raise BackendError(
            f"{url} answered with HTTP {response.status_code}: {response.text[:300]}",
            retryable=response.status_code in _RETRYABLE_STATUS,
            retry_after_s=_seconds(response.headers.get("retry-after", "")),
        )
    try:
        reply = response.json()
    except ValueError as error:
        raise BackendError(f"{url} answered with something that is no JSON: {response.text[:200]!r}") from error
    if not isinstance(reply, dict):
        raise BackendError(f"{url} answered with a {type(reply).__name__}, not an object.", retryable=False)
    return reply


def _seconds(text: str) -> float:
    """A Retry-After in seconds; 0 where there is none, or a date."""
    return float(text) if text.isdecimal() else 0.0


def _read_completion(reply: dict[str, Any], question: Question) -> Answer:
    try:
        choice = reply["choices"][0]
        text = choice["message"].get("content") or ""
        usage = reply.get("usage") or {}
        probabilities = None
        tokens = (choice.get("logprobs") or {}).get("content") or []
        if question.choices and tokens:
            first = [(str(entry["token"]), float(entry["logprob"])) for entry in tokens[0]["top_logprobs"]]
            probabilities = choice_probabilities(first, question.choices)
        return Answer(
            str(text),
            int(usage.get("prompt_tokens") or 0),
            int(usage.get("completion_tokens") or 0),
            choice.get("finish_reason") == "length",
            probabilities,
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise BackendError(
            f"The endpoint's reply is no chat completion: {str(reply)[:200]}", retryable=False
        ) from error


def _message(message: Message, image: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    for part in message.parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
        else:
            content.append(image(_data_uri(as_encoded([part])[0])))
    return {"role": message.role, "content": content}


def _openai_image(uri: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": uri}}


def _plain_image(uri: str) -> dict[str, Any]:
    return {"type": "image", "image": uri}


def _data_uri(image: EncodedImage) -> str:
    return f"data:image/png;base64,{base64.b64encode(image.png).decode()}"
