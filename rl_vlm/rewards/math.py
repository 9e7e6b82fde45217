r"""Grades mathematical answers: whether the last boxed answer equals the truth exactly, and if not, the reason.

Equal means: the same text after normalisation, the same exact number, or the same expression symbolically. There is
no numeric tolerance: `5.657` is not `4\sqrt{2}`. Tuples and lists agree element by element, in order; sets in any
order. Most pairs are decided by `normalize` and `exact`; the rest goes to a child process under a time limit.
All functions block (up to two seconds on hostile input): from asyncio, call them in an executor.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache

from rl_vlm.rewards.boxed import extract_boxed
from rl_vlm.rewards.exact import Monomial, parse_monomial
from rl_vlm.rewards.guard import refusal
from rl_vlm.rewards.normalize import MAX_CHARS, Answer, is_oversized, normalize_answer, read_answer
from rl_vlm.rewards.symbolic import TIMEOUT_S, WORKER, GraderError, Verdict
from rl_vlm.rewards.units import units_clash

__all__ = [
    "Grade",
    "GraderError",
    "Reason",
    "compare",
    "extract_boxed",
    "grade",
    "grade_turns",
    "is_equal",
    "normalize_answer",
]

_ONE = Monomial(Fraction(1))
_PERCENT = Monomial(Fraction(1, 100))
_DEGREE = Monomial(Fraction(1, 180), pi_power=1)
_LEAST_S = 0.1  # with less time left the child would only be killed
_AFTER_COMMA = re.compile(r",\s+")
_VARIABLE = re.compile(r"(?<![A-Za-z\\])[A-Za-z]")
_WORD = re.compile(r"[A-Za-z][A-Za-z' ]*")


class Reason(StrEnum):
    """Why a response was graded as it was."""

    CORRECT = "correct"
    WRONG = "wrong"  # another value, unit, kind or number of elements
    NO_ANSWER = "no_answer"  # no box with something in it
    TOO_LONG = "too_long"  # more than MAX_CHARS characters in the box
    TIMED_OUT = "timed_out"  # the symbolic comparison took longer than its limit
    UNPARSABLE = "unparsable"  # differs as text and number, and is no expression that may be evaluated


@dataclass(frozen=True, slots=True)
class Grade:
    """The verdict on one response; `answer` is the content of the box, cut to MAX_CHARS."""

    correct: bool
    answer: str | None
    reason: Reason


def grade(response: str, truth: str) -> Grade:
    """Grade the last boxed answer of one text that the policy wrote."""
    return grade_turns((response,), truth)


def grade_turns(turns: Sequence[str], truth: str) -> Grade:
    """Grade an episode by the last of the policy's turns that holds a boxed answer.

    Pass only what the policy sampled: boxes in messages of the environment are not answers.
    """
    for turn in reversed(turns):
        answer = extract_boxed(turn)
        if answer is not None:
            reason = compare(answer, truth)
            return Grade(reason is Reason.CORRECT, answer[:MAX_CHARS], reason)
    return Grade(False, None, Reason.NO_ANSWER)


def is_equal(answer: str, truth: str) -> bool:
    """Whether an answer (the content of a box) equals the truth; False where that takes too long to find out."""
    return compare(answer, truth) is Reason.CORRECT


def compare(answer: str, truth: str) -> Reason:
    """`is_equal` with its reason.

    Results are cached, time-outs too: the same answer must not take that time again.
    """
    if len(answer) > MAX_CHARS:
        return Reason.TOO_LONG
    return _compare(answer.strip(), truth.strip())


class _SymbolicBudget:
    """Symbolic comparisons of all elements of an answer under one time limit."""

    def __init__(self, limit_s: float) -> None:
        self._left_s = limit_s

    def compare(self, answer: str, truth: str) -> Reason:
        if refusal(answer) or refusal(truth):
            return Reason.UNPARSABLE
        if self._left_s < _LEAST_S:
            return Reason.TIMED_OUT
        verdict, spent_s = WORKER.compare(answer, truth, self._left_s)
        self._left_s -= spent_s
        return _REASONS[verdict]


_REASONS = {
    Verdict.EQUAL: Reason.CORRECT,
    Verdict.DIFFERENT: Reason.WRONG,
    Verdict.UNPARSABLE: Reason.UNPARSABLE,
    Verdict.TIMED_OUT: Reason.TIMED_OUT,
}


@lru_cache(maxsize=16384)
def _compare(answer: str, truth: str) -> Reason:
    if not answer:
        return Reason.UNPARSABLE
    if _AFTER_COMMA.sub(",", answer) == _AFTER_COMMA.sub(",", truth):
        return Reason.CORRECT
    if is_oversized(answer) or is_oversized(truth):
        return Reason.UNPARSABLE
    return _same(read_answer(answer), read_answer(truth), _SymbolicBudget(TIMEOUT_S))


def _same(given: Answer, expected: Answer, budget: _SymbolicBudget) -> Reason:
    if bool(given.items) != bool(expected.items):
        return Reason.WRONG
    if len(given.name) == len(expected.name) == 1 and given.name != expected.name:
        return Reason.WRONG  # x = 5 is not y = 5; longer names are only different ways to name one thing
    return _same_items(given, expected, budget) if given.items else _same_leaf(given, expected, budget)


def _same_items(given: Answer, expected: Answer, budget: _SymbolicBudget) -> Reason:
    kinds = {(given.opening, given.closing), (expected.opening, expected.closing)}
    if len(given.items) != len(expected.items) or (len(kinds) > 1 and kinds != {("", ""), ("\\{", "\\}")}):
        return Reason.WRONG
    if given.unordered or expected.unordered:
        return _same_set(given.items, expected.items, budget)
    ours, theirs = (_in_order_of_names(side.items) for side in (given, expected))
    for item, wanted in zip(ours, theirs, strict=True):
        reason = _same(item, wanted, budget)
        if reason is not Reason.CORRECT:
            return reason
    return Reason.CORRECT


def _in_order_of_names(items: tuple[Answer, ...]) -> list[Answer]:
    """Sorted by name, because `y=2, x=1` equals `x=1, y=2`."""
    names = {item.name for item in items}
    return sorted(items, key=lambda item: item.name) if "" not in names and len(names) == len(items) else list(items)


def _same_set(given: tuple[Answer, ...], expected: tuple[Answer, ...], budget: _SymbolicBudget) -> Reason:
    """Whether every element has a partner of its own; equality is transitive, so the first one that fits is taken."""
    left = list(given)
    for wanted in expected:
        reasons = []
        for position, item in enumerate(left):
            reasons.append(_same(item, wanted, budget))
            if reasons[-1] is Reason.CORRECT:
                del left[position]
                break
        else:
            return next((reason for reason in reasons if reason is not Reason.WRONG), Reason.WRONG)
    return Reason.CORRECT


def _same_leaf(given: Answer, expected: Answer, budget: _SymbolicBudget) -> Reason:
    answer, truth = given.text, expected.text
    value, wanted = parse_monomial(answer), parse_monomial(truth)
    if value and wanted:
        return Reason.CORRECT if _same_number(value, given, wanted, expected) else Reason.WRONG
    if units_clash(given.unit, expected.unit):
        return Reason.WRONG
    if answer == truth:
        return Reason.CORRECT if answer else Reason.UNPARSABLE
    words = [text for text in (answer, truth) if _WORD.fullmatch(text)]
    if len(words) == 2 and min(map(len, words)) > 1 and answer.casefold() == truth.casefold():
        return Reason.CORRECT
    if value or wanted:
        if words:
            return Reason.WRONG  # a number is no word and no variable
    elif any(len(word) > 3 for word in words) or [len(word) for word in words] == [1, 1]:
        return Reason.WRONG
    answer = given.equation if "=" in truth and given.equation else answer
    # The truth x=5 asks for the value, and 2x=10 may be the question; the truth y=2x+1 asks for an equation.
    truth = expected.equation if "=" in answer and expected.equation and _VARIABLE.search(truth) else truth
    if ("=" in answer) != ("=" in truth):
        return Reason.WRONG
    return budget.compare(answer, truth)


def _same_number(value: Monomial, given: Answer, wanted: Monomial, expected: Answer) -> bool:
    """Equal as written, or in value with percent and degree signs: 50% = 1/2, 180 degrees = pi."""
    if {given.unit, expected.unit} <= {"degree", "rad", ""} and "degree" in {given.unit, expected.unit}:
        in_radians = [
            number.times(_DEGREE if side.unit == "degree" else _ONE)
            for number, side in ((value, given), (wanted, expected))
        ]
        if in_radians[0] == in_radians[1]:
            return True
    if units_clash(given.unit, expected.unit):
        return False
    if value == wanted:
        return True
    scaled = [number.times(_PERCENT if side.percent else _ONE) for number, side in ((value, given), (wanted, expected))]
    return scaled[0] == scaled[1]
