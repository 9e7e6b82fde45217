"""Samples that keep to a grammar: what may come next, and what its log-probability is."""

from __future__ import annotations

import json
import time
from typing import Any

import jsonschema
import numpy as np
import pytest
import regex
import torch
from core_support import plain_model, reference_logits, request
from test_engine_sampling import decoder, run

from rl_vlm.engines.base import EngineError
from rl_vlm.engines.decoder import Decoder
from rl_vlm.models.images import TextSide
from rl_vlm.types import Grammar, StopReason, UserInputError

__all__ = ["decoder"]
NUMBER = r"-?(0|[1-9][0-9]{0,3})(\.[0-9]{1,2})?"


def ask(text: TextSide, kind: Any, grammar: str, **more: Any) -> Any:
    more = {"max_new_tokens": 80, "grammar": Grammar(kind, grammar), **more}
    return request(text, ["Which?"], name=more.pop("name", "r"), **more)


def test_log_probabilities_are_those_of_the_tokens_that_the_pattern_allows(
    text: TextSide, decoder: Decoder, tiny_folder: Any
) -> None:
    """Against an allowed set that is found by trying every token with another library's partial matches."""
    (answer,) = run(decoder, ask(text, "regex", NUMBER, n=6, temperature=1.0))
    model, codec = plain_model(tiny_folder), text.codec
    suppressed = set(codec.suppressed_token_ids(text.vocab_size).tolist())
    texts = [codec.decode(np.array([token])) for token in range(text.vocab_size)]
    for sample in answer.samples:
        ids, said = sample.token_ids.tolist(), ""
        assert sample.stop_reason is StopReason.END_OF_TURN and regex.fullmatch(
            NUMBER, codec.decode(sample.token_ids[:-1])
        )
        logits = reference_logits(tiny_folder, model, np.concatenate([answer.prompt_ids, ids[:-1]]), [])[-len(ids) :]
        for place, token in enumerate(ids):
            allowed = [
                one for one in range(text.vocab_size)
                if one not in suppressed and one != codec.end_of_turn_id and texts[one]
                and regex.fullmatch(NUMBER, said + texts[one], partial=True)
            ]  # fmt: skip
            if regex.fullmatch(NUMBER, said):
                allowed.append(codec.end_of_turn_id)
            assert token in allowed
            expected = torch.log_softmax(logits.detach()[place, allowed], -1)[allowed.index(token)]
            assert sample.logprobs[place] == pytest.approx(float(expected), abs=1e-4)
            said += texts[token]


SCHEMAS: dict[str, dict[str, Any]] = json.loads("""{
  "enum": {"enum": ["red", 5, null]},
  "nested": {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}},
             "required": ["a"], "additionalProperties": false},
  "any": {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 3}]},
  "reference": {"$defs": {"n": {"type": "integer", "minimum": 1, "maximum": 3}}, "type": "object",
                "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"], "additionalProperties": false},
  "pattern": {"type": "string", "pattern": "^[a-c]{2}$"}
}""")


@pytest.mark.parametrize("name", SCHEMAS)
def test_finished_samples_fit_their_schema(text: TextSide, decoder: Decoder, name: str) -> None:
    (answer,) = run(
        decoder, ask(text, "json_schema", json.dumps(SCHEMAS[name]), n=16, temperature=1.0, max_new_tokens=120)
    )
    done = [one for one in answer.samples if one.stop_reason is StopReason.END_OF_TURN]
    for sample in done:
        jsonschema.validate(json.loads(text.codec.decode(sample.token_ids[:-1])), SCHEMAS[name])
    assert len(done) >= 8


def test_rows_with_and_without_grammars_run_together_and_penalties_hold(text: TextSide, decoder: Decoder) -> None:
    free = request(text, ["Which?"], name="free", max_new_tokens=20, temperature=0.0)
    asked = ask(text, "grammar", 'start: "ab" | "cd"', name="bound", temperature=0.0)
    alone = run(decoder, free)[0].samples[0].token_ids
    together, bound = run(decoder, free, asked)
    assert np.array_equal(together.samples[0].token_ids, alone)
    assert text.codec.decode(bound.samples[0].token_ids[:-1]) in ("ab", "cd")


@pytest.mark.parametrize(
    ("kind", "grammar"),
    [("regex", "("), ("regex", "(?=a)b"), ("json_schema", "{"), ("json_schema", '{"type": "colour"}'), ("grammar", "start: x"),
     ("json_schema", '{"type": "array", "items": {"type": "string"}, "maxItems": 100000}')],
)  # fmt: skip
def test_a_grammar_that_cannot_be_followed_is_refused_in_seconds(
    text: TextSide, decoder: Decoder, kind: Any, grammar: str
) -> None:
    started = time.process_time()
    with pytest.raises(EngineError, match="Request r: The "):
        run(decoder, ask(text, kind, grammar))
    assert time.process_time() - started < 10


def test_a_grammar_has_a_limit_of_characters_and_goes_with_no_other_bound(text: TextSide) -> None:
    with pytest.raises(UserInputError, match="at most"):
        Grammar("regex", "a" * 100_000)
    for more in ({"choices": ("a", "b")}, {"min_tokens": 2}, {"ignore_eos": True}):
        with pytest.raises(UserInputError):
            ask(text, "regex", "a", **more)
