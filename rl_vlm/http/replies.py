"""Builds OpenAI's replies from samples, whole or in chunks, as JSON text.

Log-probabilities are written directly: a reply may have a million of them, and models of them would take a gigabyte and ten seconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rl_vlm.chat import ChatCodec
from rl_vlm.engines.base import BASE_MODEL
from rl_vlm.http.schema import AssistantMessage, ChatChunk, ChatCompletion, Choice, ChunkChoice, FinishReason, Usage
from rl_vlm.http.text import ReplyText
from rl_vlm.types import Completion, Sample, SampleChunk, SamplingParams, StopReason, TopLogprobs

_NO_CHOICES = '"choices":[]'  # inside a JSON string its quotes would be escaped
_NO_LOGPROBS = '"logprobs":null'


@dataclass(slots=True)
class _StreamedSample:
    """One sample of a stream: its text, and all its tokens so far."""

    text: ReplyText
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[TopLogprobs] = field(default_factory=list)


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
        self.logprobs = logprobs
        self._streamed: dict[int, _StreamedSample] = {}
        self._version = BASE_MODEL
        self._written: dict[int, tuple[str, str]] = {}  # per token id: what stands before and after its log-probability

    def _new_text(self) -> ReplyText:
        return ReplyText(self._codec, self._sampling.stop, self._sampling.min_tokens)

    def whole(self, completion: Completion) -> bytes:
        """The reply without streaming."""
        empty = ChatCompletion(
            id=self._id,
            model=self._model,
            system_fingerprint=fingerprint(completion.policy_version),
            choices=[],
            usage=self._usage(sum(len(sample.token_ids) for sample in completion.samples)),
        )
        choices = ",".join(self._choice(number, sample) for number, sample in enumerate(completion.samples))
        return empty.model_dump_json().replace(_NO_CHOICES, f'"choices":[{choices}]', 1).encode()

    def chunks(self, grown: SampleChunk) -> list[str]:
        """The chunks to send for new tokens of one sample."""
        self._version = grown.policy_version
        number = grown.number
        choices: list[str] = []
        sample = self._streamed.get(number)
        if sample is None:
            sample = self._streamed[number] = _StreamedSample(self._new_text())
            choices.append(ChunkChoice(index=number, delta={"role": "assistant", "content": ""}).model_dump_json())
        token_ids = grown.token_ids.tolist()
        sample.token_ids += token_ids
        sample.logprobs += grown.logprobs.tolist()
        sample.top += grown.top_logprobs
        text, tokens = sample.text.feed(token_ids, last=grown.stop_reason is not None)
        if text or (tokens and self.logprobs):
            piece = ChunkChoice(index=number, delta={"content": text}).model_dump_json()
            choices.append(self._with_logprobs(piece, tokens, sample.token_ids, sample.logprobs, sample.top))
        if grown.stop_reason is not None:
            end = ChunkChoice(index=number, delta={}, finish_reason=_finish(grown.stop_reason))
            choices.append(end.model_dump_json())
        empty = self._chunk().model_dump_json()
        return [empty.replace(_NO_CHOICES, f'"choices":[{choice}]', 1) for choice in choices]

    def last_chunk(self) -> ChatChunk:
        """The usage, in a chunk without choices."""
        return self._chunk(self._usage(self.num_sampled))

    @property
    def num_sampled(self) -> int:
        """Tokens sampled by the stream so far."""
        return sum(len(sample.token_ids) for sample in self._streamed.values())

    def _chunk(self, usage: Usage | None = None) -> ChatChunk:
        name = fingerprint(self._version)
        return ChatChunk(id=self._id, model=self._model, system_fingerprint=name, choices=[], usage=usage)

    def _choice(self, number: int, sample: Sample) -> str:
        ids = sample.token_ids.tolist()
        text, tokens = self._new_text().feed(ids, last=True)
        choice = Choice(
            index=number, message=AssistantMessage(content=text), finish_reason=_finish(sample.stop_reason)
        ).model_dump_json()
        return self._with_logprobs(choice, tokens, ids, sample.logprobs.tolist(), sample.top_logprobs)

    def _with_logprobs(
        self,
        choice: str,
        tokens: range,
        ids: Sequence[int],
        logprobs: Sequence[float],
        top: Sequence[TopLogprobs],
    ) -> str:
        """The JSON of a choice, with log-probabilities if the client wants them (`ChoiceLogprobs`)."""
        if not self.logprobs:
            return choice
        entries = []
        for k in tokens:
            alternatives = ",".join([self._entry(token, value) + "}" for token, value in top[k]]) if top else ""
            entries.append(f'{self._entry(ids[k], logprobs[k])},"top_logprobs":[{alternatives}]}}')
        return choice.replace(_NO_LOGPROBS, f'"logprobs":{{"content":[{",".join(entries)}],"refusal":null}}', 1)

    def _entry(self, token_id: int, logprob: float) -> str:
        """`TopLogprob` without its closing brace."""
        written = self._written.get(token_id)
        if written is None:
            data = self._codec.token_bytes(token_id)
            token = json.dumps(data.decode("utf-8", "replace"), ensure_ascii=False)
            written = self._written[token_id] = (f'{{"token":{token},"logprob":', f',"bytes":{[*data]}')
        return f"{written[0]}{logprob if math.isfinite(logprob) else 'null'}{written[1]}"

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
