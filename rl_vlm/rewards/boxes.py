"""The content of the last `\\boxed{}` of a text."""

from __future__ import annotations

import re

# One left-to-right scan over these tokens keeps the cost linear: no token contains another, and none backtracks
# over more than a few characters. `\\.` comes after the box so that `\{` and `\}` are not counted as braces; a doubled
# backslash before the box is accepted, because models over-escape.
_TOKEN = re.compile(
    r"(?P<box>\\{1,2}(?:boxed|fbox)(?![A-Za-z])(?:\s*(?P<brace>\{))?)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL
)
# What may follow an unbraced `\boxed`: only things that start like a number, so that the prose "use \boxed to
# answer" holds no answer.
_UNBRACED = re.compile(r"[ \t]*([-+]?(?:\.?[0-9]|\\(?:[dtc]?frac|sqrt|pi)(?![A-Za-z]))[^\s$]{0,200})")
_TRAILING = ".,;:!?"


def extract_boxed(text: str) -> str | None:
    r"""The content of the last box with balanced braces, or None.

    A box that never closes and a box with nothing in it hold no answer, so an earlier box counts instead. Of nested
    boxes the inner one is the last. Time and memory are linear in the length of the text.
    """
    stack: list[int] = []  # for every open brace: where its box's content starts, or -1 for a plain brace
    best_start, best_content = -1, ""
    for token in _TOKEN.finditer(text):
        if token["close"]:
            start = stack.pop() if stack else -1
            if start > best_start and (content := text[start : token.start()].strip()):
                best_start, best_content = start, content
        elif token["open"]:
            stack.append(-1)
        elif token["brace"]:
            stack.append(token.end())
        elif token["box"] and (argument := _UNBRACED.match(text, token.end())):
            best_start, best_content = token.end(), argument[1].rstrip(_TRAILING)
    return best_content if best_start >= 0 else None
