"""How a text is shown to a judge, and which texts are not shown to one."""

from __future__ import annotations

import re

from rl_vlm.rewards.text import why_not_graded

_QUOTES = re.compile('["\u201c-\u201f\u00ab\u00bb\u2033\u301d-\u301f\uff02]')
_SPACES = re.compile(r"\s+")
_ONE = r"(?:(?:number|no\.?)\s*)?(?:[12]|one|two|first|second|this|me|mine|the (?:first|second|other|caption|answer|option|above|below))\b"  # noqa: E501
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
            r"\b(?:you (?:must|should|will|have to|are (?!looking|seeing))|as an ai|full (?:score|marks)|score (?:of "
            r")?1)\b",
        )
    ),
    re.IGNORECASE,
)


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
