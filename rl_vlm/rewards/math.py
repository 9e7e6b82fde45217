r"""Grades mathematical answers: whether the last boxed answer equals the truth exactly, and if not, the reason.

Equal means: the same text after normalisation, the same exact number, or the same expression symbolically. There is
no numeric tolerance: `5.657` is not `4\sqrt{2}`. Tuples and lists agree element by element, in order; sets in any
order. What `normalize` and `exact` cannot decide goes to a child process under a limit of CPU time, so all functions
may block for two seconds of CPU time: from asyncio, call them in an executor.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from rl_vlm.rewards.algebra import why_not_evaluated
from rl_vlm.rewards.boxes import extract_boxed
from rl_vlm.rewards.exact import Monomial, parse_monomial
from rl_vlm.rewards.names import are_rivals
from rl_vlm.rewards.normalize import MAX_CHARS, AnswerTree, is_oversized, read_answer
from rl_vlm.rewards.symbolic import CPU_S, WORKER, Reason
from rl_vlm.rewards.truths import RANGE, WORD
from rl_vlm.rewards.units import units_clash
from rl_vlm.safe_text import without_thoughts

_ONE = Monomial.of(1)
_PERCENT = Monomial.of(Fraction(1, 100))
_DEGREE = Monomial(Fraction(1, 180**2), pi_power=1)
_LEAST_S = 0.1  # with less time left the child would only be killed
_AFTER_COMMA = re.compile(r",\s+")
_VARIABLE = re.compile(r"(?<![A-Za-z\\])[A-Za-z]")


@dataclass(frozen=True, slots=True)
class Grade:
    """The verdict on one response; `answer` is the content of the box, cut to MAX_CHARS."""

    correct: bool
    answer: str | None
    reason: Reason


def grade_turns(turns: Sequence[str], truth: str) -> Grade:
    """Grade an episode by the last of the policy's turns that holds a boxed answer outside of thoughts. Pass only what
    the policy sampled: boxes in messages of the environment are not answers."""
    for turn in reversed(turns):
        answer = extract_boxed(without_thoughts(turn))
        if answer is not None:
            reason = compare(answer, truth)
            return Grade(reason is Reason.CORRECT, answer[:MAX_CHARS], reason)
    return Grade(False, None, Reason.NO_ANSWER)


def is_equal(answer: str, truth: str) -> bool:
    """Whether an answer (the content of a box) equals the truth; False where to find out takes too much CPU time."""
    return compare(answer, truth) is Reason.CORRECT


def compare(answer: str, truth: str) -> Reason:
    """`is_equal` with its reason, from a cache where the answer was seen before, also one that used up its CPU time.
    Raises GraderError where nothing can be said; that is not cached."""
    if len(answer) > MAX_CHARS:
        return Reason.TOO_LONG
    return _compare(answer.strip(), truth.strip())


class _SymbolicBudget:
    """Symbolic comparisons of all elements of an answer under one limit of CPU time."""

    _left_s = CPU_S

    def compare(self, answer: str, truth: str) -> Reason:
        if why_not_evaluated(answer) or why_not_evaluated(truth):
            return Reason.UNPARSABLE
        if self._left_s < _LEAST_S:
            return Reason.TIMED_OUT
        reason, spent_s = WORKER.compare(answer, truth, self._left_s)
        self._left_s -= spent_s
        return reason


@lru_cache(maxsize=16384)
def _compare(answer: str, truth: str) -> Reason:
    if not answer:
        return Reason.UNPARSABLE
    if _AFTER_COMMA.sub(",", answer) == _AFTER_COMMA.sub(",", truth):
        return Reason.CORRECT
    if is_oversized(answer) or is_oversized(truth):
        return Reason.UNPARSABLE
    if (between := RANGE.fullmatch(truth)) and between["dash"]:  # 10-12 is no -2
        return Reason.WRONG
    return _same(read_answer(answer), read_answer(truth), _SymbolicBudget())


def _same(given: AnswerTree, expected: AnswerTree, budget: _SymbolicBudget) -> Reason:
    if bool(given.items) != bool(expected.items):  # the truth "1/2 or 0.5" is one value in two spellings
        spellings = expected.items if expected.order == "any" and not expected.opening else ()
        same = [_same(given, spelling, budget) is Reason.CORRECT for spelling in spellings]
        return Reason.CORRECT if same and all(same) else Reason.WRONG
    if are_rivals(given.name, expected.name):
        return Reason.WRONG
    return _same_items(given, expected, budget) if given.items else _same_leaf(given, expected, budget)


def _same_items(given: AnswerTree, expected: AnswerTree, budget: _SymbolicBudget) -> Reason:
    kinds = {(given.opening, given.closing), (expected.opening, expected.closing)}
    if len(given.items) != len(expected.items) or (len(kinds) > 1 and kinds != {("", ""), ("\\{", "\\}")}):
        return Reason.WRONG
    if expected.order or given.order == "both":  # only a set on the truth's side, or "both", frees the order
        return _same_set(given.items, expected.items, budget)
    ours, theirs = (_in_order_of_names(side.items) for side in (given, expected))
    for item, wanted in zip(ours, theirs, strict=True):
        reason = _same(item, wanted, budget)
        if reason is not Reason.CORRECT:
            return reason
    return Reason.CORRECT


def _in_order_of_names(items: tuple[AnswerTree, ...]) -> list[AnswerTree]:
    """Sorted by name, because `y=2, x=1` equals `x=1, y=2`."""
    names = {item.name for item in items}
    return sorted(items, key=lambda item: item.name) if "" not in names and len(names) == len(items) else list(items)


def _same_set(given: tuple[AnswerTree, ...], expected: tuple[AnswerTree, ...], budget: _SymbolicBudget) -> Reason:
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


def _with_its_unit(leaf: AnswerTree, other: AnswerTree) -> AnswerTree:
    """`12L` as 12 L where the other side has that unit: a letter behind a number may also be a variable."""
    number = leaf.text.removesuffix(re.sub(r"\^(.)", r"^{\1}", other.unit))
    apart = not leaf.unit and number != leaf.text and parse_monomial(number)
    return replace(leaf, text=number, unit=other.unit) if apart else leaf


def _same_leaf(given: AnswerTree, expected: AnswerTree, budget: _SymbolicBudget) -> Reason:
    given, expected = _with_its_unit(given, expected), _with_its_unit(expected, given)
    answer, truth = _end_of_chain(given.text, budget), _end_of_chain(expected.text, budget)
    value, wanted = parse_monomial(answer), parse_monomial(truth)
    if value and wanted:
        return Reason.CORRECT if _same_number(value, given, wanted, expected) else Reason.WRONG
    if units_clash(given.unit, expected.unit):
        return Reason.WRONG
    if answer == truth:
        return Reason.CORRECT if answer else Reason.UNPARSABLE
    words = [text for text in (answer, truth) if WORD.fullmatch(text)]
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


def _end_of_chain(text: str, budget: _SymbolicBudget) -> str:
    r"""The last of several equal numbers, as in `\frac{6}{4}=1.5` and `180-65=115`."""
    *others, last = text.split("=")
    value = parse_monomial(last) if others else None
    if value is None:
        return text
    for other in others:
        number = parse_monomial(other)
        if number != value and (number or _VARIABLE.search(other) or budget.compare(other, last) is not Reason.CORRECT):
            return text
    return last


def _same_number(value: Monomial, given: AnswerTree, wanted: Monomial, expected: AnswerTree) -> bool:
    """Equal as written, or in value with percent and degree signs: 50% = 1/2, 180 degrees = pi."""
    units = {given.unit, expected.unit}
    if "degree" in units and units <= {"degree", "rad", ""}:
        ours = value.times(_DEGREE if given.unit == "degree" else _ONE)
        if ours == wanted.times(_DEGREE if expected.unit == "degree" else _ONE):
            return True
    if units_clash(given.unit, expected.unit):
        return False
    if value == wanted:
        return True
    ours = value.times(_PERCENT if given.percent else _ONE)
    return ours == wanted.times(_PERCENT if expected.percent else _ONE)
