"""Tool calls in the forms of all families: sixty and more answers each, cut into pieces anywhere, and vLLM's parsers beside."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest

from rl_vlm.envs.tool_forms import ToolCallError
from rl_vlm.envs.tools import CallReader, parse_tool_call

TYPES = {
    "text": "string", "number": "number", "flag": "boolean", "items": "array", "inner": "object", "none": "null",
}  # fmt: skip
TOOLS: dict[str, dict[str, Any]] = {
    "zoom": {"type": "object", "properties": {name: {"type": kind} for name, kind in TYPES.items()}},
    "stop.now-2": {},
}
Call = tuple[str, dict[str, Any]]

TEXTS = [
    "red", "", "a b", "5", "true", "null", "it's", "two\nlines", "tab\there", "ünï ✓ 🐼", "C:\\temp\\new", "50%", "x = 'y'",
    "a, b: c; d", "[1, 2]", "(x)", "http://a.b/c?d=e&f=#g", "<b>bold</b>", "\\frac{1}{2}", "ends with \\",
]  # fmt: skip
VALUES: list[dict[str, Any]] = [
    {}, {"number": 5}, {"number": -1.5}, {"number": 1e-7}, {"number": 0}, {"flag": True}, {"flag": False}, {"items": []},
    {"items": [1, 2, 3]}, {"items": ["a", "b c"]}, {"items": [[1], [2, [3]]]}, {"inner": {}}, {"inner": {"a": 1}},
    {"inner": {"a": {"b": [True, None]}}}, {"items": [{"a": "b"}, {"c": 5}]}, {"text": "a", "number": 5, "flag": True},
]  # fmt: skip
ARGUMENTS = [*({"text": text} for text in TEXTS), *VALUES]


def hermes(*calls: Call) -> str:
    blocks = (json.dumps({"name": name, "arguments": given}, ensure_ascii=False) for name, given in calls)
    return "\n".join(f"<tool_call>\n{block}\n</tool_call>" for block in blocks)


def qwen_xml(*calls: Call) -> str:
    def parameter(name: str, value: Any) -> str:
        return f"<parameter={name}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"

    return "\n".join(
        f"<tool_call>\n<function={name}>\n{''.join(parameter(*item) for item in given.items())}</function>\n</tool_call>"
        for name, given in calls
    )


def llama(*calls: Call) -> str:
    return "; ".join(json.dumps({"name": name, "parameters": given}, ensure_ascii=False) for name, given in calls)


def mistral(*calls: Call) -> str:
    return "".join(f"[TOOL_CALLS]{name}{json.dumps(given, ensure_ascii=False)}" for name, given in calls)


def old_mistral(*calls: Call) -> str:
    listed = [{"name": name, "arguments": given} for name, given in calls]
    return f"[TOOL_CALLS]{json.dumps(listed, ensure_ascii=False)}"


def gemma(*calls: Call) -> str:
    def value(one: Any) -> str:
        if isinstance(one, str):
            return f'<|"|>{one}<|"|>'
        if isinstance(one, dict):
            return "{" + ",".join(f"{name}:{value(inner)}" for name, inner in one.items()) + "}"
        return "[" + ",".join(map(value, one)) + "]" if isinstance(one, list) else json.dumps(one)

    return "".join(f"<|tool_call>call:{name}{value(given)}<tool_call|>" for name, given in calls)


FORMS = {
    "hermes": hermes, "qwen3_coder": qwen_xml, "llama3_json": llama, "mistral": mistral, "old_mistral": old_mistral,
    "gemma4": gemma,
}  # fmt: skip


def read(text: str, *cuts: int, tools: Any = TOOLS) -> tuple[str, list[Call]]:
    """The text and the calls of an answer that comes in pieces."""
    reader, said, calls = CallReader(tools), "", []
    edges = [0, *sorted(cuts), len(text)]
    for start, end in itertools.pairwise(edges):
        new, found = reader.feed(text[start:end], last=end == len(text))
        said += new
        calls += [(call.name, call.arguments) for call in found]
        if end == len(text):
            break
    return said, calls


@pytest.mark.parametrize("form", FORMS)
def test_calls_arrive_as_they_were_meant_wherever_the_answer_is_cut(form: str) -> None:
    write, rng = FORMS[form], random.Random(0)
    cases: list[list[Call]] = [[("zoom", given)] for given in ARGUMENTS]
    cases += [
        [("zoom", one), ("stop.now-2", {}), ("zoom", other)] for one, other in zip(ARGUMENTS, VALUES, strict=False)
    ]
    cases += [[("zoom", one), ("zoom", other)] for one, other in zip(VALUES, ARGUMENTS, strict=False)]
    assert len(cases) >= 60
    for calls in cases:
        text = write(*calls)
        assert read(text) == ("", calls), text
        for cut in range(1, len(text)):
            assert read(text, cut) == ("", calls), (text, cut)
        assert read(text, *range(1, len(text))) == ("", calls)
        lead = "I look.\n\n" if form != "llama3_json" else ""
        cuts = rng.sample(range(1, len(text)), 4)
        assert read(lead + text, *cuts) == (lead, calls)


WRONG = {
    "hermes": [
        "{}", '{"name": 5}', '{"arguments": {}}', "{'name': 'zoom'}", '{"name": "zoom", "arguments": 5}', "zoom()",
        "",
    ],
    "qwen3_coder": ["<function=>\n</function>", "<function=zoom", f"<function={'z' * 65}>\n</function>"],
    "mistral": ["zoom", "{}", "zoom(5)", '[{"name": 5}]', "[", '["zoom"]', "zoom{5}"],
    "gemma4": ["zoom{}", "call:zoom", "call:zoom{number}", "call:{}", "call:zoom{number:}", "call:zoom{items:[}"],
}  # fmt: skip
MARKS = {
    "hermes": ("<tool_call>", "</tool_call>"), "qwen3_coder": ("<tool_call>", "</tool_call>"), "mistral": ("[TOOL_CALLS]", ""),
    "gemma4": ("<|tool_call>", "<tool_call|>"),
}  # fmt: skip


@pytest.mark.parametrize(("form", "inside"), [(form, inside) for form, all_of in WRONG.items() for inside in all_of])
def test_a_malformed_call_is_text_and_hides_no_other(form: str, inside: str) -> None:
    opens, closes = MARKS[form]
    text = f"So {opens}{inside}{closes}"
    right = FORMS[form](("zoom", {"number": 5}))
    for cuts in ([], range(1, len(text)), [len(text) // 2]):
        assert read(text, *cuts) == (text, [])
    if closes:  # Mistral's call goes on to the next one
        assert read(right + text) == (text, [("zoom", {"number": 5})])
        said, calls = read(text + right)
        assert calls == [("zoom", {"number": 5})] and said == text


@pytest.mark.parametrize("form", FORMS)
def test_a_call_that_is_cut_off_is_text(form: str) -> None:
    text = FORMS[form](("zoom", {"text": "red", "inner": {"a": [1]}}))
    for end in range(1, len(text)):
        said, calls = read(text[:end])
        # Complete but for its closing mark it counts, as vLLM has it; XML and Gemma's form have no such point before.
        assert (said, calls) == (text[:end], []) or calls == [("zoom", {"text": "red", "inner": {"a": [1]}})]
        assert read(text[:end], *range(1, end)) == (said, calls)


@pytest.mark.parametrize(
    "text", ['{"a": 5}', '{"name": "Ann", "parameters": {}}', '{"name"', "{", ' {"name": "zoom"', "{ not"]
)
def test_json_that_is_an_answer_stays_one(text: str) -> None:
    for cuts in ([], range(1, len(text))):
        assert read(text, *cuts) == (text, [])


@pytest.mark.parametrize("form", [form for form in FORMS if form != "llama3_json"])
def test_environments_read_the_same_calls(form: str) -> None:
    text = "So.\n" + FORMS[form](("zoom", {"number": 1}), ("stop.now-2", {"text": "red"}))
    call = parse_tool_call(text)
    assert call is not None and (call.name, call.arguments) == ("stop.now-2", {"text": "red"})


@pytest.mark.slow
@pytest.mark.parametrize(
    "unit", ["[TOOL_CALLS]", "<|tool_call>", "<function=", "<|python_tag|>", '{"name":', "<parameter=", '<|"|>', "\n"]
)
def test_hostile_answers_take_linear_time(unit: str) -> None:
    import time

    started = time.thread_time()
    for text in (
        unit * (100_000 // len(unit)),
        "<|tool_call>" + unit * 8000 + "<tool_call|>",
        "[TOOL_CALLS]" + unit * 8000,
    ):
        read(text, *range(500, len(text), 500))
        try:
            parse_tool_call(text)
        except ToolCallError:
            pass
    assert time.thread_time() - started < 30  # half a second alone; squared it would take minutes


# --- vLLM's own parsers beside ours


def as_texts(value: Any) -> Any:
    """With the leaves as text: vLLM's reader of Gemma's form knows the types of outermost values only."""
    if isinstance(value, dict):
        return {name: as_texts(inner) for name, inner in value.items()}
    return [as_texts(inner) for inner in value] if isinstance(value, list | tuple) else json.dumps(value).strip('"')


@pytest.mark.slow
@pytest.mark.parametrize("form", ["hermes", "qwen3_coder", "llama3_json", "mistral", "gemma4"])
def test_vllms_parsers_read_the_same(form: str) -> None:
    pytest.importorskip("vllm")
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    from rl_vlm.zoo.tiny.tokenizer import build_tokenizer

    tokenizer = build_tokenizer(4096)
    gemmas = ["<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"]
    tokenizer.add_tokens(["<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", *gemmas])
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in TOOLS.items()]
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], tools=tools, tool_choice="auto")
    parser = ToolParserManager.get_tool_parser(form)
    differ = []
    for given in ARGUMENTS:
        for calls in ([("zoom", given)], [("zoom", given), ("zoom", {"number": 5})]):
            text = FORMS[form](*calls)
            found = parser(tokenizer, request.tools).extract_tool_calls(text, request)
            theirs = [(call.function.name, json.loads(call.function.arguments)) for call in found.tool_calls]
            same = as_texts(theirs) == as_texts(calls) if form == "gemma4" else theirs == calls
            if not same:
                differ.append((text, theirs))
    assert not differ
