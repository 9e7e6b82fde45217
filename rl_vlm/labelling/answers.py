"""Reads the answers of a labeller.

The whole answer, or its last line, must be the number. Only quotes, brackets and marks of emphasis may surround it. A
number in a sentence may count images or items of a list, and a label for the wrong image teaches the reward model the
opposite.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import cast

from rl_vlm.labelling.labels import LabelValue
from rl_vlm.safe_text import without_thoughts

CHOICES = ("0", "1", "-1")
SCORE_CHOICES = ("-1", "0", *(f"0.{tenth}" for tenth in range(1, 10)), "1")
RATINGS = ("terrible", "poor", "fair", "good", "excellent")  # from 0 to 1; no two begin alike
SUCCESS = ("False", "True")
_BEFORE, _AFTER = r"[\s*_`'\"(\[{$]*", r"[\s*_`'\")\]}$]*\.?[\s*_`'\")\]}$]*"
_LABEL = re.compile(rf"{_BEFORE}(-1|0|1){_AFTER}")
_IMAGE = re.compile(r"\bimage\s*([12])\b", re.IGNORECASE)
# "0.7", "70 %", "7/10", and -1 for an answer that is unsure.
_SCORE = re.compile(
    rf"{_BEFORE}(?P<number>-1|\d{{1,9}}(?:\.\d{{1,9}})?|\.\d{{1,9}})\s*"
    rf"(?:(?P<percent>%)|/\s*(?P<scale>\d{{1,9}}(?:\.\d{{1,9}})?))?{_AFTER}"
)


def read_label(text: str) -> LabelValue | None:
    """The label of an answer; None if it is not understood: its lines hold different labels, or its text names the
    other image alone ("Image 2 is better.", and then 0)."""
    answer = without_thoughts(text)
    lines = [_LABEL.fullmatch(line) for line in answer.splitlines()]
    labels = {line[1] for line in lines if line}
    if len(labels) != 1 or lines[-1] is None:
        return None
    label = cast(LabelValue, int(labels.pop()))
    named = set(_IMAGE.findall(answer))
    return None if label != -1 and named and str(label + 1) not in named else label


def read_word(text: str, words: Sequence[str]) -> float | None:
    """Where the one of these words that an answer's last line holds stands between the first (0) and the last (1); None
    where it holds none of them, or several."""
    lines = without_thoughts(text).splitlines()
    held = set(re.findall(r"\w+", lines[-1].lower())) if lines else set()
    found = [place for place, word in enumerate(words) if word.lower() in held]
    return found[0] / (len(words) - 1) if len(found) == 1 else None


def expected_place(probabilities: Mapping[str, float], words: Sequence[str]) -> float:
    """The mean place of the words between 0 and 1."""
    return sum(place * probabilities[word] for place, word in enumerate(words)) / (len(words) - 1)


def read_score(text: str) -> float | None:
    """The score in [0, 1] of an answer, -1.0 if it is unsure, None if it is not understood."""
    lines = without_thoughts(text).splitlines()
    match = _SCORE.fullmatch(lines[-1]) if lines else None
    if match is None:
        return None
    if match["number"] == "-1":
        return -1.0
    scale = 100.0 if match["percent"] else float(match["scale"] or 1)
    value = float(match["number"]) / scale if scale else -1.0
    return value if 0 <= value <= 1 else None
