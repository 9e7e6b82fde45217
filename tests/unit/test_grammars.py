"""Samples that keep to a grammar: what may come next, and what its log-probability is."""

from __future__ import annotations

import json
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import psutil
import pytest
import regex
import torch
from core_support import plain_model, reference_logits, request
from test_engine_sampling import decoder, run

from rl_vlm.engines.base import EngineError
from rl_vlm.engines.decoder import Decoder
from rl_vlm.engines.grammar_check import GrammarCheck
from rl_vlm.engines.grammars import Grammars
from rl_vlm.engines.json_schema import json_lark
from rl_vlm.models.images import TextSide
from rl_vlm.types import Grammar, SamplingParams, StopReason, UserInputError

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


SCHEMAS: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "fixtures/answers/json_schemas.json").read_text(), parse_float=Decimal
)
FORMATS = {  # that jsonschema knows with further packages only
    "time": r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?(z|[+-]([01]\d|2[0-3]):[0-5]\d)",
    "email": r"[^@]+@[^@]+", "uri": r"[a-z][a-z0-9+.-]*:\S*",
    "hostname": r"(?!-)[a-z0-9-]{1,63}(?<!-)(\.(?!-)[a-z0-9-]{1,63}(?<!-))*\.?",
    "duration": r"p(?!$)(\d+w|(\d+y)?(\d+m)?(\d+d)?(t(?!$)(\d+h)?(\d+m)?(\d+s)?)?)",
}  # fmt: skip


def validator(schema: Any) -> Any:
    """jsonschema's, by the draft that the schema names; numbers are decimal, as they are written."""
    checker = jsonschema.FormatChecker(["date", "ipv4", "ipv6", "uuid"])
    for name, pattern in FORMATS.items():
        checker.checks(name)(lambda value, form=pattern: regex.fullmatch(form, value, regex.I) is not None)
    checker.checks("date-time")(  # a date and a time
        lambda value: (
            checker.conforms(value[:10], "date") and value[10] in "tT" and checker.conforms(value[11:], "time")
        )
    )
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    return kind(schema, format_checker=checker)


def as_json(schema: Any) -> str:
    return json.dumps(schema, default=float)


@pytest.mark.slow
def test_finished_samples_fit_their_schemas(text: TextSide, decoder: Decoder) -> None:
    """Every schema that llguidance follows, sixteen samples each at temperature 1."""
    finished = {}
    followed = list(SCHEMAS["followed"].items())
    for start in range(0, len(followed), 65):
        asked = [
            ask(
                text,
                "json_schema",
                as_json(schema),
                name=name,
                n=16,
                seeds=tuple(range(16)),
                temperature=1.0,
                max_new_tokens=120,
            )
            for name, schema in followed[start : start + 65]
        ]
        for (name, schema), answer in zip(followed[start:], run(decoder, *asked), strict=False):
            done = [one for one in answer.samples if one.stop_reason is StopReason.END_OF_TURN]
            for sample in done:
                said = text.codec.decode(sample.token_ids[:-1])
                errors = [
                    error.message for error in validator(schema).iter_errors(json.loads(said, parse_float=Decimal))
                ]
                assert not errors, (name, said, errors)
            finished[name] = len(done)
    assert sum(finished.values()) > 12 * len(finished)
    assert len([name for name, count in finished.items() if not count]) < 5


@pytest.mark.parametrize("name", SCHEMAS["refused"])
def test_a_schema_that_cannot_be_followed_is_refused_in_one_sentence(text: TextSide, name: str) -> None:
    word, schema = SCHEMAS["refused"][name]
    with pytest.raises(UserInputError) as caught:
        Grammars(text).matcher(SamplingParams(8, grammar=Grammar("json_schema", as_json(schema))))
    said = str(caught.value)
    assert said.startswith("The ") and word in said and "at 2(" not in said and "\n" not in said and len(said) < 260


@pytest.mark.parametrize("section", ["accepted", "not accepted"])
def test_only_what_fits_can_be_said(text: TextSide, section: str) -> None:
    """Names with escapes, days that leap: what samples of noise rarely hold."""
    for schema, said in SCHEMAS[section]:
        assert validator(schema).is_valid(json.loads(said, parse_float=Decimal)) == (section == "accepted")
        matcher = Grammars(text).matcher(SamplingParams(8, grammar=Grammar("json_schema", as_json(schema))))
        assert matcher is not None
        tokens = text.codec.encode_text(said).tolist()
        accepted = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
        assert accepted == (section == "accepted"), (schema, said)


A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
B: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "accepted", "rejected"),
    [
        (A, ['{"a":1}', '{"a": 1}', "{}"], ['{"a":1,"b":2}', '{"a":  1}', '{ "a":1}', '{\n"a":1}']),
        (A | {"properties": {}}, ["{}"], ['{"a":1}']),
        (A | {"additionalProperties": True}, ['{"a":1, "b":2}'], ['{"a":"x"}']),
        ({"type": "object"}, ["{}", '{"a": [1, 2]}'], ['{"a":\n1}']),
        ({"type": "object", "required": ["a"]}, ['{"a":null}'], ["{}", '{"a":null,"b":1}']),
        ({"allOf": [A, B]}, ['{"a":1,"b":2}'], ['{"a":1,"b":2,"c":3}']),
        ({**A, "anyOf": [B, {"required": ["a"]}]}, ['{"a":1,"b":2}', '{"a":1}'], ['{"a":1,"c":2}']),
        ({"$defs": {"A": A}, "allOf": [{"$ref": "#/$defs/A"}, B]}, ['{"a":1,"b":2}'], ['{"c":3}']),
        ({"$defs": {"A": A}, "type": "array", "items": {"$ref": "#/$defs/A"}}, ['[{"a":1}]'], ['[{"b":1}]']),
        ({"type": "array", "prefixItems": [{"type": "integer"}]}, ["[1]", "[]"], ["[1,2]"]),
        (A | {"x-guidance": {"whitespace_flexible": False}}, ['{"a":1}'], ['{"a": 1}']),
        (A | {"x-guidance": {"whitespace_pattern": "\n?"}}, ['{"a"\n:\n1}'], ['{"a": 1}', '{"a":\n\n1}']),
        (A | {"x-guidance": {"whitespace_flexible": True}}, ['{\n  "a" : 1 }'], ['{"b":1}']),
    ],
    ids=str,
)  # fmt: skip
def test_json_is_compact_and_closed_unless_its_schema_says_otherwise(
    text: TextSide, schema: Any, accepted: list[str], rejected: list[str]
) -> None:
    matcher = Grammars(text).matcher(SamplingParams(8, grammar=Grammar("json_schema", as_json(schema))))
    assert matcher is not None
    for said in accepted + rejected:
        own, tokens = matcher.deep_copy(), text.codec.encode_text(said).tolist()
        fits = own.try_consume_tokens(tokens) == len(tokens) and own.is_accepting()
        assert fits == (said in accepted), said


@pytest.fixture(scope="module")
def check(text: TextSide) -> GrammarCheck:
    return GrammarCheck(text.codec.tokenizer_json(), text.vocab_size, text.codec.end_of_turn_id)


@pytest.mark.parametrize(
    "hostile",
    [
        json_lark('{"type": "array", "items": {"type": "boolean"}, "minItems": 1000000000}'),
        '%json {"type": "integer", "minimum": -9223372036854775808, "maximum": -9223372036854775807}',
        json_lark('{"$ref": "#"}'),
        "/(a{1000}){1000}/",
        '("' + "(" * 20_000,
    ],
    ids=lambda lark: lark[:60],
)
def test_a_grammar_that_ends_its_reader_is_rejected_and_the_next_one_is_read(check: GrammarCheck, hostile: str) -> None:
    started = time.monotonic()
    for _ in range(2):  # the second time from memory
        with pytest.raises(UserInputError, match="The grammar cannot be followed: "):
            check.check(f"start: {hostile}")
    check.check('start: "a"')
    assert time.monotonic() - started < 30  # of a busy machine


def test_a_reader_that_was_killed_is_replaced(check: GrammarCheck) -> None:
    check.check('start: "b"')
    children = [one for one in psutil.Process().children() if "grammar_child" in " ".join(one.cmdline())]
    assert children  # other tests of this process may have one, too
    for child in children:
        child.kill()
    check.check('start: "c"')


def test_a_sample_that_llguidance_gives_up_is_not_a_finished_one(text: TextSide, decoder: Decoder) -> None:
    (answer,) = run(decoder, ask(text, "regex", "a{1000000}"))
    assert answer.samples[0].stop_reason is StopReason.LENGTH


@pytest.mark.parametrize(
    ("pattern", "sentence"),
    [
        ("(", 'invalid regex "(" (in regex): unclosed group.'),
        (
            "(?=a)b",
            'invalid regex "(?=a)b" (in regex): look-around, including look-ahead and look-behind, is not supported.',
        ),
        ("(" + "ab" * 400, "(in regex): unclosed group."),
    ],
)
def test_a_bad_pattern_gets_one_sentence_that_says_why(text: TextSide, pattern: str, sentence: str) -> None:
    with pytest.raises(UserInputError) as caught:
        Grammars(text).matcher(SamplingParams(8, grammar=Grammar("regex", pattern)))
    assert (
        str(caught.value).startswith("The grammar cannot be followed: invalid regex") and len(str(caught.value)) < 260
    )
    assert str(caught.value).endswith(sentence)


@pytest.mark.parametrize(
    ("kind", "grammar", "said"),
    [
        ("regex", "<tool_call>[ab]{2}</tool_call>", "<tool_call>ba</tool_call>"),
        ("regex", r"(yes|no) <think>\n(x|\(y)", "no <think>\n(y"),
        ("grammar", 'start: "none" | "<tool_call>\\"a\\"</tool_call>"', '<tool_call>"a"</tool_call>'),
        ("grammar", 'start: one+\none: /<tool_call>[0-9]+/ "</tool_call>"', "<tool_call>7</tool_call><tool_call>12</tool_call>"),
    ],
)  # fmt: skip
def test_a_form_may_hold_the_model_s_own_tokens(
    text: TextSide, decoder: Decoder, kind: Any, grammar: str, said: str
) -> None:
    codec = text.codec
    ids: list[int | None] = []
    for part in regex.split("(</?tool_call>|<think>)", said):
        own = codec.token_id(part)
        ids += codec.encode_text(part).tolist() if own is None else [own]
    asked = SamplingParams(1, grammar=Grammar(kind, grammar))
    matcher, other = Grammars(text).matcher(asked), Grammars(text).matcher(asked)
    assert matcher is not None and all(matcher.consume_token(number) for number in ids) and matcher.is_accepting()
    assert other is not None and not other.consume_token(codec.token_id("<think>"))
    (answer,) = run(decoder, ask(text, kind, grammar))
    assert len(answer.samples[0].token_ids) > 1  # it does not end at the token


@pytest.mark.parametrize("pattern", ["(<tool_call>a)?", "a|<tool_call>b", "<tool_call>+", "<tool_call>{2}x"])
def test_a_pattern_with_a_token_in_a_group_gets_one_sentence(text: TextSide, pattern: str) -> None:
    with pytest.raises(UserInputError, match=r"write it as a grammar in Lark"):
        Grammars(text).lark(SamplingParams(1, grammar=Grammar("regex", pattern)))


def test_rows_with_and_without_grammars_run_together_and_penalties_hold(text: TextSide, decoder: Decoder) -> None:
    free = request(text, ["Which?"], name="free", max_new_tokens=20, temperature=0.0)
    asked = ask(text, "grammar", 'start: "ab" | "cd"', name="bound", temperature=0.0)
    alone = run(decoder, free)[0].samples[0].token_ids
    together, bound = run(decoder, free, asked)
    assert np.array_equal(together.samples[0].token_ids, alone)
    assert text.codec.decode(bound.samples[0].token_ids[:-1]) in ("ab", "cd")


@pytest.mark.parametrize(
    ("kind", "grammar"),
    [("regex", "("), ("regex", "(?=a)b"), ("json_schema", "{"), ("json_schema", '{"type": "colour"}'), ("grammar", "start: x")],
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
