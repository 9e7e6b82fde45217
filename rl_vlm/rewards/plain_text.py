"""What no honest answer holds: characters that hide or imitate others, forged special tokens, comments. Such answers are not graded."""

from __future__ import annotations

import re
import unicodedata

_SPECIAL = re.compile(
    r"<!--|<\|[^<>|]{0,40}\|>|</?(?:s|tool_call|tool_response|im_start|im_end|eos|bos)>", re.IGNORECASE
)
# Templates of thinking models open the thought in the prompt: the sampled text then begins inside it.
_THOUGHT = re.compile(r"(?:\s*<think>)?(?:(?!</?think>).)*</think>", re.DOTALL)
_WORD = re.compile(r"\w+")
# Format, control, surrogate, private and unassigned characters; line breaks and tabs are fine.
_HIDDEN = frozenset({"Cf", "Cc", "Cs", "Co", "Cn"})
# Combining marks that strike a letter through, and three or more marks on one letter.
_OVERLAID = re.compile("[A-Za-z][\u0334-\u0338\u20d2-\u20e5]|[\u0300-\u036f\u20d0-\u20ff]{3,}")
_FINE = frozenset("\n\r\t")
_SHAPES = ("<wide>", "<font>", "<circle>", "<square>")  # decompositions of letters that only look different
_IMITATED = ("CYRILLIC", "GREEK", "ARMENIAN", "CHEROKEE")


def refusal(text: str, max_chars: int) -> str:
    """Why a text must not be graded; "" if it may be: "too_long", "hidden", "special" or "look_alike" characters.

    Look-alikes are words that mix Latin letters with those of an alphabet that imitates them, and letters that are only
    another shape of a Latin one (full width, mathematical bold). Texts in other languages are fine.
    """
    if len(text) > max_chars:
        return "too_long"
    if text.isascii():
        if any((character < " " and character not in _FINE) or character == "\x7f" for character in text):
            return "hidden"
        return "special" if _SPECIAL.search(text) else ""
    if any(unicodedata.category(character) in _HIDDEN and character not in _FINE for character in text):
        return "hidden"
    if _OVERLAID.search(text):
        return "hidden"
    if any(_is_imitation(word) for word in _WORD.findall(text)):
        return "look_alike"
    return "special" if _SPECIAL.search(unicodedata.normalize("NFKC", text)) else ""


def without_thought(text: str) -> str:
    """The text without the one thought that it may begin with, `<think>...</think>` or what stands before `</think>`; others stay."""
    thought = _THOUGHT.match(text)
    return text[thought.end() :] if thought else text


def _is_imitation(word: str) -> bool:
    if word.isascii():
        return False
    names = [unicodedata.name(letter, "") for letter in word if letter.isalpha()]
    latin = any(name.startswith("LATIN") for name in names)
    if latin and any(name.startswith(_IMITATED) for name in names):
        return True
    return any(unicodedata.decomposition(letter).startswith(_SHAPES) for letter in word)
