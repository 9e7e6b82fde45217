"""Questions to a model: the served one, an engine in this process, or a server by HTTP. No Ray.

An endpoint answers many questions at once. A failure is an `EndpointError`, never an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from rl_vlm.engines.base import BASE_MODEL
from rl_vlm.safe_text import without_thoughts
from rl_vlm.types import (
    Completion,
    GenerationRequest,
    Grammar,
    Message,
    RLVLMError,
    SamplingParams,
    StopReason,
    UserInputError,
)
from rl_vlm.waiting import JITTER

if TYPE_CHECKING:  # slow to import, and an env runner without a judge needs neither
    from rl_vlm.models.images import TextSide

_REASON_CHARS = 400
_ASK_REASON = '\nAnswer in JSON, with a short reason before that number: {"reason": "...", "verdict": ...}'
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 10.0


class EndpointError(RLVLMError):
    """A question got no answer.

    retryable: asking again may help, after `retry_after_s` at the earliest. status: of the HTTP reply, 0 without one.
    busy: the endpoint has no room, or has just gone away; the question is asked until its deadline.

    Do: see that the endpoint runs and takes the token; a run asks again by itself.
    """

    def __init__(
        self, message: str, retryable: bool = True, retry_after_s: float = 0.0, status: int = 0, busy: bool = False
    ) -> None:
        super().__init__(message)
        self.retryable, self.retry_after_s, self.status, self.busy = retryable, retry_after_s, status, busy


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation to be answered. Answers are one of `choices`, or of the `grammar`, where the endpoint can enforce
    that."""

    messages: tuple[Message, ...]
    max_new_tokens: int
    temperature: float = 0.0
    choices: tuple[str, ...] = ()
    seed: int = 0
    grammar: Grammar | None = None

    def with_reason(self) -> Question:
        """The last message also asks for a reason: JSON of it and then one of the choices. Choices that are no numbers
        are asked for alone."""
        try:
            numbers = list(map(json.loads, self.choices))
        except ValueError:
            return self
        *before, last = self.messages
        reason = {"type": "string", "maxLength": _REASON_CHARS}
        properties = {"reason": reason, "verdict": {"enum": numbers}}
        schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        return replace(
            self,
            messages=(*before, replace(last, parts=(*last.parts, _ASK_REASON))),
            max_new_tokens=self.max_new_tokens + _REASON_CHARS,
            choices=(),
            grammar=Grammar("json_schema", json.dumps(schema)),
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """`probabilities` are those of the choices, summing to 1, where the endpoint reports them."""

    text: str
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    cut_off: bool = False
    probabilities: dict[str, float] | None = None

    @property
    def lines(self) -> str:
        """The text; of a reason and a verdict in JSON the verdict is the last line."""
        try:
            said = json.loads(without_thoughts(self.text))
            return f"{said['reason']}\n{said['verdict']}"
        except (ValueError, LookupError, TypeError, RecursionError):
            return self.text


Ask = Callable[[Question], Awaitable[Answer]]


class Client(Protocol):
    """The served policy's client, or anything that answers as it does."""

    async def generate(self, request: GenerationRequest) -> Completion: ...


class Endpoint(Protocol):
    def open(self) -> contextlib.AbstractAsyncContextManager[Ask]:
        """A function that answers questions, or raises EndpointError, until the context ends."""
        ...


class ServedEndpoint:
    """Asks the base model of a service, without an adapter."""

    def __init__(self, client: Client, text: TextSide) -> None:
        self._client, self._codec = client, text.codec
        self._numbers = itertools.count()

    def open(self) -> contextlib.nullcontext[Ask]:
        return contextlib.nullcontext(self._ask)

    async def _ask(self, question: Question) -> Answer:
        codec = self._codec
        prompt = codec.encode_prompt(question.messages)
        sampling = SamplingParams(
            max_new_tokens=question.max_new_tokens,
            temperature=question.temperature,
            seeds=(question.seed,),
            choices=question.choices,
            grammar=question.grammar,
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
    """The probability of each choice from (text, log-probability) of the first token's alternatives, each of which
    counts for the one choice that begins with it. None where one may begin two choices, or none begins any."""
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

    Attempts at which the endpoint is busy do not count: only the deadline ends them. `on_retry` gets each error that
    another attempt follows. Raises EndpointError, which names `who` was asked; at once if it is not retryable.
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


def without_tool_role(message: Message) -> Message:
    """A tool's reply as the user's message that Qwen's chat template makes of it: OpenAI's `tool` messages need the id
    of a call and take no images, and the calls are in the policy's text."""
    if message.role != "tool":
        return message
    return Message("user", ("<tool_response>\n", *message.parts, "\n</tool_response>"))
