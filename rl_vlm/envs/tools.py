"""Tool calls in the policy's text: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, or as other families do.

`parse_tool_call` reads a finished turn for an environment, `CallReader` a growing answer for a client. The text is
hostile input: it is sampled, and training exploits any error of an environment. Parsing takes linear time, is bounded
in size, and every malformed call raises a `ToolCallError` that says what was wrong.
"""

from __future__ import annotations

import re
from typing import AnyStr

from rl_vlm.envs.tool_forms import (
    CLOSE,
    FORMS,
    MAX_CHARS,
    OPEN,
    FormContext,
    ToolCallError,
    Tools,
    read_objects,
    read_tagged,
)
from rl_vlm.safe_text import without_thoughts
from rl_vlm.types import ToolCall

_OPENS = re.compile("|".join(map(re.escape, FORMS)))
_BARE, _BARE_CHARS = re.compile(r'\{\s*"(?:name|type|function|parameters|arguments)"'), 24
_CALL = re.compile(rf"{OPEN}\s*(?:\{{|<function=)")


def parse_tool_call(text: str) -> ToolCall | None:
    """The last tool call of a turn, or None when there is none. Raises ToolCallError for a call that is malformed.

    Accepts `{"name", "arguments"}` and `{"function": {"name", "arguments"}}`, with arguments (or "parameters", as some
    models call them) as an object or as a string that holds one. Unescaped LaTeX backslashes are repaired. A call in a
    thought does not count.
    """
    said = without_thoughts(text)
    block = last_block(said)
    if block is not None:
        return read_tagged(block, FormContext({}, latex=True))[0]
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


class CallReader:
    """Parts an answer, while it grows, into text and tool calls: the same ones, wherever it is cut into pieces.

    What is no well-formed call stays text. White space that only parts calls is dropped.

    Args:
        tools: the offered ones. Their schemas say which type a value has where its form does not, and an object
            without any marks, as Llama writes it, is a call only under one of their names.
    """

    def __init__(self, tools: Tools, latex: bool = False) -> None:
        self._context, self._held = FormContext(tools, latex), ""
        self._may_be_bare, self._called = bool(tools), False

    def feed(self, text: str, last: bool) -> tuple[str, list[ToolCall]]:
        """The text that is certain now, and the calls that are complete. `last`: the answer ends here."""
        self._held += text
        if (bare := self._bare_calls(last)) is not None:
            return "", bare
        said, calls, at = "", list[ToolCall](), 0  # what is held before `at` is done
        while found := _OPENS.search(self._held, at):
            form, start, inside = FORMS[found.group()], found.start(), found.end()
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
            start = len(self._held) - (0 if last else max(overlap(self._held[at:], mark) for mark in FORMS))
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
            calls = read_objects(head, self._context)
        except ToolCallError:
            return None
        return calls if all(call.name in self._context.tools for call in calls) else None


def overlap(text: AnyStr, mark: AnyStr) -> int:
    """How many characters or bytes at the end of `text` are a beginning of `mark`, but not all of it."""
    return next((k for k in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:k])), 0)
