"""The forms in which families of models write tool calls, each with its reader."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from rl_vlm.types import RLVLMError, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_CHARS = 16_384
MAX_NAME = 64
_PARAMETER = re.compile(r"<parameter=([^>]*)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(\{.*\})\s*", re.DOTALL)
_GEMMA_CALL = re.compile(r"\s*call:([\w.-]+)(\{.*\})\s*", re.DOTALL)
_GEMMA_VALUE = re.compile(
    r'<\|"\|>(.*?)<\|"\|>|<escape>(.*?)<escape>|(?<=[{,])\s*([^\s{}\[\],:<]+)\s*:|([^\s{}\[\],:][^{}\[\],]*)', re.DOTALL
)
_LITERAL = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?")
# LaTeX commands that a valid JSON escape could begin. Line breaks and tabs occur in calls, so `\n` and `\t`
# become LaTeX only before these names; backspace, form feed and carriage return always do before a letter.
_LATEX = (
    "nu|ne|neq|neg|ni|not|notin|nabla|natural|nearrow|nwarrow|newline|nexists|ngeq|ngtr|nleq|nless|nmid|"
    "nparallel|nsim|ncong|nsubseteq|nsupseteq|nonumber|nolimits|normalsize|"
    "text[a-z]*|tfrac|theta|times|tan|tanh|tau|to|top|tilde|therefore|triangle[a-z]*|tbinom|tag|tt|tiny|"
    "thickspace|thinspace|thicksim|thickapprox|twoheadrightarrow"
)
# A valid escape that is kept as it is, or (group 1) a backslash that the model wrote without escaping it.
_BACKSLASH = re.compile(
    rf"""\\(?: ["\\/]
      | (?!(?:{_LATEX})(?![A-Za-z])) [nt]
      | r(?![A-Za-z])
      | u(?:[dD][89abAB][0-9a-fA-F]{{2}}\\u[dD][c-fC-F][0-9a-fA-F]{{2}} | (?![dD][89a-fA-F])[0-9a-fA-F]{{4}})
    ) | (\\)""",
    re.VERBOSE,
)


class ToolCallError(RLVLMError):
    """A tool call cannot be read; the message says why.

    Do: give the message back to the policy, as an environment's reply.
    """


Tools = Mapping[str, Mapping[str, Any]]  # the JSON schema of each tool's parameters, by name


def repair_backslashes(block: str) -> str:
    r"""Double the backslashes of JSON text that stand for LaTeX: `"\frac{1}{2}"` becomes `"\\frac{1}{2}"`.

    Valid escapes stay, so `"\\frac"` and a `\n` before anything but a LaTeX command such as `\nu` are left alone.
    """
    return _BACKSLASH.sub(lambda match: r"\\" if match.group(1) else match.group(), block)


class FormContext(NamedTuple):
    tools: Tools
    latex: bool  # whether backslashes are LaTeX's before they are JSON's, as in the calls of environments


# The forms of the families. Each reader gets what stands between two marks.


def read_tagged(block: str, context: FormContext) -> list[ToolCall]:
    """Hermes and Qwen, and the XML of Qwen3-Coder."""
    if (functions := block.lstrip()).startswith("<function="):
        name, closed, body = functions.removeprefix("<function=").partition(">")
        if not closed or "</function>" not in body:
            raise ToolCallError("<function= is not closed by </function>")
        return [_xml_call(name, body, context.tools)]
    return [_call(_load(block, "the text between <tool_call> and </tool_call>", context.latex), context.latex)]


def _function(block: str, context: FormContext) -> list[ToolCall]:
    """Qwen3-Coder where it leaves <tool_call> out."""
    return read_tagged(f"<function={block}</function>", context)


def _xml_call(name: str, body: str, tools: Tools) -> ToolCall:
    types = tools.get(name, {}).get("properties") or {}
    found = dict(_PARAMETER.findall(body))
    return ToolCall(_name(name), {key: _typed(value, types.get(key)) for key, value in found.items()})


def _typed(value: str, schema: Any) -> Any:
    """A value without quotes, as the schema says; text where it says nothing or the value does not fit."""
    if not isinstance(schema, Mapping) or schema.get("type", "string") == "string":
        return value
    try:
        return json.loads(value, parse_constant=_reject_constant)
    except (ValueError, RecursionError, ToolCallError):
        return {"True": True, "False": False, "None": None}.get(value, value)


def _mistral(block: str, context: FormContext) -> list[ToolCall]:
    """`[{"name", "arguments"}]`, or since version 11 of its tokenizer `name{...}`."""
    if block.lstrip().startswith("["):
        calls = _load(block, "the text behind [TOOL_CALLS]", context.latex)
        return [_call(call, context.latex) for call in calls]
    match = _NAMED.fullmatch(block)
    if match is None:
        raise ToolCallError("behind [TOOL_CALLS] there must be a name and an object")
    return [ToolCall(_name(match[1]), _arguments(match[2], context.latex))]


def _gemma(block: str, context: FormContext) -> list[ToolCall]:
    """`call:name{key:value}`, whose keys have no quotes and whose texts have marks of their own."""
    match = _GEMMA_CALL.fullmatch(block)
    if match is None:
        raise ToolCallError("a call must be call:name{...}")

    def as_json(found: re.Match[str]) -> str:
        string, other, key, bare = found.groups()
        if key is not None:
            return json.dumps(key) + ":"
        if bare is not None:
            return bare if _LITERAL.fullmatch(bare) else json.dumps(bare)
        return json.dumps(string if string is not None else other)

    types = context.tools.get(match[1], {}).get("properties") or {}
    arguments = _arguments(_GEMMA_VALUE.sub(as_json, match[2]), context.latex)
    typed = {
        key: _typed(value, types.get(key)) if isinstance(value, str) else value for key, value in arguments.items()
    }
    return [ToolCall(_name(match[1]), typed)]


def read_objects(block: str, context: FormContext) -> list[ToolCall]:
    """Llama: objects with "name" and "parameters", parted by semicolons."""
    calls, decoder = list[ToolCall](), json.JSONDecoder(strict=False)
    while block.strip("; \n"):
        try:
            call, end = decoder.raw_decode(block := block.lstrip("; \n"))
        except (ValueError, RecursionError) as error:
            raise ToolCallError("a call is not valid JSON") from error
        calls.append(_call(call, context.latex))
        block = block[end:]
    return calls


class ToolForm(NamedTuple):
    opens: str
    closes: str  # "": the next call, or the end of the answer
    read: Callable[[str, FormContext], list[ToolCall]]
    may_end_open: bool = True  # at the end of an answer: what is inside says whether it is whole


_ALL = (
    ToolForm(OPEN, CLOSE, read_tagged),
    ToolForm("<function=", "</function>", _function, may_end_open=False),
    ToolForm("[TOOL_CALLS]", "", _mistral),
    ToolForm("<|tool_call>", "<tool_call|>", _gemma),  # Gemma 4
    ToolForm("<start_function_call>", "<end_function_call>", _gemma),  # FunctionGemma
    ToolForm("<|python_tag|>", "", read_objects),
)
FORMS = {form.opens: form for form in _ALL}


def _call(call: Any, latex: bool) -> ToolCall:
    if not isinstance(call, dict):
        raise ToolCallError(f"a tool call must be a JSON object, not {_kind(call)}")
    if "name" not in call and "function" in call:
        call = call["function"]
        if not isinstance(call, dict):
            raise ToolCallError(f'"function" must be an object with "name" and "arguments", not {_kind(call)}')
    if "name" not in call:
        raise ToolCallError('"name" is missing')
    return ToolCall(_name(call["name"]), _arguments(call.get("arguments", call.get("parameters")), latex))


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise ToolCallError(f'"name" must be a string, not {_kind(name)}')
    name = name.strip()
    if not 0 < len(name) <= MAX_NAME:
        raise ToolCallError(f'"name" must have between 1 and {MAX_NAME} characters, not {len(name)}')
    return name


def _arguments(value: Any, latex: bool) -> dict[str, Any]:
    if value is None:
        return {}
    if isinstance(value, str):
        value = _load(value, 'the text in "arguments"', latex) if value.strip() else {}
    if not isinstance(value, dict):
        raise ToolCallError(f'"arguments" must be an object, not {_kind(value)}')
    return value


def _load(block: str, what: str, latex: bool) -> Any:
    if not latex:
        with suppress(ValueError, RecursionError):  # it may be LaTeX all the same
            return json.loads(block, strict=False, parse_constant=_reject_constant)
    block = repair_backslashes(block.strip())
    try:
        # strict=False: a raw line break inside a string is common and its meaning is clear.
        return json.loads(block, strict=False, parse_constant=_reject_constant)
    except json.JSONDecodeError as error:
        raise ToolCallError(f"{what} is not valid JSON ({error.msg} at character {error.pos + 1})") from error
    except RecursionError as error:
        raise ToolCallError(f"{what} is nested too deep") from error
    except ValueError as error:  # a number of thousands of digits
        raise ToolCallError(f"{what} holds a number that is too long") from error


def _reject_constant(constant: str) -> Any:
    raise ToolCallError(f"{constant} is not a JSON value")


def _kind(value: Any) -> str:
    """The JSON name of a value's type, with an article."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    return {int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}[type(value)]
