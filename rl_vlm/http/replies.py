"""Builds OpenAI's replies from samples, whole or in chunks, as the content of their JSON."""

from __future__ import annotations

import codecs
import time
from collections.abc import Iterable, Sequence
from typing import Any

from rl_vlm.chat import ChatCodec
from rl_vlm.engines.base import BASE_MODEL
from rl_vlm.types import Completion, GenerationRequest, SampleChunk, StopReason, TopLogprobs


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


class _Streamed:
    """One sample of a stream: its text, and all its tokens so far."""

    def __init__(self, text: ReplyText) -> None:
        self.text = text
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.top: list[TopLogprobs] = []


class ChatReply:
    """The reply to one chat request.

    Args:
        codec: the model's.
        request: what the engine was asked; its stop strings end the text before the first of them.
        model: the name that the client asked for.
        num_prompt_tokens: with every token of the images.
        logprobs: whether the client wants log-probabilities.
    """

    def __init__(
        self, codec: ChatCodec, request: GenerationRequest, model: str, num_prompt_tokens: int, logprobs: bool
    ) -> None:
        self._codec = codec
        self._head: Content = {"id": request.request_id, "created": int(time.time()), "model": model}
        self._sampling = request.sampling
        self._num_prompt_tokens = num_prompt_tokens
        self._logprobs = logprobs
        self._streamed = [_Streamed(self._new_text()) for _ in range(request.sampling.n)]

    def whole(self, completion: Completion) -> Content:
        """The reply at once."""
        choices = []
        for number, sample in enumerate(completion.samples):
            ids = sample.token_ids.tolist()
            text, tokens = self._new_text().feed(ids, last=True)
            choice = {
                "index": number,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": self._token_logprobs(tokens, ids, sample.logprobs.tolist(), sample.top_logprobs),
                "finish_reason": _finish(sample.stop_reason),
            }
            choices.append(choice)
        usage = self._usage(sum(len(sample.token_ids) for sample in completion.samples))
        return self._content("chat.completion", completion.policy_version, choices, usage)

    def chunk(self, new: SampleChunk) -> Content | None:
        """The event for new tokens of one sample; None while they add no text that is certain."""
        sample = self._streamed[new.number]
        delta: Content = {} if sample.token_ids else {"role": "assistant"}
        token_ids = new.token_ids.tolist()
        sample.token_ids += token_ids
        sample.logprobs += new.logprobs.tolist()
        sample.top += new.top_logprobs
        text, tokens = sample.text.feed(token_ids, last=new.stop_reason is not None)
        if not (delta or text or new.stop_reason or (tokens and self._logprobs)):
            return None
        choice = {
            "index": new.number,
            "delta": {**delta, "content": text},
            "logprobs": self._token_logprobs(tokens, sample.token_ids, sample.logprobs, sample.top),
            "finish_reason": new.stop_reason and _finish(new.stop_reason),
        }
        return self._content("chat.completion.chunk", new.policy_version, [choice], None)

    def last_chunk(self, version: int) -> Content:
        """The usage, in an event without choices."""
        return self._content("chat.completion.chunk", version, [], self._usage(self.num_sampled))

    @property
    def num_sampled(self) -> int:
        """Tokens sampled by the stream so far."""
        return sum(len(sample.token_ids) for sample in self._streamed)

    def _content(self, kind: str, version: int, choices: list[Content], usage: Content | None) -> Content:
        shared = {**self._head, "system_fingerprint": fingerprint(version)}
        return {**shared, "object": kind, "choices": choices, "usage": usage}

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
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": self._num_prompt_tokens + sampled,
        }


def fingerprint(version: int) -> str:
    """The policy version as `system_fingerprint`."""
    return "base" if version == BASE_MODEL else f"policy-v{version}"


def _finish(reason: StopReason) -> str:
    return "length" if reason is StopReason.LENGTH else "stop"
