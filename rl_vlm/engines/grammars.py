"""Grammars that samples keep to. llguidance says, as a sample grows, which tokens may come next.

It builds a grammar in milliseconds and has limits of its own for what a hostile one may cost. xgrammar, which computes
the masks of all states ahead, took 26 s for an object with a string of up to 200 characters and Qwen's vocabulary.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_vlm.engines.base import choice_tokens
from rl_vlm.models.images import TextSide
from rl_vlm.types import Grammar, SamplingParams, TrajectoryError, UserInputError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_REMEMBERED = 256  # grammars
_MAPS = ("properties", "patternProperties", "$defs", "definitions")  # keywords of names
_VALUES = ("const", "enum", "default", "example", "examples", "x-guidance")  # keywords of what is no schema
_LEAP = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29"
_DATE = {"pattern": f"^([0-9]{{4}}-(0[13-9]|1[0-2]|02-([01]|2[0-8]))|{_LEAP})"}
_SLASH = re.compile(r"(?<!\\)((?:\\\\)*)/")  # one that is not escaped


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
            answer = as_lark(sampling.grammar)
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
            raise UserInputError(f"The grammar cannot be followed: {_sentence(error)}.")
        return matcher.deep_copy()

    @cached_property
    def _tokens(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        codec = self._text.codec
        return LLTokenizer(codec.tokenizer_json(), n_vocab=self._text.vocab_size, eos_token=codec.end_of_turn_id)

    def _build(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher

        return LLMatcher(self._tokens, LLMatcher.grammar_from_lark(grammar), log_level=0)


def as_lark(grammar: Grammar) -> str:
    """The right-hand side of a rule."""
    if grammar.kind == "json_schema":
        try:
            schema = _sealed(json.loads(grammar.text))
            if '"discriminator"' in grammar.text:  # branches of a union, as pydantic writes it, of which one can fit
                schema = {"x-guidance": {"coerce_one_of": True}, **schema}
            return f"%json {json.dumps(schema)}"
        except (ValueError, TypeError, RecursionError) as error:
            raise UserInputError(f"The JSON schema cannot be read: {_sentence(error)}.") from error
    if grammar.kind == "regex":
        pattern = _SLASH.sub(r"\1\\/", grammar.text).replace("\n", r"\n")
        return f"/{pattern}/"
    from llguidance import grammar_from

    try:
        return f"%lark {{\n{grammar_from('grammar', grammar.text)}\n}}"
    except (ValueError, RecursionError) as error:
        raise UserInputError(f"The grammar cannot be read: {_sentence(error)}.") from error


def _sealed(schema: Any, names: bool = False) -> Any:
    """The same schema, so written that llguidance lets through what fits it alone. It does not see that a name with
    escapes, as \\u0061, is one of `properties`, counts a name again that comes again, and lets every year leap."""
    if not isinstance(schema, dict):
        return [_sealed(one) for one in schema] if isinstance(schema, list) else schema
    new = {k: _sealed(v, not names and k in _MAPS) if names or k not in _VALUES else v for k, v in schema.items()}
    if names:
        return new
    new |= {"allOf": [*new.get("allOf", ()), _DATE]} if new.get("format") in ("date", "date-time") else {}
    more, named = new.get("additionalProperties", True), new.get("properties")
    if more is not False and "patternProperties" in new:
        raise UserInputError("The JSON schema has patternProperties, which need additionalProperties: false.")
    if new.get("minProperties", 0) > len(new.get("required", ())) + 1:
        raise UserInputError("The JSON schema has minProperties beyond one more than required, which names may repeat.")
    if more is not False and named:  # a pattern is matched without escapes
        new["patternProperties"] = {"" if more in (True, {}) else f"^{_others(named)}$": more}
        new["additionalProperties"] = False
    return new


def _others(names: Collection[str]) -> str:
    """A regular expression of all texts that are none of these."""
    tails: dict[str, list[str]] = {}
    for name in filter(None, names):
        tails.setdefault(name[0], []).append(name[1:])
    ways = [re.escape(head) + _others(rest) for head, rest in tails.items()]
    ways.append(f"[^{''.join(map(re.escape, tails))}](?s:.)*" if tails else "(?s:.)+")
    return f"({'|'.join(ways + [''] * ('' not in names))})"


def _sentence(error: object) -> str:
    """What llguidance says first, without where in our Lark that is, and its reason, which may come lines later."""
    first, _, rest = re.sub(r"^(at \d+\(\d+\): |panic: .*)", "", str(error)).partition("\n")
    why = re.search(r"^error: (.+)$", rest, re.MULTILINE)
    text = first.replace("regex parse error:", why[1] if why else "").strip(" .") or "it is too large"
    return text if len(text) <= 200 else f"{text[:80]} ... {text[-115:]}"


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
