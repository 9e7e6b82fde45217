"""Text that is compared: what no honest answer holds, and how a judge is shown what is data."""

from __future__ import annotations

import re
import unicodedata
from typing import Any, NamedTuple

from rl_vlm.safe_text import without_thoughts

_MAX_THOUGHT = 100_000  # characters
_SPECIAL = re.compile(
    r"<!--|<\|[^<>|]{0,40}\|>|</?(?:s|tool_call|tool_response|im_start|im_end|eos|bos)>", re.IGNORECASE
)
_WORD = re.compile(r"\w+")
# Format, control, surrogate, private and unassigned characters; line breaks and tabs are fine.
_HIDDEN = frozenset({"Cf", "Cc", "Cs", "Co", "Cn"})
# Combining marks that strike a letter through, and three or more marks on one letter.
_OVERLAID = re.compile("[A-Za-z][\u0334-\u0338\u20d2-\u20e5]|[\u0300-\u036f\u20d0-\u20ff]{3,}")
_FINE = frozenset("\n\r\t")
_SHAPES = ("<wide>", "<font>", "<circle>", "<square>")  # decompositions of letters that only look different
_IMITATED = ("CYRILLIC", "GREEK", "ARMENIAN", "CHEROKEE")


class ReadAnswer(NamedTuple):
    """What an answer says; None, and the reason, if that cannot be said."""

    value: Any
    reason: str = ""


def usual_width(text: str) -> str:
    """Composed characters of the usual width: `５` is 5. Not all of NFKC, for which 5² is 52."""
    if text.isascii():
        return text
    widths = ("<wide>", "<narrow>")  # as in Chinese and Japanese text
    usual = [unicodedata.normalize("NFKC", c) if unicodedata.decomposition(c).startswith(widths) else c for c in text]
    return unicodedata.normalize("NFC", "".join(usual))


def behind_thought(text: str, max_chars: int) -> tuple[str, str]:
    """The text without its thoughts, and the reason not to grade it: one of `why_not_graded`, "too_long", or ""."""
    said = without_thoughts(text)
    if len(said) > max_chars:
        return said, "too_long"
    return said, why_not_graded(text, _MAX_THOUGHT + max_chars)


def why_not_graded(text: str, max_chars: int) -> str:
    """Why a text must not be graded; "" if it may be: "too_long", "hidden", "special" or "look_alike" characters.

    Look-alikes are words that mix Latin letters with an alphabet that imitates them, and letters that are another shape
    of a Latin one (full width, mathematical bold). Texts in other languages are fine.
    """
    if len(text) > max_chars:
        return "too_long"
    if text.isascii():
        if any((character < " " and character not in _FINE) or character == "\x7f" for character in text):
            return "hidden"
        return "special" if _SPECIAL.search(text) else ""
    hidden = any(unicodedata.category(character) in _HIDDEN and character not in _FINE for character in text)
    if hidden or _OVERLAID.search(text):
        return "hidden"
    if any(_is_imitation(word) for word in _WORD.findall(text)):
        return "look_alike"
    return "special" if _SPECIAL.search(unicodedata.normalize("NFKC", text)) else ""


def _is_imitation(word: str) -> bool:
    if word.isascii():
        return False
    names = [unicodedata.name(letter, "") for letter in word if letter.isalpha()]
    latin = any(name.startswith("LATIN") for name in names)
    mixed = latin and any(name.startswith(_IMITATED) for name in names)
    return mixed or any(unicodedata.decomposition(letter).startswith(_SHAPES) for letter in word)
