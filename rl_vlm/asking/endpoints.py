"""Questions to the served model or to an engine in this process, without Ray; `http_endpoints.py` asks over HTTP.

An endpoint answers many questions at once. A failure is an `EndpointError`, never an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from rl_vlm.engines.base import BASE_MODEL, Engine
from rl_vlm.types import Completion, GenerationRequest, Message, RLVLMError, SamplingParams, StopReason, UserInputError
from rl_vlm.waiting import JITTER

if TYPE_CHECKING:
    from rl_vlm.models.loading import TextSide  # transformers: an endpoint needs none of it


class EndpointError(RLVLMError):
    """A question got no answer.

    retryable: asking again may help, after `retry_after_s` at the earliest. status: of the HTTP reply, 0 without one.
    busy: the endpoint has no room, or has just gone away; this says nothing about the question, which is asked until
    its deadline.
    """

    def __init__(
        self, message: str, retryable: bool = True, retry_after_s: float = 0.0, status: int = 0, busy: bool = False
    ) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.busy = busy
        self.retry_after_s = retry_after_s
        self.status = status


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation to be answered. `choices` are the only answers where the endpoint can enforce that."""

    messages: tuple[Message, ...]
    max_new_tokens: int
    temperature: float = 0.0
    choices: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """`probabilities` are those of the choices, summing to 1, where the endpoint reports them."""

    text: str
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    cut_off: bool = False
    probabilities: dict[str, float] | None = None


Ask = Callable[[Question], Awaitable[Answer]]


class Endpoint(Protocol):
    """Answers questions."""

    def open(self) -> contextlib.AbstractAsyncContextManager[Ask]:
        """A function that answers questions until the context ends and raises EndpointError."""
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


class ServedEndpoint:
    """Asks the base model of a service, without an adapter, through a generation client."""

    def __init__(self, client: Client, text: TextSide) -> None:
        self._client = client
        self._text = text
        self._numbers = itertools.count()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Ask]:
        """See `Endpoint.open`."""
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
        request = GenerationRequest(f"ask-{next(self._numbers)}", prompt.token_ids, sampling, prompt.images, BASE_MODEL)
        completion = await self._client.generate(request)
        (sample,) = completion.samples
        alternatives = sample.top_logprobs[0] if sample.top_logprobs else ()
        first = [(codec.decode(np.array([token])), logprob) for token, logprob in alternatives]
        return Answer(
            codec.decode(sample.token_ids),
            len(completion.prompt_ids),
            len(sample.token_ids),
            sample.stop_reason == StopReason.LENGTH,
            choice_probabilities(first, question.choices),
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


# Asks an endpoint again after failures that may pass, and many questions at once.

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 10.0


async def ask_again(
    ask: Ask,
    question: Callable[[int], Question],
    *,
    attempts: int,
    deadline_s: float,
    who: str,
    on_retry: Callable[[EndpointError], None] = lambda error: None,
) -> Answer:
    """One answer within `deadline_s` and after at most `attempts`; `question(n)` makes the question of attempt n.

    Attempts at which the endpoint is busy do not count: only the deadline ends them. `on_retry` gets the error that the
    next attempt follows. Raises EndpointError, which names `who` was asked; an error that is not retryable ends it at
    once.
    """
    reason, failed = "no answer", 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(deadline_s):
            for asked in itertools.count():
                try:
                    return await ask(question(asked))
                except UserInputError:
                    raise
                except RLVLMError as error:
                    known = error if isinstance(error, EndpointError) else EndpointError(str(error))
                    if not known.retryable:
                        raise
                reason = str(known)
                failed += not known.busy
                if failed == attempts:
                    break
                on_retry(known)
                # Jitter keeps questions that failed together from coming back together.
                backoff = JITTER.uniform(0.5, 1) * min(_FIRST_PAUSE_S * 2 ** min(asked, 30), _LONGEST_PAUSE_S)
                await asyncio.sleep(max(known.retry_after_s, backoff))
    limit = f"in {attempts} attempts" if failed == attempts else f"within {deadline_s:g} s"
    raise EndpointError(f"The {who} gave no answer {limit}: {reason}")
