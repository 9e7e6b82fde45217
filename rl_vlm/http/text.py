"""Turns sampled tokens into a client's text: cut at stop strings, whole characters only, thoughts removed."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence

from rl_vlm.chat import ChatCodec


class ReplyText:
    """The text of one sample while it grows. Fed in pieces or at once, it gives the same text and tokens.

    It works on bytes, because a token may hold part of a character. Text that may be the beginning of a stop string is held
    back until the next tokens decide. A stop string that ends within the first `min_tokens` tokens is plain text.
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
        found = [(self._bytes.find(stop, max(first_end - len(stop), 0)), len(stop)) for stop in self._stops]
        # The stop string that is complete first ends the text, as it would token by token, not the one that begins first.
        cuts = [(place + length, place) for place, length in found if place >= 0]
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


_CLOSED_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)


def without_thoughts(text: str) -> str:
    """`text` without `<think>...</think>`.

    A template may open the thought in the prompt, so everything before a lone `</think>` is a thought, too. A thought without
    an end is not part of the answer.
    """
    text = _CLOSED_THOUGHT.sub("", text)
    return text.rpartition("</think>")[2].partition("<think>")[0].strip()
