"""Tool calls: what is accepted, what is repaired, and what every malformed call says."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import table

from rl_vlm.envs.tool_forms import MAX_CHARS, ToolCallError
from rl_vlm.envs.tools import ToolCall, parse_tool_call

TABLES = table("tool_calls")


def call(body: str) -> str:
    return f"Thinking.\n<tool_call>\n{body}\n</tool_call>"


def answer_of(literal: str) -> str:
    """The answer that arrives for a JSON string literal as the policy wrote it."""
    parsed = parse_tool_call(call(f'{{"name": "calc_score", "arguments": {{"answer": {literal}}}}}'))
    assert parsed is not None
    return parsed.arguments["answer"]


F = call('{"name": "f"}')


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The answer is \\boxed{5}.", None),
        ("", None),
        ("</tool_call>", None),
        (F, ToolCall("f", {})),
        (call('{"name": "f", "arguments": null}'), ToolCall("f", {})),
        (call('{"name": " f\\n", "arguments": " "}'), ToolCall("f", {})),
        (call('{"name": "f", "parameters": {"x": 1}}'), ToolCall("f", {"x": 1})),
        (F + call('{"name": "g", "arguments": {}}') + " done", ToolCall("g", {})),  # the last one
        ("<think>" + call("{}") + " <tool_call> </think>So \\boxed{5}.", None),
        (f"<think>I could ask {F} but wait", None),
        (f"<think>hm</think>{F}", ToolCall("f", {})),
    ],
)
def test_the_last_call_outside_of_thoughts_counts(text, expected):
    assert parse_tool_call(text) == expected


@pytest.mark.parametrize("body", TABLES["every_accepted_form_gives_the_same_call"])
def test_every_accepted_form_gives_the_same_call(body):
    assert parse_tool_call(call(body)) == ToolCall("calc_score", {"answer": "5"})


@pytest.mark.parametrize("after", TABLES["a_mere_mention_of_the_tag_does_not_hide_the_call"])
def test_a_mere_mention_of_the_tag_does_not_hide_the_call(after):
    text = call('{"name": "f", "arguments": {}}') + after
    assert parse_tool_call(text) == ToolCall("f", {})
    with pytest.raises(ToolCallError):
        parse_tool_call(f"I think.{after}")


@pytest.mark.parametrize(
    ("literal", "expected"), TABLES["latex_backslashes_arrive_as_written"] + TABLES["escapes_that_are_meant_stay"]
)
def test_latex_backslashes_arrive_as_written_and_escapes_that_are_meant_stay(literal, expected):
    assert answer_of(literal) == expected


@pytest.mark.parametrize("inner", [r"\\frac{1}{2}", r"\frac{1}{2}", r"\\\\frac{1}{2}"])
def test_latex_survives_arguments_given_as_text(inner):
    body = f'{{"name": "calc_score", "arguments": "{{\\"answer\\": \\"{inner}\\"}}"}}'
    parsed = parse_tool_call(call(body))
    assert parsed is not None
    assert parsed.arguments == {"answer": r"\frac{1}{2}"}


@pytest.mark.slow
@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=40))
def test_properly_escaped_text_arrives_unchanged(answer):
    if any(f"{slash}{tag}>" in answer for slash in ("<", "</") for tag in ("think", "tool_call")):
        return
    # json.dumps writes \f, \b and \r\X for control characters, which nobody means before a letter: left out here.
    if any(char in answer for char in "\f\b\r\n\t"):
        return
    assert answer_of(json.dumps(answer)) == answer
    assert answer_of(json.dumps(answer, ensure_ascii=False)) == answer


@pytest.mark.parametrize(
    ("body", "message"),
    [
        *TABLES["a_malformed_call_says_what_is_wrong"],
        ('{"name": "' + "f" * 65 + '"}', "between 1 and 64"),
        ('{"name": "f", "arguments": {"answer": ' + "1" * 5000 + "}}", "number that is too long"),
        ("[" * 8000 + "]" * 8000, "nested too deep"),
        ('{"a":' * 2000, "nested too deep"),
        ("x" * (MAX_CHARS + 1), "at most 16384 characters"),
    ],
)
def test_a_malformed_call_says_what_is_wrong(body, message):
    """Of two calls it is the last one that counts, not an earlier one that is right."""
    with pytest.raises(ToolCallError, match=message):
        parse_tool_call(call(body))


@pytest.mark.slow
@pytest.mark.parametrize(
    "unit",
    ["<tool_call>", "</tool_call>", '<tool_call>"', "\\", '\\"', '"', "[", "{", "</think>", "<tool_call></think>"],
)
def test_hostile_text_is_read_in_linear_time(unit):
    inside = "<tool_call>" + unit * (16_000 // len(unit)) + "</tool_call>"
    started = time.thread_time()
    for text in (inside, unit * 200_000):
        try:
            parse_tool_call(text)
        except ToolCallError:
            pass  # an error is a fine answer; only its time is judged here
    assert time.thread_time() - started < 3  # a quadratic reader would take minutes


@pytest.mark.slow
@given(st.text(alphabet='<>/tool_cal{}[]":,\\nfu0d8 namergs1', max_size=200))
def test_any_text_gives_a_call_or_none_or_a_tool_call_error(text):
    try:
        parsed = parse_tool_call(f"<tool_call>{text}</tool_call>")
    except ToolCallError as error:
        assert str(error)
    else:
        assert parsed is None or isinstance(parsed, ToolCall)
