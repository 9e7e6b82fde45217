"""Reads labels and scores from a labeller's free text.

Labels: 0 means Image 1, 1 means Image 2, -1 no preference or a contradiction; an answer that is not understood is None,
which is no label either. Each sentence must be a verdict as a whole (see `answer_grammar`); numbers of images, of lists,
counts and decimals are never mistaken for labels.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, cast

from rl_vlm.labelling.answer_grammar import Grammar, grammar
from rl_vlm.labelling.answer_text import sentences, strip_thoughts
from rl_vlm.labelling.types import LabelValue

# Characters of an answer without its thoughts. No verdict is as long, and the grammar's time grows with its square.
MAX_VERDICT = 16_384
_KEY = (
    r"(?:(?:since|because|as|given) [^,]*, )?(?:(?:so|and|thus|therefore|hence|=>|->|sure|certainly|okay|here(?: is|'s))[,:]? )*(?:the |my |your )?(?:(?:final|correct|best|overall) )*"
    r"(?:answer|label|choice|preference|result|output|reply|response|decision|verdict|summary|prediction|selection)(?: value)?"
)
_CHOOSE = (
    r"(?:so |thus |therefore )?i(?: would|'d|'ll| will)? (?:choose|pick|select|say|answer|reply(?: with)?|go with|"
    r"label (?:this|it|the pair)(?: as)?)"
)
# A label that begins a statement: alone, after a key ("answer: 1"), or with its reason behind it ("1, because ...").
_LABELLED = re.compile(
    rf"[(\[]?(?:{_KEY}(?:(?: (?:is|would be|should be|must be)(?: therefore| thus)?:?|\s?[:=→]|\s?->)\s?[(\[]?(?:a |label )?)|{_CHOOSE}:? |"
    r"(?:so|thus|therefore|hence|overall|=>|->|→)[,:]? ?|label )?"
    r"(-\s?1|[01])(?:\.0+)?(?:[)\],.:!]*|[)\]]?(?P<rest>\s?[(,:-](?!\s*[\d.(-]).+| (?:because|since|as|which)\b.+))"
)
# A label that ends a verdict: "... in Image 2 (1)", "... in Image 2: 1".
_TRAILING = re.compile(r"(.+?)\s?(?:(?P<aside>\()|[:=]|->|=>)\s?(-1|[01])\)?")
_OTHER_LABEL = re.compile(r"\bor\b|\b(?:you|they) |(?<![\w.])-?[01](?![\w.])")
_ASIDE = re.compile(r"\s*\(((?!-?\d\))[^()]{2,})\)")
_JOINT = re.compile(
    r"(?:,? |^)(?P<contrast>but|however|yet|whereas|while|though|although|nevertheless)\b,? ?|"
    r"(?:,? and|,)? ?\b(?P<reasoned>so(?! (?:is|does|has|was)\b)|thus|therefore|hence)\b,? |, and |, (?=(?:in )?[AB]\b)|: | - "
)
# What follows these is conditional, doubted or another's opinion, and no statement of the answer.
_SCOPE = re.compile(
    r"^(?:perhaps|maybe|possibly|one (?:might|may|could|would))\b|\bno reason\b|"
    r"\b(?:if|whether|unless|suppos\w+|assum\w+|imagine|pretend|were|would have|untrue|false|not true|not the case|wrong|doubt\w*|den(?:y|ies)|"
    r"claims?|argue\w*|nobody|no one|some|others|people|(?:do|would|could|can|did)(?:n't| not) (?:think|believe|say|call|conclude|see)|cannot)\b"
)
_ADVERB = r"(?:\w+\s+)"
_DOUBT = re.compile(
    rf"\b(?:uncertain|unsure|unclear|undecided|undetermined|inconclusive|indistinguishable|indeterminate|ambiguous|"
    rf"not\s+{_ADVERB}?(?:sure|certain|clear)|"
    rf"(?:cannot|can\s+not|cant|can't|could\s+not|couldn't|unable\s+to|(?:impossible|hard|difficult|not\s+possible)\s+to)\s+"
    rf"(?:be\s+)?{_ADVERB}?(?:tell|told|say|said|determined?|decided?|judged?|compared?|answer)|"
    rf"(?:do\s+not|don't)\s+know)\b"
)
_TIE = re.compile(
    rf"\b(?:equal|equally|tie|tied|identical|equivalent|(?<!not )as good as|(?:the|exactly the) same|"
    rf"no\s+{_ADVERB}{{0,3}}(?:difference|preference|winner|distinction|change)s?|"
    rf"(?:not|n't)\s+{_ADVERB}{{0,3}}(?:difference|different|differ)|(?:little|negligible|without)\s+{_ADVERB}?difference)\b"
)
_LIKENESS = re.compile(r"\b(?:both|neither|same|similar|similarly|alike|comparable)\b")
# After a verdict these withdraw it; negations only where the sentence is about the verdict and not about a picture.
_RETRACTS = re.compile(
    r"\b(?:wrong|false|incorrect|untrue|mistake\w*|opposite|contrary|reverse|vice versa|kidding|joke|joking|sorry|correction|wait|actually|"
    r"maybe|perhaps|possibly|disagree|reconsider|strike|scratch|hmm|then again|second thoughts?|changed? my mind|might|may|could|unless|if|some|others|or)\b|\?$"
)
_NEGATION = re.compile(r"\b(?:not|no|never|\w+n't|cannot|nor|neither|hardly|doubt\w*)\b")
_ABOUT_VERDICT = re.compile(
    r"\b(?:better|best|worse|worst|prefer\w*|superior|inferior|closer|nearer|answer|label|right|true|correct|so|that|this|it|"
    r"case|really|sure)\b"
)
_CLAIMS = re.compile(r"^(?:in |the \w+ in )?(?P<image>[AB])\b.*\b(?:better|best|closer|nearer|prefer\w*|wins)\b")

# "not in Image 1", "Image 1 does not", "Image 1 shows no progress": no verdict, but only one for the other image agrees with it.
_DENIED = re.compile(
    r"(?:it is |it's |is )?not (?:in )?(?P<image>[AB])|"
    r"(?:in )?(?P<without>[AB]),? (?:(?:it )?(?:does|has|is|was|do|did)(?: not|n't)(?: (?:achieve|reach|meet|show|satisfy)\b.*)?|shows (?:no|little|less) progress.*)"
)
_NOT_YET = re.compile(
    r"neither\b.*\b(?:achiev|reach|complet|fully|meet|satisf)\w*\b.*|(?:even )?.*\b(?:goal|task)\b is not (?:fully|yet|completely|quite) .*"
)
# After a verdict: the same holds for the other image, or the verdict is withdrawn.
_ALSO = re.compile(
    r"(?:and )?so (?:is|does|has|was)\b.*|.*\b(?:too|as well|likewise)|"
    r".*\b(?:i (?:take|hope|guess|lied|was|meant)|ignore|disregard|forget|nope|nah|previous|depend\w*|who knows)\b.*"
)

# "Image 1", "in Image 1, not Image 2": a verdict only where it answers the question, else a title.
_IMAGE_ALONE = re.compile(
    r"(?:it is |it's )?(?:in )?[AB](?:,? (?:not|and not|rather|over|instead|because|since|as|where|>)\b.*)?"
)
_CONCLUDES = re.compile(r"(?:overall|in conclusion|in summary|to conclude|all in all|in the end|ultimately)\b")
_CONTRASTS = re.compile(r"(?:but|however|yet|nevertheless),? ")
_CONCEDES = re.compile(r"(?:while|although|though|even though)\b")


class _Item(NamedTuple):
    """The meaning of one statement.

    A verdict that `contrasts` ("..., but Image 2 is better") outweighs ties before it; one that `concludes` ("Overall, ...")
    also the verdicts before it. A claim only excludes the other image; a hint is a number that may be a list's.
    """

    kind: Literal["verdict", "number", "hint", "doubt", "tie", "likeness", "retraction", "claim"]
    value: int = -1
    contrasts: bool = False
    concludes: bool = False


def parse_label(text: str, goal: str = "") -> LabelValue | None:
    """The label that an answer gives; -1 where it is in doubt or contradicts itself; None if it is not understood.

    `goal` in words tells which qualities are good: "more closed" is no verdict about opening a drawer.
    """
    if len(strip_thoughts(text)) > MAX_VERDICT:
        return None
    parts = sentences(text)
    if "A" in parts and "B" in parts:
        parts = [part for part in parts if part not in ("A", "B")]  # the titles of two descriptions
    rules = grammar(goal)
    items = [item for part in parts for item in _sentence(part, rules)]
    kinds = {item.kind for item in items}
    decided = [place for place, item in enumerate(items) if item.kind in ("verdict", "number")]
    if not decided:
        return -1 if kinds & {"doubt", "tie", "likeness"} else None
    last = items[decided[-1]]
    later = items[decided[-1] + 1 :]
    binding = ("number", "hint") if last.concludes else ("number", "hint", "verdict")
    if "doubt" in kinds or any(item.kind in binding and item.value != last.value for item in items):
        return -1
    if "tie" in kinds and not (last.contrasts or last.concludes):
        return -1
    if any(item.kind in ("tie", "retraction") or (item.kind == "claim" and item.value != last.value) for item in later):
        return -1
    return cast(LabelValue, last.value)


def _sentence(sentence: str, rules: Grammar) -> list[_Item]:
    """The statements of a sentence; those in brackets come before or behind a label as its reason or its restriction."""
    if sentence.startswith("#"):
        return [_Item("hint", 1)] if sentence == "#1" else []
    asides = [item for aside in _ASIDE.findall(sentence) for item in _sentence(aside, rules)]
    main = _ASIDE.sub("", sentence).strip()
    if (
        _IMAGE_ALONE.fullmatch(main)
        and "(" in sentence
        and not any(item.kind in ("verdict", "number") for item in asides)
    ):
        return asides  # "Image 1 (a drawer)" is a title
    labelled = _LABELLED.fullmatch(main)
    if labelled:
        rest = labelled["rest"] or ""
        if _SCOPE.search(rest) or _OTHER_LABEL.search(rest):
            return asides
        number = _Item("number", _label(labelled[1]))
        reason = re.sub(r"^(?:because|since|as|which)\b", "", rest.strip(" ,:-()")).strip()
        # The label comes last, because its reason may speak of either image.
        return [*_clauses(reason, rules), *asides, number] if reason else [number, *asides]
    trailing = _TRAILING.fullmatch(main)
    if trailing and (trailing["aside"] or trailing[1] not in ("A", "B")) and rules.verdict(trailing[1]) is not None:
        return [*_sentence(trailing[1], rules), *asides, _Item("number", _label(trailing[3]))]
    return [*_clauses(main, rules), *asides]


def _clauses(sentence: str, rules: Grammar) -> list[_Item]:
    """The statements of a sentence: the longest end of it that is a verdict as a whole, and what stands before that."""
    items: list[_Item] = []
    opening = _CONTRASTS.match(sentence)
    start, contrasts = opening.end() if opening else 0, bool(opening)
    reasoned = True  # an image or a number alone answers the question: at the beginning, and behind "so" or "therefore"
    scoped = False  # under a condition, a doubt or a negation
    while start < len(sentence):
        joint = _JOINT.search(sentence, start + 1)
        rest, clause = sentence[start:], sentence[start : joint.start() if joint else None]
        labelled = _LABELLED.fullmatch(rest) if start and reasoned and not scoped else None
        if labelled and not labelled["rest"]:
            return [*items, _Item("number", _label(labelled[1]))]  # "..., so the answer is 1"
        for part in dict.fromkeys((rest, clause)):
            title = part is clause and joint and not joint.lastgroup  # "Image 1: a drawer"
            value = (
                None if scoped or ((title or not reasoned) and _IMAGE_ALONE.fullmatch(part)) else rules.verdict(part)
            )
            if value is not None:
                contrasts = contrasts or bool(_CONCEDES.match(part))
                items.append(_Item("verdict", value, contrasts, bool(_CONCLUDES.match(part))))
                if part is rest:
                    return items
                break
        else:
            items += _other(clause)
        if joint is None:
            break
        scoped = scoped or bool(_SCOPE.search(clause))
        contrasts, reasoned = bool(joint["contrast"]), bool(joint["reasoned"])
        if not contrasts and not reasoned:
            # "Perhaps, Image 1 is better", "in theory, Image 1 is better": one statement, which was not understood.
            adverb = joint[0] == ", " and not re.search(r"\b[AB]\b", clause) and not rules.opens(clause)
            scoped = scoped or adverb or bool(_RETRACTS.search(clause) or _NEGATION.search(clause))
        start = joint.end()
    return items


def _other(clause: str) -> list[_Item]:
    """How a clause that is no verdict affects the verdicts around it."""
    denied = _DENIED.fullmatch(clause)
    if denied:
        return [_Item("claim", 1 - "AB".index(denied["image"] or denied["without"]))]
    if _NOT_YET.fullmatch(clause):
        return [_Item("likeness")] if clause.startswith("neither") else []
    if _DOUBT.search(clause):
        return [_Item("doubt")]
    if _TIE.search(clause):
        return [_Item("tie")]
    likeness = [_Item("likeness")] if _LIKENESS.search(clause) else []
    negated = _NEGATION.search(clause) and (len(clause.split()) <= 4 or _ABOUT_VERDICT.search(clause))
    if negated or _ALSO.fullmatch(clause) or _RETRACTS.search(clause):
        return [_Item("retraction"), *likeness]
    if likeness:
        return likeness
    claim = _CLAIMS.match(clause)
    return [_Item("claim", "AB".index(claim["image"]))] if claim else []


def _label(text: str) -> int:
    return int(text.replace(" ", ""))


_NUMBER = r"(?P<number>-?(?:\d+(?:\.\d+)?|\.\d+))(?:\s*(?:(?P<percent>%|percent\b)|(?:/|out\s+of)\s*(?P<scale>\d+(?:\.\d+)?)))?(?![\w%/]|[.,-]\d)"
# "0.7", "0.7, because ...", "the score is 0.7", "I would give it a 7/10".
_SCORED = re.compile(
    r"(?:.*\b(?:scores?|rating|ratings?|rate|mark|grade|value|answer|gives?|given|deserves?|assign|say|earns?|gets?)\b(?: [a-z]+){0,4}?\s?[:=(]?\s?|"
    rf"(?:so|thus|therefore|overall|=>|->)?[,:]? ?\(?)(?<![\w.,-]){_NUMBER}\)?(?:$|[,:;(-].*| -.*| (?:because|since|as|for|to|on|points?|in|here|at)\b.*)"
)
_SCALE = re.compile(
    r",? ?\b(?:on a scale )?(?:from|of|between)\s*0(?:\.0)?\s*(?:to|-|and)\s*(?:100|10|1)(?:\.0)?\b,? ?"
)
_NO_SCORE = re.compile(
    r"\b(?:not|never|no|\w+n't|between|or|either|if|(?:less|more|lower|higher|greater) than|above|below|under|over|at (?:least|most)|cannot)\b"
)


def parse_score(text: str) -> float | None:
    """The score in [0, 1] that an answer gives, -1.0 where it is unsure, None where it gives none.

    "0.7", "70 %", "7/10", "7 out of 10" and "0.7/1.0" are the same score. The last statement of a score counts; counts of
    things, ranges and bounds ("at least 0.3") are none.
    """
    parts = [_SCALE.sub(" ", part).strip() for part in sentences(text)]
    for part in reversed(parts):
        found = _SCORED.fullmatch(part)
        if found:
            return None if _NO_SCORE.search(part[: found.start("number")]) else _score(found)
    return -1.0 if any(_DOUBT.search(part) for part in parts) else None


def _score(match: re.Match[str]) -> float | None:
    value, scale = float(match["number"]), float(match["scale"] or 1)
    if match["percent"]:
        scale = 100
    value = value / scale if scale else -2.0
    return value if 0 <= value <= 1 or value == -1 else None
