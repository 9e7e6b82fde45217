"""Builds OpenAI's replies from samples, whole or in chunks, as the content of their JSON."""

from __future__ import annotations

import codecs
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rl_vlm.chat import ChatCodec
from rl_vlm.engines.base import BASE_MODEL
from rl_vlm.types import POLICY, Completion, GenerationRequest, SampleChunk, StopReason, TopLogprobs


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
        """Add tokens; returns the new text that is certain, and which tokens of the sample (from 0) begin in it. After
        `last` or a stop string all calls return nothing."""
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


@dataclass
class _Sample:
    """One sample while it grows."""

    text: ReplyText
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[TopLogprobs] = field(default_factory=list)


class ChatReply:
    """The reply to one chat request, whole or in chunks.

    Args:
        request: what the engine was asked; its stop strings end the text before the first of them.
        model: the name that the client asked for.
        num_prompt_tokens: with every token of the images.
        logprobs: whether the client wants log-probabilities.
    """

    def __init__(
        self, codec: ChatCodec, request: GenerationRequest, model: str, num_prompt_tokens: int, logprobs: bool
    ) -> None:
        self._codec, self.num_prompt_tokens, self._logprobs = codec, num_prompt_tokens, logprobs
        self._policy = request.policy
        self._head: Content = {"id": request.request_id, "created": int(time.time()), "model": model}
        sampling = request.sampling
        self._samples = [_Sample(ReplyText(codec, sampling.stop, sampling.min_tokens)) for _ in range(sampling.n)]

    def whole(self, completion: Completion) -> Content:
        choices = []
        for number, sample in enumerate(completion.samples):
            text, logprobs = self._grow(number, sample.token_ids, sample.logprobs, sample.top_logprobs, last=True)
            message = {"role": "assistant", "content": text, "refusal": None}
            choices.append(_choice(number, {"message": message}, logprobs, sample.stop_reason))
        return self._content("chat.completion", completion.policy_version, choices, self._usage())

    def chunk(self, new: SampleChunk) -> Content | None:
        """The event for new tokens of one sample; None while they add no text that is certain."""
        role = {} if self._samples[new.number].token_ids else {"role": "assistant"}
        last = new.stop_reason is not None
        text, logprobs = self._grow(new.number, new.token_ids, new.logprobs, new.top_logprobs, last)
        if not (role or text or last or (logprobs and logprobs["content"])):
            return None
        choice = _choice(new.number, {"delta": {**role, "content": text}}, logprobs, new.stop_reason)
        return self._content("chat.completion.chunk", new.policy_version, [choice], None)

    def last_chunk(self, version: int) -> Content:
        """The usage, in an event without choices."""
        return self._content("chat.completion.chunk", version, [], self._usage())

    @property
    def num_sampled(self) -> int:
        return sum(len(sample.token_ids) for sample in self._samples)

    def _grow(
        self, number: int, ids: np.ndarray, logprobs: np.ndarray, top: Sequence[TopLogprobs], last: bool
    ) -> tuple[str, Content | None]:
        """The new text of a sample, and the log-probabilities of its tokens if the client wants them."""
        sample = self._samples[number]
        sample.token_ids += ids.tolist()
        sample.logprobs += logprobs.tolist()
        sample.top += top
        text, tokens = sample.text.feed(ids.tolist(), last)
        if not self._logprobs:
            return text, None
        entries = [
            {
                **self._token(sample.token_ids[k], sample.logprobs[k]),
                "top_logprobs": [self._token(token, value) for token, value in sample.top[k]] if sample.top else [],
            }
            for k in tokens
        ]
        return text, {"content": entries, "refusal": None}

    def _content(self, kind: str, version: int, choices: list[Content], usage: Content | None) -> Content:
        shared = {**self._head, "system_fingerprint": fingerprint(version, self._policy)}
        return {**shared, "object": kind, "choices": choices, "usage": usage}

    def _token(self, token_id: int, logprob: float) -> Content:
        data = self._codec.token_bytes(token_id)
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}

    def _usage(self) -> Content:
        prompt, sampled = self.num_prompt_tokens, self.num_sampled
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def fingerprint(version: int, policy: str = POLICY) -> str:
    return "base" if version == BASE_MODEL else f"{policy}-v{version}"


def _choice(number: int, said: Content, logprobs: Content | None, reason: StopReason | None) -> Content:
    finish = reason and ("length" if reason is StopReason.LENGTH else "stop")
    return {"index": number, **said, "logprobs": logprobs, "finish_reason": finish}
