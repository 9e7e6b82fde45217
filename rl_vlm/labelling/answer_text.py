"""Free-text answers as plain sentences in which the two images are the letters A and B.

Everything else is lower case, so a capital letter is always an image: A is the first, B the second, and Z an image that
was not shown or whose place in the text leaves open which one is meant.
"""

from __future__ import annotations

import re

_THOUGHT = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)
_TAG = re.compile(r"</?[a-z][a-z0-9_]*>|\\boxed|\\text(?:bf)?", re.IGNORECASE)
_MARKUP = re.compile(r"[*`$#{}\[\]\"“”‘]|^\s*>|(?<!\w)'|'(?!\w)|^\s*[-•]\s+(?=[^\W\d])", re.MULTILINE)
_DIGITS = {"zero": "0", "one": "1", "two": "2"}

_NOUN = r"(?:images?|imgs?|pictures?|pics?|frames?|photos?|photographs?|snapshots?|screenshots?|options?|candidates?)"
_NUMBER = r"(?:(?:no\.?|number|#)\s*)?"
# "Image 1", "image_1", "Image (1)", "picture no. 2", "Images 1 and 2".
_NUMBERED = re.compile(
    rf"\b(?:the )?{_NOUN}\s*[_:-]?\s*{_NUMBER}(?:\((\d+)\)|(\d+)(?![\w%]|[./]\d))(?:(\s(?:and|or|vs\.?|versus|&)\s)(\d)(?![\w%]|[./]\d))?"
)
_LETTERED = re.compile(rf"\b(?:[Tt]he )?(?i:{_NOUN}) ([AB])\b")
_SIDE = r"(first|second|1st|2nd|left|right|former|latter)"
_ORDINAL = re.compile(
    rf"\b(?:the )?{_SIDE}(?:-hand)?(?: |-)(?:{_NOUN}|(one))\b|"
    rf"\bthe (?:{_NOUN}|one) (?:on|to) the (left|right)(?:-hand side| side)?\b|"
    r"\bthe (former|latter)\b|"
    r"\bthe (first|second)\b(?= (?:is|was|has|looks|seems|appears|wins|comes|shows|does)\b|\s*(?:[.,;:!]|$))|"
    r"^\W*(first|second|left|right)\W*$",
    re.MULTILINE,
)
_SECOND = ("second", "2nd", "right", "latter")

_LIST_MARK = re.compile(r"(?:^|(?<=[.!?:;,])[ \t]+)[ \t]*\(?([1-9])[.):](?=\s|$)[ \t]*", re.MULTILINE)
_SINGLE_MARK = re.compile(r"^[ \t]*\(?([1-9])[.)][ \t]+(?=[^\W\d])", re.MULTILINE)
_HEADING = re.compile(r"^([a-z ]{3,30}):?[ \t]*\n+(?=\S)", re.MULTILINE)
_KEYS = re.compile(r"\b(?:answer|label|choice|preference|verdict|decision|response|output|result|conclusion)$")
_SENTENCE_END = re.compile(r"(?:(?<=[.!?])(?<!\bvs\.)(?<!\be\.g\.)(?<!\bi\.e\.)\s+|\s*[;\n]\s*)")


def strip_thoughts(text: str) -> str:
    """The text without thoughts between thinking tags; either tag may be missing. Linear in the text's length."""
    kept: list[str] = []
    start, opened = 0, -1  # of what comes next, and of the thought that is open
    for tag in _THOUGHT.finditer(text):
        if not tag[1]:
            opened = tag.start() if opened < 0 else opened
            continue
        # A closing tag alone: the template opened the thought in the prompt, so all before it is thought.
        if opened >= 0:
            kept.append(text[start:opened])
        else:
            kept.clear()
        start, opened = tag.end(), -1
    kept.append(text[start : opened if opened >= 0 else len(text)])  # a thought may be cut off in the middle
    return " ".join(kept).strip()


def finished_sentences(text: str) -> str:
    """The text up to the end of its last complete sentence, for an answer that was cut off: its rest may turn its meaning."""
    return text[: max((match.end() for match in re.finditer(r"[.!?](?=\s)|\n", text)), default=0)]


def plain_text(answer: str) -> str:
    """Lower case, without thoughts and markup; minus signs, apostrophes and number words unified."""
    text = _TAG.sub(" ", strip_thoughts(answer).replace("’", "'"))
    text = _LETTERED.sub(lambda match: f"image {'AB'.index(match[1]) + 1}", text)
    plain = _MARKUP.sub("", text).replace("\r", "").lower()
    plain = re.sub(r"[−–—‑‐﹣－](?=\s?\d)", "-", plain)
    plain = re.sub(r"\bno\.\s*(?=\d)", "number ", plain)
    plain = re.sub(r"[–—]|--+", " - ", plain)
    plain = re.sub(r"\b(?:minus|negative)[\s-]+(?:one|1)\b", "-1", plain)
    plain = re.sub(r"^\s*(zero|one)\s*\.?\s*$", lambda match: _DIGITS[match[1]], plain, flags=re.MULTILINE)
    return re.sub(
        rf"\b({_NOUN}) ({_NUMBER})(zero|one|two)\b", lambda match: f"{match[1]} {match[2]}{_DIGITS[match[3]]}", plain
    )


def sentences(answer: str) -> list[str]:
    """The sentences of an answer with images as letters, without numbering; a question keeps its question mark.

    Where an Image 0 is spoken of and no Image 2, counting starts at 0.
    """
    text = _without_numbering(_with_letters(plain_text(answer)))
    text = _HEADING.sub(lambda match: f"{match[1]}: " if _KEYS.search(match[1].strip()) else match[0], text)
    found = (re.sub(r"\s+", " ", part).strip() for part in _SENTENCE_END.split(text))
    return [part if part.endswith("?") else part.rstrip(".! ") for part in found if part.strip(".!? ")]


def _with_letters(plain: str) -> str:
    numbers = {number for match in _NUMBERED.finditer(plain) for number in (match[1] or match[2], match[4]) if number}
    names = {"0": "A", "1": "B"} if "0" in numbers and "2" not in numbers else {"1": "A", "2": "B"}

    def numbered(match: re.Match[str]) -> str:
        first = names.get(match[1] or match[2], "Z")
        return f"{first}{match[3]}{names.get(match[4], 'Z')}" if match[4] else first

    text = _NUMBERED.sub(numbered, plain)

    def ordinal(match: re.Match[str]) -> str:
        side = next(part for part in match.groups() if part and part != "one")
        letter = "B" if side in _SECOND else "A"
        if side in ("former", "latter") or match[2]:
            # These may count the images in the order in which the text names them.
            before = re.findall(r"\b[ABZ]\b", text[: match.start()])
            if (before and before[:2] != ["A", "B"]) or len(before) > 2:
                return "Z"
        return letter

    text = _ORDINAL.sub(ordinal, text)
    return re.sub(r"\b([AB]) \(\1\)", r"\1", text)


def _without_numbering(text: str) -> str:
    """Without the marks of a numbered list. A mark without a successor may be a label or a list that was cut off.

    Alone on its line it is a label; with a text behind it, it becomes a sentence "#1", which may only contradict.
    """
    marks = {match[1] for match in _LIST_MARK.finditer(text)}
    if {"1", "2"} <= marks:
        return _LIST_MARK.sub("\n", text)
    return _SINGLE_MARK.sub(r"#\1\n", text)
