"""Grammars that samples keep to. llguidance says, as a sample grows, which tokens may come next.

It builds a grammar in milliseconds and has limits of its own for what a hostile one may cost. xgrammar, which computes
the masks of all states ahead, took 26 s for an object with a string of up to 200 characters and Qwen's vocabulary.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_vlm.engines.base import choice_tokens
from rl_vlm.engines.grammar_child import sentence
from rl_vlm.models.images import TextSide
from rl_vlm.types import Grammar, SamplingParams, TrajectoryError, UserInputError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_CALLS = 16  # in one answer: a greedy sample may repeat itself without end
_REMEMBERED = 64  # grammars
_SLASH = re.compile(r"(?<!\\)((?:\\\\)*)/")  # one that is not escaped
_LITERAL = re.compile(r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/')  # a text or a pattern in Lark
_MARK = re.compile(r"(<[^<>\s]+>)")  # what may be an added token
_CLASS, _GROUP = re.compile(r"\\.|\[\^?\]?[^\]]*\]"), re.compile(r"\([^()]*\)")  # in patterns


class Grammars:
    """Matchers for the tokens of one model; may be called from any thread."""

    def __init__(self, text: TextSide) -> None:
        self._text, self._lock = text, threading.Lock()
        self._built = lru_cache(_REMEMBERED)(self._build)

    def lark(self, sampling: SamplingParams) -> str | None:
        """What a sample has to be, in llguidance's Lark; None where it is free. Raises UserInputError."""
        codec = self._text.codec
        if sampling.choices:  # each in the tokenizer's own tokens
            tokens = choice_tokens(sampling, codec.encode_text, codec.decode)
            answer = " | ".join(" ".join(f"<[{token}]>" for token in choice) for choice in tokens)
        elif sampling.grammar is not None:
            answer = as_lark(sampling.grammar, codec.token_id)
        elif sampling.max_thought_tokens is not None:
            answer = "<[*]>*"
        else:
            return None
        if not sampling.opened_thought:
            return f"start: answer\nanswer: {answer}"
        most = "" if sampling.max_thought_tokens is None else f"[max_tokens={sampling.max_thought_tokens}]"
        end = codec.token_id("</think>")
        closed = '"</think>"' if end is None else f"<[{end}]>"
        return f"start: thought {closed} /[ \\n]{{0,2}}/ answer\nthought{most}: /(?s:.*)/\nanswer: {answer}"

    def matcher(self, sampling: SamplingParams) -> LLMatcher | None:
        """A matcher at the beginning of a sample; None for samples that are free. Raises UserInputError."""
        grammar = self.lark(sampling)
        if grammar is None:
            return None
        with self._lock:  # a hostile grammar is built once, not by all threads
            matcher = self._built(grammar)
        if error := matcher.get_error():
            raise UserInputError(f"The grammar cannot be followed: {sentence(error)}.")
        return matcher.deep_copy()

    @cached_property
    def _tokens(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        codec = self._text.codec
        return LLTokenizer(codec.tokenizer_json(), n_vocab=self._text.vocab_size, eos_token=codec.end_of_turn_id)

    def _build(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher

        return LLMatcher(self._tokens, LLMatcher.grammar_from_lark(grammar), log_level=0)


def as_lark(grammar: Grammar, token_id: Callable[[str], int | None]) -> str:
    """The right-hand side of a rule. Raises UserInputError.

    Added tokens such as <tool_call> stand for themselves: in texts and patterns llguidance would neither take them nor
    their letters.
    """
    if grammar.kind == "json_schema":
        return _json(grammar.text)
    if grammar.kind == "calls":
        asked = json.loads(grammar.text)
        more = f"(/, ?/ call){{0,{MAX_CALLS - 1}}}" if asked["several"] else ""
        return f'%lark {{\nstart: "[" call {more} "]"\ncall: {call_lark(asked["tools"], "parameters")}\n}}'
    if grammar.kind == "regex":
        pattern = _SLASH.sub(r"\1\\/", grammar.text).replace("\n", r"\n")
        return _with_tokens(f"/{pattern}/", token_id)
    from llguidance import grammar_from

    try:
        text = grammar_from("grammar", grammar.text)
        if "%json" not in text:  # whose texts are a schema's
            text = _LITERAL.sub(lambda one: _with_tokens(one.group(), token_id), text)
        return f"%lark {{\n{text}\n}}"
    except (ValueError, RecursionError) as error:
        raise UserInputError(f"The grammar cannot be read: {sentence(error)}.") from error


def _with_tokens(literal: str, token_id: Callable[[str], int | None]) -> str:
    """A text or pattern of Lark as a sequence in which added tokens stand alone. Raises UserInputError where a pattern
    has one within a group or an alternative."""
    quote, parts = literal[0], _MARK.split(literal[1:-1])
    ids = [token_id(part.replace("\\", "")) for part in parts]
    if not any(number is not None for number in ids):
        return literal
    sides = [part for part, number in zip(parts, ids, strict=True) if number is None and part]
    if quote == "/" and not all(map(_stands_alone, sides)):
        raise UserInputError(
            f"The pattern {literal} has a token of the model within a group or an alternative, or repeated: write it "
            "as a grammar in Lark, where a token is a part of its own, as in <tool_call> /[a-z]+/ </tool_call>."
        )
    whole = zip(parts, ids, strict=True)
    found = (f"{quote}{part}{quote}" if number is None else f"<[{number}]>" for part, number in whole if part)
    return f"({' '.join(found)})"


def _stands_alone(pattern: str) -> bool:
    """Whether a part of a pattern means the same when the others are written apart."""
    bare, groups = _CLASS.sub("x", pattern), 1
    while groups:
        bare, groups = _GROUP.subn("x", bare)
    return not re.search(r"^[*+?{]|[()|]", bare)


def _json(schema: str) -> str:
    from rl_vlm.engines.json_schema import json_lark  # imports a package that free answers need not have

    return json_lark(schema)


def call_lark(schemas: Mapping[str, Any], key: str) -> str:
    """The right-hand side of a call of one of some tools, whose arguments stand under `key` and fit the tool's schema.
    Each schema is a document of its own, so that references within it lead to its own parts."""
    return " | ".join(
        f'/\\{{"name": ?/ %json {json.dumps({"const": name})} /, ?"{key}": ?/ {_json(json.dumps(schema))} /\\}}/'
        for name, schema in schemas.items()
    )


def forbidden_tokens(matchers: Sequence[LLMatcher | None], size: int) -> np.ndarray:
    """Which of `size` tokens may not come next, bool [R, size]; rows without a matcher are free."""
    masks = b"".join(own.compute_bitmask() if own else b"\xff" * (-(-size // 32) * 4) for own in matchers)
    return np.unpackbits(~np.frombuffer(masks, np.uint8).reshape(len(matchers), -1), 1, size, "little").view(bool)


def format_matcher(text: TextSide, grammar: Grammar | None) -> LLMatcher | None:
    """A matcher for what `rollout.format` says, at the beginning. Raises UserInputError."""
    try:
        return Grammars(text).matcher(SamplingParams(1, grammar=grammar))
    except UserInputError as error:
        raise UserInputError(f"rollout.format: {error}") from error


def allowed_tokens(matcher: LLMatcher, turns: Iterable[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """What was allowed when the tokens of turns were sampled: masks uint8 [U, V / 8] with a bit per token, and the mask
    of each token, int64 [N]. `matcher` is at the beginning. Raises TrajectoryError for a token that was not allowed."""
    masks: dict[bytes, int] = {}
    places = []
    for turn in turns:
        state = matcher.deep_copy()
        for token in turn.tolist():
            places.append(masks.setdefault(state.compute_bitmask(), len(masks)))
            if not state.consume_token(token):
                raise TrajectoryError(
                    f"Token {token} breaks rollout.format: install the same llguidance for engine and learner."
                )
    return np.frombuffer(bytearray().join(masks), np.uint8).reshape(len(masks), -1), np.array(places)
