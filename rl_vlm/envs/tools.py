"""Tool calls in the policy's text: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

The text is hostile input: it is sampled, and training exploits any error of an environment. Parsing takes linear time,
is bounded in size, and every malformed call raises a `ToolCallError` that says what was wrong.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from rl_vlm.safe_text import without_thoughts
from rl_vlm.types import RLVLMError

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_CHARS = 16_384
MAX_NAME = 64
_CALL = re.compile(rf"{OPEN}\s*\{{")

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
    """A tool call cannot be read; the message tells the policy why."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A well-formed call; the environment says whether the tool exists."""

    name: str
    arguments: dict[str, Any]


def parse_tool_call(text: str) -> ToolCall | None:
    """The last tool call of a turn, or None when there is none. Raises ToolCallError for a call that is malformed.

    Accepts `{"name", "arguments"}` and `{"function": {"name", "arguments"}}`, with arguments (or "parameters", as some
    models call them) as an object or as a string that holds one. Unescaped LaTeX backslashes are repaired. A call in a
    thought does not count.
    """
    block = last_block(without_thoughts(text))
    if block is None:
        return None
    call = _load(block, "the text between <tool_call> and </tool_call>")
    if not isinstance(call, dict):
        raise ToolCallError(f"a tool call must be a JSON object, not {_kind(call)}")
    if "name" not in call and "function" in call:
        call = call["function"]
        if not isinstance(call, dict):
            raise ToolCallError(f'"function" must be an object with "name" and "arguments", not {_kind(call)}')
    if "name" not in call:
        raise ToolCallError('"name" is missing')
    name = call["name"]
    if not isinstance(name, str):
        raise ToolCallError(f'"name" must be a string, not {_kind(name)}')
    name = name.strip()
    if not 0 < len(name) <= MAX_NAME:
        raise ToolCallError(f'"name" must have between 1 and {MAX_NAME} characters, not {len(name)}')
    return ToolCall(name, _arguments(call.get("arguments", call.get("parameters"))))


def last_block(text: str) -> str | None:
    """The text inside the last `<tool_call>` of a turn; None without one. ToolCallError if it is never closed.

    If that tag is only mentioned, with no `{` behind it, an earlier one that has it counts instead.
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


def _arguments(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if isinstance(value, str):
        value = _load(value, 'the text in "arguments"') if value.strip() else {}
    if not isinstance(value, dict):
        raise ToolCallError(f'"arguments" must be an object, not {_kind(value)}')
    return value


def _load(block: str, what: str) -> Any:
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
