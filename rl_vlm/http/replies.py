"""Builds OpenAI's replies from samples, whole or in chunks, as the content of their JSON (`schema.py` describes it)."""

from __future__ import annotations

import codecs
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_vlm.chat import ChatCodec
from rl_vlm.engines.base import BASE_MODEL
from rl_vlm.types import Completion, Sample, SampleChunk, SamplingParams, StopReason, TopLogprobs


class ReplyText:
    """The text of one sample while it grows. Fed in pieces or at once, it gives the same text and tokens.

    It works on bytes, because a token may hold part of a character. Text that may be the beginning of a stop string is
    held back until the next tokens decide. A stop string that ends within the first `min_tokens` tokens is plain text.
    """

    def __init__(self, codec: ChatCodec, stop: Iterable[str] = (), min_tokens: int = 0) -> None:
        self._codec = codec
        self._stops = [text.encode() for text in stop]
        self._bytes = bytearray()
        self._starts: list[int] = []  # per token: its first byte
        self._min_tokens, self._searched_from = min_tokens, 0  # the bytes of the first `min_tokens` tokens
        self._sent = 0  # bytes that were returned
        self._tokens_sent = 0
        self._over = False
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_ids: Sequence[int], last: bool) -> tuple[str, range]:
        """Add tokens; returns the new text that is certain, and which tokens of the sample (from 0) begin in it.

        The end-of-turn token has no text. After `last` or a stop string all calls return nothing.
        """
        if self._over:
            return "", range(0)
        before = len(self._bytes)
        for token_id in token_ids:
            self._starts.append(len(self._bytes))
            if token_id != self._codec.end_of_turn_id:
                self._bytes += self._codec.token_bytes(token_id)
            if len(self._starts) <= self._min_tokens:
                self._searched_from = len(self._bytes)
        end = len(self._bytes)
        first_end = max(before, self._searched_from) + 1  # the earliest byte at which a new stop string may end
        starts = [(self._bytes.find(stop, max(first_end - len(stop), 0)), len(stop)) for stop in self._stops]
        # As token by token: the stop string that is complete first ends the text, not the one that begins first.
        cuts = [(start + length, start) for start, length in starts if start >= 0]
        if cuts:
            end, last = min(cuts)[1], True
            del self._bytes[end:]
        elif not last:
            end -= max((_overlap(self._bytes, stop) for stop in self._stops), default=0)
        text = self._utf8.decode(bytes(self._bytes[self._sent : end]), final=last)
        self._sent, self._over = max(end, self._sent), last
        first = self._tokens_sent
        while self._tokens_sent < len(self._starts) and self._starts[self._tokens_sent] < self._sent:
            self._tokens_sent += 1
        return text, range(first, self._tokens_sent)


def _overlap(data: bytearray, stop: bytes) -> int:
    """How many bytes at the end of `data` are a beginning of `stop`, but not all of it."""
    return next((k for k in range(min(len(stop) - 1, len(data)), 0, -1) if data.endswith(stop[:k])), 0)


Content = dict[str, Any]


@dataclass(slots=True)
class _StreamedSample:
    """One sample of a stream: its text, and all its tokens so far."""

    text: ReplyText
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[TopLogprobs] = field(default_factory=list)


class ChatReply:
    """The reply to one chat request.

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
        sampling: SamplingParams,
        num_prompt_tokens: int,
        logprobs: bool,
    ) -> None:
        self._codec = codec
        self._head: Content = {"id": request_id, "created": int(time.time()), "model": model}
        self._sampling = sampling
        self.num_prompt_tokens = num_prompt_tokens
        self._logprobs = logprobs
        self._streamed: dict[int, _StreamedSample] = {}
        self._version = BASE_MODEL

    def whole(self, completion: Completion) -> Content:
        """The reply without streaming."""
        sampled = sum(len(sample.token_ids) for sample in completion.samples)
        return {
            **self._head,
            "system_fingerprint": fingerprint(completion.policy_version),
            "object": "chat.completion",
            "choices": [self._choice(number, sample) for number, sample in enumerate(completion.samples)],
            "usage": self._usage(sampled),
        }

    def chunks(self, grown: SampleChunk) -> list[Content]:
        """The chunks to send for new tokens of one sample."""
        self._version = grown.policy_version
        number = grown.number
        chunks: list[Content] = []
        sample = self._streamed.get(number)
        if sample is None:
            sample = self._streamed[number] = _StreamedSample(self._new_text())
            chunks.append(self._chunk(number, {"role": "assistant", "content": ""}))
        token_ids = grown.token_ids.tolist()
        sample.token_ids += token_ids
        sample.logprobs += grown.logprobs.tolist()
        sample.top += grown.top_logprobs
        text, tokens = sample.text.feed(token_ids, last=grown.stop_reason is not None)
        if text or (tokens and self._logprobs):
            logprobs = self._token_logprobs(tokens, sample.token_ids, sample.logprobs, sample.top)
            chunks.append(self._chunk(number, {"content": text}, logprobs))
        if grown.stop_reason is not None:
            chunks.append(self._chunk(number, {}, finish_reason=_finish(grown.stop_reason)))
        return chunks

    def last_chunk(self) -> Content:
        """The usage, in a chunk without choices."""
        return self._of_stream([], self._usage(self.num_sampled))

    @property
    def num_sampled(self) -> int:
        """Tokens sampled by the stream so far."""
        return sum(len(sample.token_ids) for sample in self._streamed.values())

    def _chunk(
        self, number: int, delta: Content, logprobs: Content | None = None, finish_reason: str | None = None
    ) -> Content:
        choice = {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._of_stream([choice])

    def _of_stream(self, choices: list[Content], usage: Content | None = None) -> Content:
        return {
            **self._head,
            "system_fingerprint": fingerprint(self._version),
            "object": "chat.completion.chunk",
            "choices": choices,
            "usage": usage,
        }

    def _choice(self, number: int, sample: Sample) -> Content:
        ids = sample.token_ids.tolist()
        text, tokens = self._new_text().feed(ids, last=True)
        return {
            "index": number,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._token_logprobs(tokens, ids, sample.logprobs.tolist(), sample.top_logprobs),
            "finish_reason": _finish(sample.stop_reason),
        }

    def _new_text(self) -> ReplyText:
        return ReplyText(self._codec, self._sampling.stop, self._sampling.min_tokens)

    def _token_logprobs(
        self, tokens: Iterable[int], ids: Sequence[int], logprobs: Sequence[float], top: Sequence[TopLogprobs]
    ) -> Content | None:
        """Of these tokens of a sample; None if the client wants no log-probabilities."""
        if not self._logprobs:
            return None
        entries = [
            {
                **self._token(ids[k], logprobs[k]),
                "top_logprobs": [self._token(token, value) for token, value in top[k]] if top else [],
            }
            for k in tokens
        ]
        return {"content": entries, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> Content:
        data = self._codec.token_bytes(token_id)
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}

    def _usage(self, sampled: int) -> Content:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": self.num_prompt_tokens + sampled,
        }


def fingerprint(version: int) -> str:
    """The policy version as `system_fingerprint`."""
    return "base" if version == BASE_MODEL else f"policy-v{version}"


def _finish(reason: StopReason) -> str:
    return "length" if reason is StopReason.LENGTH else "stop"
