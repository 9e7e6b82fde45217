"""Builds OpenAI's replies from samples, whole or in chunks, as the content of their JSON."""

from __future__ import annotations

import codecs
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rl_vlm.chat import ChatCodec
from rl_vlm.engines.base import BASE_MODEL
from rl_vlm.envs.tool_forms import Tools
from rl_vlm.envs.tools import CallReader, overlap
from rl_vlm.types import POLICY, Completion, GenerationRequest, Sample, SampleChunk, StopReason, TopLogprobs


class ReplyText:
    """The text of one sample while it grows. Fed in pieces or at once, it gives the same text and tokens.

    It works on bytes, because a token may hold part of a character. Text that may be the beginning of a stop string is
    held back until the next tokens decide. A stop string that ends within the first `min_tokens` tokens is plain text.
    `keep_stop`: the text ends with it, not before it.
    """

    def __init__(
        self, codec: ChatCodec, stop: Iterable[str] = (), min_tokens: int = 0, keep_stop: bool = False
    ) -> None:
        self._codec, self._keep_stop = codec, keep_stop
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
            end, last = min(cuts)[not self._keep_stop], True
            del self._bytes[end:]
        elif not last:
            end -= max((overlap(bytes(self._bytes[-len(stop) :]), stop) for stop in self._stops), default=0)
        text = self._utf8.decode(bytes(self._bytes[self._sent : end]), final=last)
        self._sent, self._over = max(end, self._sent), last
        first = self._tokens_sent
        while self._tokens_sent < len(self._starts) and self._starts[self._tokens_sent] < self._sent:
            self._tokens_sent += 1
        return text, range(first, self._tokens_sent)


Content = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt as the engine gets it, and what its answer may hold beside text."""

    request: GenerationRequest
    prompt_ids: np.ndarray  # int32 [P], with every token of the images
    thinks: bool = False  # thoughts are parted from the answer; `sampling.opened_thought`: it begins within one
    tools: Tools | None = None  # calls of these are parted from the answer
    forced: str | None = None  # the answer is a list of calls (""), or the arguments of this tool
    parallel: bool = True  # whether several calls are passed on
    scores_only: bool = False  # no answer is wanted; the engine gives one token all the same


class AnswerReader:
    """Parts the text of one answer, while it grows, into thought, text and calls."""

    def __init__(self, asked: Asked) -> None:
        # None: the beginning decides whether there is a thought.
        self._thinking = True if asked.request.sampling.opened_thought else None if asked.thinks else False
        self._held, self._asked, self.num_calls = "", asked, 0
        self._calls = None if asked.tools is None or asked.forced else CallReader(asked.tools)
        if asked.forced == "" and self._calls is not None:  # a list, as Mistral's models write it behind a mark
            self._calls.feed(_LIST_MARK, last=False)

    def feed(self, text: str, last: bool) -> Content:
        """The fields of a delta: `reasoning`, `content` and `tool_calls`, as far as they have grown."""
        thought, text = self._part_thought(text, last)
        content = {"reasoning": thought} if thought else {}
        if self._asked.forced:
            calls = [self._call(self._asked.forced if not self.num_calls else None, text)] if text else []
        elif self._calls is not None:
            text, found = self._calls.feed(text, last)
            text = text.removeprefix(_LIST_MARK)
            found = found if self._asked.parallel else found[: 1 - self.num_calls]
            calls = [self._call(one.name, json.dumps(one.arguments, ensure_ascii=False)) for one in found]
        else:
            return content | ({"content": text} if text else {})
        text = "" if self._asked.forced else text
        return content | ({"content": text} if text else {}) | ({"tool_calls": calls} if calls else {})

    def _call(self, name: str | None, arguments: str) -> Content:
        """A call, or more of the arguments of the last one. Mistral's template wants nine letters or digits as id."""
        if name is None:
            return {"index": self.num_calls - 1, "function": {"arguments": arguments}}
        self.num_calls += 1
        head = {"index": self.num_calls - 1, "id": uuid.uuid4().hex[:9], "type": "function"}
        return {**head, "function": {"name": name, "arguments": arguments}}

    def _part_thought(self, text: str, last: bool) -> tuple[str, str]:
        self._held, text = "", self._held + text
        if self._thinking is None:
            head = text.lstrip()
            if _OPEN.startswith(head) and len(head) < len(_OPEN) and not last:
                self._held = text
                return "", ""
            self._thinking = head.startswith(_OPEN)
            text = head.removeprefix(_OPEN) if self._thinking else text
        if not self._thinking:
            return "", text
        thought, closed, text = text.partition(_CLOSE)
        if closed:
            self._thinking = False
        elif not last:
            kept = len(thought) - overlap(thought, _CLOSE)
            thought, self._held = thought[:kept], thought[kept:]
        return thought, text


_OPEN, _CLOSE, _LIST_MARK = "<think>", "</think>", "[TOOL_CALLS]"


@dataclass
class _Growing:
    """One sample while it grows."""

    asked: Asked
    text: ReplyText
    answer: AnswerReader
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[TopLogprobs] = field(default_factory=list)
    scores: Sequence[TopLogprobs] = ()  # of the prompt from its second token on
    num_chars: int = 0  # of the tokens that were sent


class ReplyForm(ABC):
    """The reply to one request of one or more prompts, whose samples are numbered through, whole or in chunks.

    Subclasses give its form; `body` says what the client wants to know, `model` which model answers.
    """

    says_done = True  # a stream ends with [DONE]

    def __init__(self, codec: ChatCodec, asked: Sequence[Asked], model: str, body: Any) -> None:
        self._codec, self._body, self._policy = codec, body, asked[0].request.policy
        self._head: Content = {"id": asked[0].request.request_id, "created": int(time.time()), "model": model}
        self._samples = [self._growing(one) for one in asked for _ in range(one.request.sampling.n)]
        self.num_prompt_tokens = sum(len(one.prompt_ids) for one in asked)

    def _growing(self, asked: Asked) -> _Growing:
        sampling = asked.request.sampling
        text = ReplyText(self._codec, sampling.stop, sampling.min_tokens, self._body.include_stop_str_in_output)
        return _Growing(asked, text, AnswerReader(asked))

    @property
    def num_sampled(self) -> int:
        return sum(len(sample.token_ids) for sample in self._samples)

    @abstractmethod
    def whole(self, completions: Sequence[Completion]) -> Content:
        """The reply to a request that is not streamed."""

    @abstractmethod
    def chunk(self, new: SampleChunk) -> list[Content]:
        """The events for new tokens of one sample; none while they add no text that is certain."""

    @abstractmethod
    def end(self, version: int) -> list[Content]:
        """The last events."""

    def _grow(self, number: int, new: Sample | SampleChunk, last: bool) -> tuple[_Growing, str, range]:
        """A sample with new tokens, its text that is certain now, and which of its tokens begin in that."""
        sample = self._samples[number]
        ids = [] if sample.asked.scores_only else new.token_ids.tolist()
        sample.token_ids += ids
        sample.logprobs += new.logprobs.tolist()[: len(ids)]
        sample.top += new.top_logprobs[: len(ids)]
        text, places = sample.text.feed(ids, last)
        if self._body.return_token_ids:  # each token then has its log-probability, as at vLLM
            places = range(len(sample.token_ids) - len(ids), len(sample.token_ids))
        return sample, text, places

    def _content(self, kind: str, version: int, choices: list[Content], usage: Content | None) -> Content:
        shared = {**self._head, "system_fingerprint": fingerprint(version, self._policy)}
        return {**shared, "object": kind, "choices": choices, "usage": usage}

    def _text_of(self, token_id: int) -> str:
        if self._body.return_tokens_as_token_ids:
            return f"token_id:{token_id}"
        return self._codec.token_bytes(token_id).decode("utf-8", "replace")

    def _token_of(self, sample: _Growing, place: int) -> Content:
        """One token with its log-probability and its alternatives."""
        top = [self._token(token, value) for token, value in sample.top[place]] if sample.top else []
        return {**self._token(sample.token_ids[place], sample.logprobs[place]), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> Content:
        data = self._codec.token_bytes(token_id)
        return {"token": self._text_of(token_id), "logprob": logprob, "bytes": list(data)}

    def _usage(self) -> Content:
        prompt, sampled = self.num_prompt_tokens, self.num_sampled
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


class ChoicesReply(ReplyForm):
    """A reply with a choice for each sample."""

    kind: str
    chunk_kind: str
    has_prompts = False  # each choice has its own prompt

    def whole(self, completions: Sequence[Completion]) -> Content:
        samples = [(completion, sample) for completion in completions for sample in completion.samples]
        choices = []
        for number, (completion, sample) in enumerate(samples):
            self._samples[number].scores = completion.prompt_logprobs
            choice = self._choice(number, sample, last=True, whole=True)
            if self._body.return_token_ids:  # and who sampled them: [number of tokens, version] in order
                pieces = sample.pieces or ((len(sample.token_ids), completion.policy_version),)
                choice["policy_versions"] = [[count, max(version, 0)] for count, version in pieces]
            choices.append(choice | (self._of_prompt(completion) if self.has_prompts else {}))
        content = self._content(self.kind, min(one.policy_version for one in completions), choices, self._usage())
        return content if self.has_prompts else content | self._of_prompt(completions[0])

    def chunk(self, new: SampleChunk) -> list[Content]:
        first = not self._samples[new.number].token_ids
        choice = self._choice(new.number, new, last=new.stop_reason is not None, whole=False)
        if not first and not self._has_content(choice):
            return []
        options = self._body.stream_options
        counts = options is not None and options.include_usage and options.continuous_usage_stats
        content = self._content(self.chunk_kind, new.policy_version, [choice], self._usage() if counts else None)
        if first and self._body.return_token_ids:
            fields = choice if self.has_prompts else content
            fields["prompt_token_ids"] = self._samples[new.number].asked.prompt_ids.tolist()
        return [content]

    def end(self, version: int) -> list[Content]:
        # The usage, where it is asked for, without choices.
        options = self._body.stream_options
        wanted = options is not None and options.include_usage
        return [self._content(self.chunk_kind, version, [], self._usage())] if wanted else []

    def _choice(self, number: int, new: Sample | SampleChunk, last: bool, whole: bool) -> Content:
        first = not self._samples[number].token_ids
        sample, text, places = self._grow(number, new, last)
        logprobs = self._logprobs(sample, places) if self._body.top is not None else None
        choice = {"index": number, **self._said(sample, text, last, whole, first), "logprobs": logprobs}
        choice["finish_reason"] = None if new.stop_reason is None else self._finish_reason(sample, new.stop_reason)
        return choice | ({"token_ids": new.token_ids.tolist()} if self._body.return_token_ids else {})

    @abstractmethod
    def _said(self, sample: _Growing, text: str, last: bool, whole: bool, first: bool) -> Content:
        """The fields of a choice that hold new text."""

    @abstractmethod
    def _logprobs(self, sample: _Growing, places: range) -> Content:
        """The log-probabilities of some of the sample's tokens."""

    def _has_content(self, choice: Content) -> bool:
        """Whether a chunk has anything to say."""
        said = choice.get("delta") or choice.get("text") or (choice["logprobs"] and any(choice["logprobs"].values()))
        return bool(said or choice["finish_reason"] or choice.get("token_ids"))

    def _finish_reason(self, sample: _Growing, reason: StopReason) -> str:
        if reason is StopReason.LENGTH:
            return "length"
        return "tool_calls" if sample.answer.num_calls and not sample.asked.forced else "stop"

    def _of_prompt(self, completion: Completion) -> Content:
        fields: Content = {}
        if self._body.return_token_ids:
            fields["prompt_token_ids"] = completion.prompt_ids.tolist()
        if self._body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = [None, *map(self._prompt_place, completion.prompt_logprobs)]
        return fields

    def _prompt_place(self, place: TopLogprobs) -> Content:
        """As vLLM writes it: the prompt's own token first; the rank only where it is among the most likely."""
        ranks = {token: rank for rank, (token, _) in enumerate(place[1:], 1)}
        return {
            str(token): {"logprob": value, "rank": ranks.get(token), "decoded_token": self._text_of(token)}
            for token, value in place
        }


class ChatReply(ChoicesReply):
    """OpenAI's `chat.completion`."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def _said(self, sample: _Growing, text: str, last: bool, whole: bool, first: bool) -> Content:
        grown = sample.answer.feed(text, last)
        thought = grown.pop("reasoning", None)
        if thought and self._body.include_reasoning:  # under the name that vLLM gives it, and the one that clients know
            grown = {"reasoning": thought, "reasoning_content": thought, **grown}
        if not whole:
            return {"delta": ({"role": "assistant", "content": ""} if first else {}) | grown}
        for call in grown.get("tool_calls", ()):
            del call["index"]
        nothing = None if thought or sample.answer.num_calls else ""
        return {"message": {"role": "assistant", "content": nothing, "refusal": None, **grown}}

    def _logprobs(self, sample: _Growing, places: range) -> Content:
        return {"content": [self._token_of(sample, place) for place in places], "refusal": None}


class TextReply(ChoicesReply):
    """OpenAI's legacy `text_completion`."""

    kind = chunk_kind = "text_completion"
    has_prompts = True

    def _said(self, sample: _Growing, text: str, last: bool, whole: bool, first: bool) -> Content:
        echo = self._body.echo and first
        return {"text": self._codec.text_of(sample.asked.prompt_ids) + text if echo else text}

    def _logprobs(self, sample: _Growing, places: range) -> Content:
        fields: Content = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

        def add(token: int, value: float | None, top: TopLogprobs) -> None:
            words = self._text_of(token)
            fields["tokens"].append(words)
            fields["token_logprobs"].append(value)
            # Parts of characters may share a text: the likeliest one counts.
            likely = {self._text_of(other): score for other, score in reversed(top)}
            fields["top_logprobs"].append(None if value is None else {words: value} | likely)
            fields["text_offset"].append(sample.num_chars)
            sample.num_chars += len(words)

        if self._body.echo and not sample.num_chars:
            first, *others = sample.asked.prompt_ids.tolist()
            add(first, None, ())
            for token, place in zip(others, sample.scores, strict=True):
                add(token, place[0][1], place[1:])
        for k in places:
            add(sample.token_ids[k], sample.logprobs[k], sample.top[k] if sample.top else ())
        return fields


def fingerprint(version: int, policy: str = POLICY) -> str:
    return "base" if version == BASE_MODEL else f"{policy}-v{version}"
