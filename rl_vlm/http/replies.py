"""Builds OpenAI's replies from samples, whole or in chunks."""

from __future__ import annotations

from dataclasses import dataclass, field

from rl_vlm.chat import ChatCodec
from rl_vlm.engines.base import BASE_MODEL
from rl_vlm.http.schema import (
    AssistantMessage,
    ChatChunk,
    ChatCompletion,
    Choice,
    ChoiceLogprobs,
    ChunkChoice,
    FinishReason,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from rl_vlm.http.text import ReplyText
from rl_vlm.types import Completion, Sample, SampleChunk, SamplingParams, StopReason


@dataclass(slots=True)
class _StreamedSample:
    """One sample of a stream: its text, and all its tokens so far."""

    text: ReplyText
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)


class ChatReply:
    """Writes the reply to one chat request.

    Args:
        codec: the model's.
        request_id, model: written into the reply.
        sampling: its stop strings end the text before the first of them.
        num_prompt_tokens: with every token of the images.
        logprobs: whether the client wants log-probabilities.
    """

    def __init__(
        self,
        codec: ChatCodec,
        request_id: str,
        model: str,
        *,
        sampling: SamplingParams,
        num_prompt_tokens: int,
        logprobs: bool,
    ) -> None:
        self._codec = codec
        self._id, self._model = request_id, model
        self._sampling = sampling
        self.num_prompt_tokens = num_prompt_tokens
        self._logprobs = logprobs
        self._streamed: dict[int, _StreamedSample] = {}
        self._version = BASE_MODEL

    def _new_text(self) -> ReplyText:
        return ReplyText(self._codec, self._sampling.stop, self._sampling.min_tokens)

    def whole(self, completion: Completion) -> ChatCompletion:
        """The reply without streaming."""
        return ChatCompletion(
            id=self._id,
            model=self._model,
            system_fingerprint=fingerprint(completion.policy_version),
            choices=[self._choice(number, sample) for number, sample in enumerate(completion.samples)],
            usage=self._usage(sum(len(sample.token_ids) for sample in completion.samples)),
        )

    def chunks(self, grown: SampleChunk) -> list[ChatChunk]:
        """The chunks to send for new tokens of one sample."""
        self._version = grown.policy_version
        number, choices = grown.number, []
        sample = self._streamed.get(number)
        if sample is None:
            sample = self._streamed[number] = _StreamedSample(self._new_text())
            choices.append(ChunkChoice(index=number, delta={"role": "assistant", "content": ""}))
        token_ids = grown.token_ids.tolist()
        sample.token_ids += token_ids
        sample.logprobs += grown.logprobs.tolist()
        sample.top += grown.top_logprobs
        text, tokens = sample.text.feed(token_ids, last=grown.stop_reason is not None)
        logprobs = self._token_logprobs(tokens, sample.token_ids, sample.logprobs, sample.top)
        if text or (tokens and self._logprobs):
            choices.append(ChunkChoice(index=number, delta={"content": text}, logprobs=logprobs))
        if grown.stop_reason is not None:
            choices.append(ChunkChoice(index=number, delta={}, finish_reason=_finish(grown.stop_reason)))
        return [self._chunk([choice]) for choice in choices]

    def last_chunk(self) -> ChatChunk:
        """The usage, in a chunk without choices."""
        return self._chunk([], self._usage(self.num_sampled))

    @property
    def num_sampled(self) -> int:
        """Tokens sampled by the stream so far."""
        return sum(len(sample.token_ids) for sample in self._streamed.values())

    def _chunk(self, choices: list[ChunkChoice], usage: Usage | None = None) -> ChatChunk:
        name = fingerprint(self._version)
        return ChatChunk(id=self._id, model=self._model, system_fingerprint=name, choices=choices, usage=usage)

    def _choice(self, number: int, sample: Sample) -> Choice:
        ids = sample.token_ids.tolist()
        text, tokens = self._new_text().feed(ids, last=True)
        return Choice(
            index=number,
            message=AssistantMessage(content=text),
            logprobs=self._token_logprobs(tokens, ids, sample.logprobs.tolist(), sample.top_logprobs),
            finish_reason=_finish(sample.stop_reason),
        )

    def _token_logprobs(
        self,
        tokens: range,
        ids: list[int],
        logprobs: list[float],
        top: tuple[tuple[tuple[int, float], ...], ...] | list[tuple[tuple[int, float], ...]],
    ) -> ChoiceLogprobs | None:
        if not self._logprobs:
            return None
        return ChoiceLogprobs(
            content=[
                TokenLogprob(
                    **self._top(ids[k], logprobs[k]).model_dump(),
                    top_logprobs=[self._top(token, value) for token, value in top[k]] if top else [],
                )
                for k in tokens
            ]
        )

    def _top(self, token_id: int, logprob: float) -> TopLogprob:
        data = self._codec.token_bytes(token_id)
        return TopLogprob(token=data.decode("utf-8", "replace"), logprob=logprob, bytes=list(data))

    def _usage(self, sampled: int) -> Usage:
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=sampled,
            total_tokens=self.num_prompt_tokens + sampled,
        )


def fingerprint(version: int) -> str:
    """The policy version as `system_fingerprint`."""
    return "base" if version == BASE_MODEL else f"policy-v{version}"


def _finish(reason: StopReason) -> FinishReason:
    return "length" if reason is StopReason.LENGTH else "stop"
