"""How a text is shown to a judge, and which texts are not shown to one."""

from __future__ import annotations

import re

from rl_vlm.rewards.text import why_not_graded

_QUOTES = re.compile('["\u201c-\u201f\u00ab\u00bb\u2033\u301d-\u301f\uff02]')
_SPACES = re.compile(r"\s+")
_ONE = r"(?:(?:number|no\.?)\s*)?(?:[12]|(?-i:[A-T])|one|two|first|second|this|me|mine|the (?:first|second|other|caption|answer|option|above|below))\b"  # noqa: E501
# Phrases that no description of a picture contains: orders to choose, the judge's own question, names of the two
# texts, praise of itself.
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
            r"\b(?:rubrics?|propositions?|criteri(?:on|a)|checklists?|requirements?)\b|\bstatements?\b.{0,30}\b(?:true|false|"
            r"yes|met|satisfied|holds?)\b",
            r"\brank(?:ed|s|ing)?\b\W+(?:me|this|mine|it|as|first|second|last|top|above|below|number|(?-i:[A-T1-9]))\b",
            r"\b(?:place|put|list|sort)\W+(?:me|this|mine)\b|(?:^|[\s(])(?-i:[A-T1-9])\s*(?:>|≻)\s*(?-i:[A-T1-9])\b",
            r"\b(?:task|goal|everything|all(?: of (?:it|them))?)\s+(?:is|are|was|has been)\s+(?:now\s+)?(?:done|"
            r"completed?|true|achieved|finished|satisfied|fulfilled|correct)\b|\b(?:reply|say|answer)\W+(?:yes|true|no)\b",
            r"\b(?:you (?:must|should|will|have to|are (?!looking|seeing))|as an ai|full (?:score|marks)|score (?:of "
            r")?1)\b",
        )
    ),
    re.IGNORECASE,
)


_WORDS = re.compile(r"[^\W_]+")


def repeats(text: str, proposition: str) -> bool:
    """Whether a text says most of what a judge is asked about it: four fifths of the proposition's words, in
    order and without articles."""
    wanted, said = (
        [word for word in _WORDS.findall(one.casefold()) if word not in ("a", "an", "the")]
        for one in (proposition, text)
    )
    common = [0] * (len(wanted) + 1)  # the longest common subsequence with the first words of the proposition
    for word in said:
        before = 0
        for place, own in enumerate(wanted, 1):
            before, common[place] = common[place], before + 1 if own == word else max(common[place], common[place - 1])
    return len(wanted) >= 3 and common[-1] >= 0.8 * len(wanted)


def quoted(text: str, max_chars: int) -> str:
    """The text on one line between straight quotes that no quote inside can end, cut off after `max_chars`."""
    return '"' + _QUOTES.sub("'", _SPACES.sub(" ", text).strip())[:max_chars] + '"'


def why_not_judged(text: str, max_chars: int) -> str:
    """Why a text is not shown to a judge; "" if it may be: "empty", a reason of `why_not_graded`, or "to_the_judge".

    The last is a list of phrases (orders, names of the texts that are compared, the question itself), not a proof: a
    judge that can be talked into something may be talked into it by others.
    """
    if not text.strip():
        return "empty"
    return why_not_graded(text, max_chars) or ("to_the_judge" if _TO_THE_JUDGE.search(_SPACES.sub(" ", text)) else "")
