"""Reads the label or the score that a labeller was asked for, and nothing else.

The whole answer, or its last line, must be the number: only quotes, brackets and marks of emphasis may surround it. Any
other text is not understood (None). A number in a sentence may count images or items of a list, and a label for the wrong
image teaches the reward model the opposite.
"""

from __future__ import annotations

import re
from typing import cast

from rl_vlm.labelling.types import LabelValue

_THOUGHT_BEGINS = re.compile(r"<think(?:ing)?>", re.IGNORECASE)
_THOUGHT_ENDS = re.compile(r"</think(?:ing)?>", re.IGNORECASE)
_BEFORE, _AFTER = r"[\s*_`'\"(\[{$]*", r"[\s*_`'\")\]}$]*\.?[\s*_`'\")\]}$]*"
_LABEL = re.compile(rf"{_BEFORE}(-1|0|1){_AFTER}")
_IMAGE = re.compile(r"\bimage\s*([12])\b", re.IGNORECASE)
# "0.7", "70 %", "7/10", and -1 for an answer that is unsure.
_SCORE = re.compile(
    rf"{_BEFORE}(?P<number>-1|\d{{1,9}}(?:\.\d{{1,9}})?|\.\d{{1,9}})\s*(?:(?P<percent>%)|/\s*(?P<scale>\d{{1,9}}(?:\.\d{{1,9}})?))?{_AFTER}"
)


def strip_thoughts(text: str) -> str:
    """What follows the last thought; empty if a thought is open at the end.

    A closing tag alone ends a thought that the chat template opened in the prompt.
    """
    return _THOUGHT_BEGINS.split(_THOUGHT_ENDS.split(text)[-1])[0].strip()


def read_label(text: str) -> LabelValue | None:
    """The label of an answer, None if it is not understood.

    An answer contradicts itself, and is not understood, if its lines hold different labels or its text names the other
    image alone ("Image 2 is better.", and then 0).
    """
    said = strip_thoughts(text)
    lines = [_LABEL.fullmatch(line) for line in said.splitlines()]
    labels = {line[1] for line in lines if line}
    if len(labels) != 1 or lines[-1] is None:
        return None
    label = cast(LabelValue, int(labels.pop()))
    named = set(_IMAGE.findall(said))
    return None if label != -1 and named and str(label + 1) not in named else label


def read_score(text: str) -> float | None:
    """The score in [0, 1] of an answer, -1.0 if it is unsure, None if it is not understood."""
    lines = strip_thoughts(text).splitlines()
    match = _SCORE.fullmatch(lines[-1]) if lines else None
    if match is None:
        return None
    if match["number"] == "-1":
        return -1.0
    scale = 100.0 if match["percent"] else float(match["scale"] or 1)
    value = float(match["number"]) / scale if scale else -1.0
    return value if 0 <= value <= 1 else None
