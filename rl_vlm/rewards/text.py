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


def behind_thought(text: str, max_chars: int) -> tuple[str, str]:
    """The text without its thoughts, and the reason not to grade it: one of `refusal`, "too_long", or ""."""
    said = without_thoughts(text)
    if len(said) > max_chars:
        return said, "too_long"
    return said, refusal(text, _MAX_THOUGHT + max_chars)


def refusal(text: str, max_chars: int) -> str:
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


_QUOTES = re.compile('["\u201c-\u201f\u00ab\u00bb\u2033\u301d-\u301f\uff02]')
_SPACES = re.compile(r"\s+")
_ONE = r"(?:(?:number|no\.?)\s*)?(?:[12]|one|two|first|second|this|me|mine|the (?:first|second|other|caption|answer|option|above|below))\b"  # noqa: E501
# What nobody who describes a picture writes: orders to choose, the judge's own question, names of the two texts, praise
# of itself.
_TO_THE_JUDGE = re.compile(
    "|".join(
        (
            rf"\b(?:choose|pick|select|prefer|output|reply|answer|respond|vote|say|print|return|write)\b\W*(?:with|for|is|only)?\W*{_ONE}",
            r"\b(?:best|better|right|correct|winning)\s+(?:one\s+)?(?:caption|answer|choice|option|text|description)\b",
            r"\b(?:caption|answer|choice|option|text|description)\s*(?:no\.?|number|\#)?\s*(?:[12]|one|two|(?-i:[AB]))\b",
            r"(?:选择|wähle|choisis(?:sez)?|eli[gj][ae]|escolha|scegli|выбери)\W*(?:[12]|la |el |le |die |den )",
            r"\b(?:human|user|system|assistant|grade|score|verdict|winner)\s*[:=\]]|###|\{(?:first|second)\}",
            r"\b(?:10/10|100 ?%|top score|trust me|ground truth|verified by|the winner is|the reference)(?!\w)",
            r"\b(?:is|are) (?:the )?(?:better|best|winner|wrong|incorrect)\b|\bthe (?:other|first|second) (?:one )?is "
            r"(?:better|best|wrong|right)\b",
            r"\b(?:caption|answer|option|description)s?\s+(?:is|are|was|must|should|deserves?|wins?|fits?|describes?)\b",
            r"\b(?:this|my|first|second|other|above|previous|next)\s+(?:caption|answer|choice|option|text|description)\b",
            r"\b(?:ignore|disregard|forget|override)\b.{0,40}\b(?:image|picture|instructions?|captions?|previous|above|below|other|rest|question|rules?)\b",
            r"\b(?:which|what) (?:one )?(?:caption|text|answer|fits|describes|is better)\b|\b(?:note to|vote for)\b",
            r"\b(?:judge|grader|evaluator|reviewer|assistant|system prompt|instructions?)\b\s*[:,]",
            r"\b(?:you (?:must|should|will|have to|are (?!looking|seeing))|as an ai|full (?:score|marks)|score (?:of "
            r")?1)\b",
        )
    ),
    re.IGNORECASE,
)


def quoted(text: str, max_chars: int) -> str:
    """The text on one line between straight quotes that no quote inside can end, cut off after `max_chars`."""
    return '"' + _QUOTES.sub("'", _SPACES.sub(" ", text).strip())[:max_chars] + '"'


def judged_refusal(text: str, max_chars: int) -> str:
    """Why a text is not shown to a judge; "" if it may be: "empty", a reason of `refusal`, or "to_the_judge".

    The last is a list of phrases (orders, names of the texts that are compared, the question itself), not a proof: a
    judge that can be talked into something may be talked into it by others.
    """
    if not text.strip():
        return "empty"
    return refusal(text, max_chars) or ("to_the_judge" if _TO_THE_JUDGE.search(_SPACES.sub(" ", text)) else "")
