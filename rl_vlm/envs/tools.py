"""Tool calls in the policy's text: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, or as other families do.

`parse_tool_call` reads a finished turn for an environment, `CallReader` a growing answer for a client. The text is
hostile input: it is sampled, and training exploits any error of an environment. Parsing takes linear time, is bounded
in size, and every malformed call raises a `ToolCallError` that says what was wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, AnyStr, NamedTuple

from rl_vlm.safe_text import without_thoughts
from rl_vlm.types import RLVLMError, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_CHARS = 16_384
MAX_NAME = 64
_CALL = re.compile(rf"{OPEN}\s*(?:\{{|<function=)")

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
    """A tool call cannot be read; the message tells the policy why.

    Do: give the message back to the policy, as an environment's reply.
    """


def parse_tool_call(text: str) -> ToolCall | None:
    """The last tool call of a turn, or None when there is none. Raises ToolCallError for a call that is malformed.

    Accepts `{"name", "arguments"}` and `{"function": {"name", "arguments"}}`, with arguments (or "parameters", as some
    models call them) as an object or as a string that holds one. Unescaped LaTeX backslashes are repaired. A call in a
    thought does not count.
    """
    said = without_thoughts(text)
    block = last_block(said)
    if block is not None:
        return _tagged(block, _Context({}, latex=True))[0]
    _, calls = CallReader({}, latex=True).feed(said, last=True)
    return calls[-1] if calls else None


def last_block(text: str) -> str | None:
    """The text inside the last `<tool_call>` of a turn; None without one. ToolCallError if it is never closed.

    If that tag is only mentioned, with no `{` or `<function=` behind it, an earlier one that has it counts instead.
    """
    calls = [match.start() for match in _CALL.finditer(text)]
    start = calls[-1] if calls else text.rfind(OPEN)
    if start < 0:
        return None
    start += len(OPEN)
    stop = text.find(CLOSE, start)
    if stop < 0:
        raise ToolCallError("<tool_call> is not closed by </tool_call>")
    if stop - start > MAX_CHARS:
        raise ToolCallError(f"a tool call may have at most {MAX_CHARS} characters, not {stop - start}")
    return text[start:stop]


def repair_backslashes(block: str) -> str:
    r"""Double the backslashes of JSON text that stand for LaTeX: `"\frac{1}{2}"` becomes `"\\frac{1}{2}"`.

    Valid escapes stay, so `"\\frac"` and a `\n` before anything but a LaTeX command such as `\nu` are left alone.
    """
    return _BACKSLASH.sub(lambda match: r"\\" if match.group(1) else match.group(), block)


Tools = Mapping[str, Mapping[str, Any]]  # the JSON schema of each tool's parameters, by name


class _Context(NamedTuple):
    tools: Tools
    latex: bool  # whether backslashes are LaTeX's before they are JSON's, as in the calls of environments


class CallReader:
    """Parts an answer, while it grows, into text and tool calls: the same ones, wherever it is cut into pieces.

    What is no well-formed call stays text. White space that only parts calls is dropped.

    Args:
        tools: those that are offered. Their schemas say which type a value has where its form does not, and an object
            without any marks, as Llama writes it, is a call only under one of their names.
    """

    def __init__(self, tools: Tools, latex: bool = False) -> None:
        self._context, self._held = _Context(tools, latex), ""
        self._may_be_bare, self._called = bool(tools), False

    def feed(self, text: str, last: bool) -> tuple[str, list[ToolCall]]:
        """The text that is certain now, and the calls that are complete. `last`: the answer ends here."""
        self._held += text
        if (bare := self._bare_calls(last)) is not None:
            return "", bare
        said, calls, at = "", list[ToolCall](), 0  # what is held before `at` is done
        while found := _OPENS.search(self._held, at):
            form, start, inside = _FORMS[found.group()], found.start(), found.end()
            end = self._held.find(form.closes or form.opens, inside)
            if end < 0 and not last:
                break
            whole = end >= 0 or form.may_end_open
            end, after = (end, end + len(form.closes)) if end >= 0 else (len(self._held), len(self._held))
            try:
                if not whole:
                    raise ToolCallError(f"{form.opens} is not closed by {form.closes}")
                calls += form.read(self._held[inside:end], self._context)
                said += self._gap(at, start)
                self._called = True
            except ToolCallError:
                again = self._held.rfind(form.opens, inside, after)  # the marks before it were only mentioned
                after = again if again >= 0 else after
                said += self._held[at:after]
                self._called = False
            at = after
        else:
            start = len(self._held) - (0 if last else max(overlap(self._held[at:], mark) for mark in _FORMS))
        if gap := self._gap(at, start):
            self._called, at = False, start
        self._held = self._held[at:]
        return said + gap, calls

    def _gap(self, start: int, end: int) -> str:
        """Held text that is no call; none while it is white space behind one."""
        return "" if self._called and not self._held[start:end].strip() else self._held[start:end]

    def _bare_calls(self, last: bool) -> list[ToolCall] | None:
        """The calls of an answer that is nothing else; none while it may become that. None where it is not."""
        head = self._held.lstrip()
        self._may_be_bare &= bool(_BARE.match(head)) or (head[:1] in ("", "{") and len(head) < _BARE_CHARS)
        if not self._may_be_bare or not last:
            return [] if self._may_be_bare else None
        try:
            calls = _objects(head, self._context)
        except ToolCallError:
            return None
        return calls if all(call.name in self._context.tools for call in calls) else None


def overlap(text: AnyStr, mark: AnyStr) -> int:
    """How many characters or bytes at the end of `text` are a beginning of `mark`, but not all of it."""
    return next((k for k in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:k])), 0)


# The forms of the families. Each reader gets what stands between two marks.


def _tagged(block: str, context: _Context) -> list[ToolCall]:
    """Hermes and Qwen, and the XML of Qwen3-Coder."""
    if (functions := block.lstrip()).startswith("<function="):
        name, closed, body = functions.removeprefix("<function=").partition(">")
        if not closed or "</function>" not in body:
            raise ToolCallError("<function= is not closed by </function>")
        return [_xml_call(name, body, context.tools)]
    return [_call(_load(block, "the text between <tool_call> and </tool_call>", context.latex), context.latex)]


def _function(block: str, context: _Context) -> list[ToolCall]:
    """Qwen3-Coder where it leaves <tool_call> out."""
    return _tagged(f"<function={block}</function>", context)


def _xml_call(name: str, body: str, tools: Tools) -> ToolCall:
    types = tools.get(name, {}).get("properties") or {}
    found = dict(_PARAMETER.findall(body))
    return ToolCall(_name(name), {key: _typed(value, types.get(key)) for key, value in found.items()})


def _typed(value: str, schema: Any) -> Any:
    """A value without quotes, as the schema says; text where it says nothing or the value does not fit."""
    if not isinstance(schema, Mapping) or schema.get("type", "string") == "string":
        return value
    try:
        return json.loads(value, parse_constant=_refuse_constant)
    except (ValueError, RecursionError, ToolCallError):
        return {"True": True, "False": False, "None": None}.get(value, value)


def _mistral(block: str, context: _Context) -> list[ToolCall]:
    """`[{"name", "arguments"}]`, or since version 11 of its tokenizer `name{...}`."""
    if block.lstrip().startswith("["):
        calls = _load(block, "the text behind [TOOL_CALLS]", context.latex)
        return [_call(call, context.latex) for call in calls]
    match = _NAMED.fullmatch(block)
    if match is None:
        raise ToolCallError("behind [TOOL_CALLS] there must be a name and an object")
    return [ToolCall(_name(match[1]), _arguments(match[2], context.latex))]


def _gemma(block: str, context: _Context) -> list[ToolCall]:
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


def _objects(block: str, context: _Context) -> list[ToolCall]:
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


class _Form(NamedTuple):
    opens: str
    closes: str  # "": the next call, or the end of the answer
    read: Callable[[str, _Context], list[ToolCall]]
    may_end_open: bool = True  # at the end of an answer: what is inside says whether it is whole


_ALL = (
    _Form(OPEN, CLOSE, _tagged),
    _Form("<function=", "</function>", _function, may_end_open=False),
    _Form("[TOOL_CALLS]", "", _mistral),
    _Form("<|tool_call>", "<tool_call|>", _gemma),  # Gemma 4
    _Form("<start_function_call>", "<end_function_call>", _gemma),  # FunctionGemma
    _Form("<|python_tag|>", "", _objects),
)
_FORMS = {form.opens: form for form in _ALL}
_OPENS = re.compile("|".join(map(re.escape, _FORMS)))
_BARE, _BARE_CHARS = re.compile(r'\{\s*"(?:name|type|function|parameters|arguments)"'), 24
_PARAMETER = re.compile(r"<parameter=([^>]*)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(\{.*\})\s*", re.DOTALL)
_GEMMA_CALL = re.compile(r"\s*call:([\w.-]+)(\{.*\})\s*", re.DOTALL)
_GEMMA_VALUE = re.compile(
    r'<\|"\|>(.*?)<\|"\|>|<escape>(.*?)<escape>|(?<=[{,])\s*([^\s{}\[\],:<]+)\s*:|([^\s{}\[\],:][^{}\[\],]*)', re.DOTALL
)
_LITERAL = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?")


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
            return json.loads(block, strict=False, parse_constant=_refuse_constant)
    block = repair_backslashes(block.strip())
    try:
        # strict=False: a raw line break inside a string is common and its meaning is clear.
        return json.loads(block, strict=False, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise ToolCallError(f"{what} is not valid JSON ({error.msg} at character {error.pos + 1})") from error
    except RecursionError as error:
        raise ToolCallError(f"{what} is nested too deep") from error
    except ValueError as error:  # a number of thousands of digits
        raise ToolCallError(f"{what} holds a number that is too long") from error


def _refuse_constant(constant: str) -> Any:
    raise ToolCallError(f"{constant} is not a JSON value")


def _kind(value: Any) -> str:
    """The JSON name of a value's type, with an article."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    return {int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}[type(value)]
