"""Free-text answers of a labeller as labels and scores.

Labels: 0 means Image 1, 1 means Image 2, -1 no preference; an answer that decides nothing is None, which is no label.
The demanded form (a line with 0, 1 or -1) counts most, then words of doubt, then what is said about the images, then a
label inside a sentence. Numbers of images, of lists and decimals are never mistaken for labels: "better in Image 1." is
label 0, "0.7" is none.
"""

from __future__ import annotations

import re
from typing import cast

from rl_vlm.labelling.types import LabelValue

_THOUGHTS = (
    re.compile(r"<think(?:ing)?>.*?</think(?:ing)?>", re.DOTALL | re.IGNORECASE),
    re.compile(r"^.*</think(?:ing)?>", re.DOTALL | re.IGNORECASE),  # the template opened the thought in the prompt
    re.compile(r"<think(?:ing)?>.*$", re.DOTALL | re.IGNORECASE),  # the answer was cut off in the middle of it
)
_TAG = re.compile(r"</?[a-z][a-z0-9_]*>|\\boxed|\\text(?:bf)?", re.IGNORECASE)
_MARKUP = re.compile(r"[*`$#{}\"“”‘’]|^\s*>|'(?!t\b)(?:s\b)?", re.MULTILINE)
_WORDS = {"zero": "0", "one": "1", "two": "2"}

# A label that stands alone: no digit, decimal, sign, fraction or percent sign around it.
_LABEL = r"(?<![\w.,/+-])(-\s?1|0|1)(?:\.0+)?(?![\w/%]|\s?%|[.,]\d|-\d)"
_LONE = re.compile(rf"^[\s(\[]*{_LABEL}[\s)\].,;:!]*$")
_KEY = r"\b(?:answer|label|choice|preference|result|output|reply|response|decision|verdict|summary|prediction)"
_KEYED = re.compile(rf"{_KEY}\s*(?:value\s*)?(?:(?:is|would be|should be)\s*:?|[=:→]|->)\s*[(\[]?{_LABEL}")

_MENTION = re.compile(
    r"\b(?:the\s+)?(?:image|picture|frame|photo|img)\s*(?:no\.?|number|#)?\s*[_-]?\s*\(?([012])\b\)?(?!\.\d)"
)
_ORDINAL = re.compile(
    r"\b(?:the\s+)?(first|second|left|right)(?:-hand)?\s+(?:image|picture|frame|photo|one)\b|"
    r"\bthe\s+(former|latter)\b|^\W*(first|second|left|right)\W*$",
    re.MULTILINE,
)
_SECOND = ("second", "right", "latter")
_CLAUSE = re.compile(r"[.;?!\n]+|,?\s+\b(?:but|while|whereas|however|although|though)\b")
_GOOD = re.compile(
    r"\b(?:better|best|closer|closest|nearer|nearest|preferred|preferable|superior|favou?red|winner|wins|achieved?|achieves|succeeds|"
    r"further\s+along|(?:more|most)\s+(?:\w+ly\s+)?(?:successful|advanced|upright|vertical|open|opened|straight|straightened|aligned|"
    r"complete|completed|balanced|stable|effective|desirable|suitable|promising|progress))\b"
)
_BAD = re.compile(
    r"\b(?:worse|worst|inferior|poorer|(?:further|farther)\s+(?:away\s+)?from|"
    r"less\s+(?:\w+ly\s+)?(?:successful|advanced|upright|vertical|open|opened|straight|aligned|complete|balanced|stable|"
    r"effective|progress))\b"
)
_NEGATED = re.compile(rf"(?:\bnot|n't|\bno)\s+(?:\w+\s+){{0,3}}?(?:{_GOOD.pattern}|{_BAD.pattern})")
_COMPARAND = re.compile(
    r",?\s*\b(?:than|over|unlike|versus|vs|rather than|instead of|as opposed to|relative to|(?:when |as )?compared (?:to|with))"
    r"\s+(?:it is |what is |that |the one )?(?:in |of )?@([01])(?:\s*,)?"
)
_CHOSEN = re.compile(r"\b(?:choose|chose|prefer|pick|select|favou?r|go with|going with)\b:?\s*@([01])")
_NAMED = re.compile(
    rf"(?:^|\bi think|\bit is|\bits?|\bi(?: woul)?d say|{_KEY}\s*(?:is|=|:))\s*:?\s*(?:it is |its? )?(?:in )?@([01])[\s,()01-]*$"
)
_CONCLUSION = re.compile(r"\b(?:overall|therefore|thus|hence|so|in conclusion|in summary|conclusion|consequently)\b")

_ADVERB = r"(?:\w+\s+)"
_DOUBT = re.compile(
    rf"\b(?:uncertain|unsure|unclear|undecided|undetermined|inconclusive|indistinguishable|indeterminate|ambiguous|"
    rf"not\s+{_ADVERB}?(?:sure|certain|clear)|"
    rf"(?:cannot|can\s+not|cant|can't|could\s+not|couldn't|unable\s+to|(?:impossible|hard|difficult|not\s+possible)\s+to)\s+"
    rf"(?:be\s+)?{_ADVERB}?(?:tell|told|say|said|determined?|decided?|judged?|compared?|answer)|"
    rf"(?:do\s+not|don't)\s+know|"
    rf"no\s+{_ADVERB}{{0,3}}(?:difference|preference|winner|distinction|change)s?|"
    rf"(?:not|n't)\s+{_ADVERB}{{0,3}}(?:difference|different|differ)|(?:little|negligible|without)\s+{_ADVERB}?difference)\b"
)
_TIE = re.compile(
    r"\b(?:equal|equally|tie|tied|both|neither|same|identical|similar|similarly|alike|equivalent|comparable)\b"
)

_NUMBER = re.compile(
    r"(?<![\w.,-])(-?(?:\d+(?:\.\d+)?|\.\d+))(?:\s*(?:(%|percent)|(?:/|out\s+of)\s*(\d+)))?(?![\w%/]|[.,]\d)"
)
_SCALE = re.compile(r"\b(?:from|of|between)\s*0(?:\.0)?\s*(?:to|-|and)\s*(?:100|10|1)(?:\.0)?\b")


def parse_label(text: str) -> LabelValue | None:
    """The label that an answer gives; -1 also where it contradicts itself; None if it holds no decision at all."""
    plain = _normalise(text)
    lines = [line.strip() for line in plain.split("\n") if line.strip()]
    alone = [_label(match[1]) for line in lines for match in [_LONE.match(line)] if match]
    if alone:
        return _agreed(alone)
    keyed = [_label(match[1]) for match in _KEYED.finditer(plain)]
    if keyed:
        return keyed[-1]
    if _DOUBT.search(plain):
        return -1
    preferred = _preferences(plain)
    if preferred:
        return _agreed(preferred)
    inside = {_label(match[1]) for match in re.finditer(_LABEL, _without_numbering(plain))}
    if inside:
        return inside.pop() if len(inside) == 1 else None
    return -1 if _TIE.search(plain) else None


def parse_score(text: str) -> float | None:
    """The score in [0, 1] that an answer gives, -1.0 where it says that it is unsure, None where it gives none.

    "0.7", "70 %", "7/10" and "7 out of 10" are the same score. The last line with a number counts.
    """
    plain = _normalise(text)
    for line in reversed(plain.split("\n")):
        cleaned = _SCALE.sub(" ", re.sub(r"^\s*\d+[.)]\s+(?=\S)", "", _MENTION.sub(" ", line)))
        found = [_score(match) for match in _NUMBER.finditer(cleaned)]
        if found:
            return found[-1]
    return -1.0 if _DOUBT.search(plain) else None


def _score(match: re.Match[str]) -> float | None:
    value = float(match[1])
    if match[2]:
        value /= 100
    elif match[3]:
        value = value / float(match[3]) if float(match[3]) else -2.0
    return value if 0 <= value <= 1 or value == -1 else None


def strip_thoughts(text: str) -> str:
    """The text without what stands between thinking tags, whether both tags are there or one."""
    for thought in _THOUGHTS:
        text = thought.sub(" ", text)
    return text.strip()


def _normalise(text: str) -> str:
    """Lower case, without thoughts and markup; minus signs and number words unified."""
    plain = _MARKUP.sub("", _TAG.sub(" ", strip_thoughts(text).replace("’t", "'t"))).lower()
    plain = re.sub(r"[−–—‑‐﹣－](?=\s?\d)", "-", plain)
    plain = re.sub(r"\b(?:minus|negative)[\s-]+(?:one|1)\b", "-1", plain)
    plain = re.sub(r"^\s*(zero|one)\s*\.?\s*$", lambda match: _WORDS[match[1]], plain, flags=re.MULTILINE)
    return re.sub(
        r"\b(image|picture|frame|photo)\s+(zero|one|two)\b", lambda match: f"{match[1]} {_WORDS[match[2]]}", plain
    )


def _label(text: str) -> LabelValue:
    return cast(LabelValue, int(text.replace(" ", "")))


def _agreed(found: list[LabelValue]) -> LabelValue:
    return found[0] if len(set(found)) == 1 else -1


def _with_marks(plain: str) -> str:
    """Images as @0 and @1. Where an Image 0 is spoken of and no Image 2, counting starts at 0."""
    numbers = {match[1] for match in _MENTION.finditer(plain)}
    offset = 0 if "0" in numbers and "2" not in numbers else 1
    marked = _MENTION.sub(lambda match: f" @{max(int(match[1]) - offset, 0)} ", plain)
    marked = _ORDINAL.sub(lambda match: f" @{int((match[1] or match[2] or match[3]) in _SECOND)} ", marked)
    return re.sub(r"@([01]) > @[01]", r"@\1 is better", re.sub(r"\s*>\s*", " > ", marked))


def _preferences(plain: str) -> list[LabelValue]:
    """Which image each clause says is better; only the conclusion where the text draws one."""
    found: list[tuple[bool, LabelValue]] = []
    for clause in _CLAUSE.split(_with_marks(plain)):
        clause = re.sub(r"\s+", " ", clause)
        # Questions, rules and comparisons without a result.
        if re.search(r"@[01] or (?:in )?@[01]|\bif\b|\bneither\b|\bequally\b|\bwhether\b", clause):
            continue
        value = _clause_preference(clause)
        if value is not None:
            found.append((bool(_CONCLUSION.search(clause)), value))
    concluded = [value for conclusion, value in found if conclusion]
    return concluded or [value for _, value in found]


def _clause_preference(clause: str) -> LabelValue | None:
    comparand = _COMPARAND.search(clause)
    rest = _NEGATED.sub(" ", _COMPARAND.sub(" ", clause))
    for pattern in (_CHOSEN, _NAMED):
        match = pattern.search(rest)
        if match:
            return _label(match[1])
    for words, flip in ((_GOOD, 0), (_BAD, 1)):
        word = words.search(rest)
        if not word:
            continue
        before = re.findall(r"@([01])", rest[: word.start()])
        inside = re.match(r"[^@]{0,60}?\b(?:in|by|with|for|is|to be|at|on)\b:? @([01])", rest[word.end() :])
        after = re.search(r"@([01])", rest[word.end() :])
        if inside:
            place = int(inside[1])
        elif before:
            place = int(before[-1])
        elif after:
            place = int(after[1])
        elif comparand:
            place = 1 - int(comparand[1])
        else:
            continue
        return cast(LabelValue, place ^ flip)
    return None


def _without_numbering(plain: str) -> str:
    """Without mentions of images, list numbers, counts of images and repeated rules ("0 if ..., 1 if ...")."""
    named = re.sub(r"@[01]", " ", _with_marks(plain))
    named = re.sub(r"^\s*\d+[.):]\s+(?=\S)", "", named, flags=re.MULTILINE)
    return re.sub(r"(?:-1|\b[01])\s+(?:if|for|means|when)\b", " ", named)
