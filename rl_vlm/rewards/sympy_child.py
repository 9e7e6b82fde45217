"""Compares expressions symbolically, in the child process of `rl_vlm.rewards.symbolic`.

A request is `{"answer": ..., "truth": ...}`, a reply `{"reason": ..., "cpu_s": ...}` with the value of a `Reason` and
the CPU time that it took. It imports nothing else of this package, so that the child starts fast and stays small.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from typing import Any

import sympy
from latex2sympy2_extended import latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from latex2sympy2_extended.logic import And
from math_verify import verify
from sympy.core.relational import Eq, Ge, Gt, Le, Lt, Relational

DIGITS = 60  # of the numeric comparison
TOLERANCE = sympy.Float("1e-45", DIGITS)
# Sizes of the variables in numeric comparisons, and how many points of both signs these make.
SIZES = ("0.3719", "2.6131", "1.8137", "0.4391", "7.2917", "63.1723", "153.719")
POINTS = 32
MOST_SIGNS = 8  # beyond which a proof for each would take too long
Domain = set[tuple[tuple[sympy.Symbol, int], ...]]  # the signs of all variables, of which one is in the domain
_DECIMAL = re.compile(r"(\d+)\.(\d*)|\.(\d+)")
_CASE_SENSITIVE = ConversionConfig(lowercase_symbols=False)
_FLIPPED = {Eq: Eq, Gt: Lt, Lt: Gt, Ge: Le, Le: Ge}


class UnparsableError(ValueError):
    """The text is no expression that can be compared."""


def prepare() -> Callable[[dict[str, Any], list[bytes]], tuple[dict[str, Any], list[bytes]]]:
    """What answers requests, after the parser has built the tables that it builds on first use."""
    logging.disable(logging.CRITICAL)
    compare("x^{2}+\\sqrt{2}", "\\sqrt{2}+x^{2}")
    return _answer


def _answer(request: dict[str, Any], _: list[bytes]) -> tuple[dict[str, Any], list[bytes]]:
    started = time.process_time()
    try:
        reason = "correct" if compare(request["answer"], request["truth"]) else "wrong"
    except (UnparsableError, RecursionError, MemoryError):
        reason = "unparsable"
    return {"reason": reason, "cpu_s": time.process_time() - started}, []


# What sympy raises for expressions that it cannot handle.
_SYMPY_ERRORS = (
    ArithmeticError,
    AttributeError,
    NotImplementedError,  # for relations and functions too abstract to decide
    TypeError,
    ValueError,
    KeyError,
    IndexError,
)


def compare(answer: str, truth: str) -> bool:
    """Whether two normalised LaTeX expressions are equal; UnparsableError where one is none."""
    expected, given = _parse(truth), _parse(answer)
    if _is_relation(expected) != _is_relation(given):
        return False  # the answer to "what is x" is no equation, and "1+1=3" is not 3
    try:
        if _is_relation(expected):
            return _same_relation(expected, given)
        if isinstance(expected, sympy.Expr) and isinstance(given, sympy.Expr):
            # verify() compares a lone symbol with an expression by its name only, so 2x-x needs the second way.
            domain = _common_domain(expected, given)
            return domain is not None and (_verify(expected, given) or _is_zero(expected - given, domain))
        return _verify(expected, given)
    except _SYMPY_ERRORS as error:
        raise UnparsableError(str(error)) from error


def _is_zero(difference: sympy.Expr, domain: Domain) -> bool:
    r"""Also where it is so for these signs of the variables: `\sqrt{1/n}` is `1/\sqrt{n}` wherever both are real."""
    if any(sympy.simplify(form) == 0 for form in (difference, sympy.powsimp(difference, force=True))):
        return True
    signed = [{one: sign * sympy.Symbol(one.name, positive=True) for one, sign in signs} for signs in domain]
    return 0 < len(signed) <= MOST_SIGNS and all(sympy.simplify(difference.xreplace(one)) == 0 for one in signed)


def _verify(expected: Any, given: Any) -> bool:
    return bool(verify(expected, given, float_rounding=30, numeric_precision=30, timeout_seconds=None))


def _parse(text: str) -> Any:
    latex = _DECIMAL.sub(_as_fraction, text)
    try:
        value = latex2sympy(
            latex, is_real=True, convert_degrees=False, normalization_config=None, conversion_config=_CASE_SENSITIVE
        )
        if isinstance(value, (sympy.Basic, sympy.MatrixBase)):
            if value.has(sympy.Float, sympy.zoo, sympy.nan):
                raise UnparsableError("undefined or inexact")
            return value.subs(sympy.Symbol("i", real=True), sympy.I)
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # the parser raises plain Exception for whatever it does not understand
        raise UnparsableError(text) from error
    raise UnparsableError(text)


def _as_fraction(match: re.Match[str]) -> str:
    """A decimal as an exact fraction, because a float would bring a tolerance with it."""
    whole, digits = match[1] or "0", match[2] or match[3] or ""
    return rf"\frac{{{int(whole + digits)}}}{{{10 ** len(digits)}}}"


def _common_domain(left: sympy.Expr, right: sympy.Expr) -> Domain | None:
    r"""The signs of the variables for which both have a real value at some point, or None where the values differ.

    A value counts where no root or logarithm in it is complex: `\sqrt{x}\sqrt{y}` has none for negative x and y.
    """
    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    partial = [part for side in (left, right) for part in sympy.preorder_traversal(side) if _is_partial(part)]
    found = set()
    for number in range(POINTS if symbols else 1):
        signs = [(-1) ** (number >> index % 5) for index in range(len(symbols))]
        sizes = (sympy.Rational(SIZES[(number + index) % len(SIZES)]) for index in range(len(symbols)))
        point = {symbol: sign * size for symbol, sign, size in zip(symbols, signs, sizes, strict=True)}
        if symbols and not all(part.evalf(subs=point).is_real for part in partial):
            continue
        first, second = (side.subs(point).evalf(DIGITS) for side in (left, right))
        if not (_is_finite(first) and _is_finite(second)):
            continue
        if symbols and not (first.is_real and second.is_real):
            continue
        if sympy.Abs(first - second) > TOLERANCE * sympy.Max(sympy.Abs(first), sympy.Abs(second), TOLERANCE):
            return None
        found.add(tuple(zip(symbols, signs, strict=True)))
    return found


def _is_partial(part: sympy.Basic) -> bool:
    """Whether an expression has real values for a part of the real numbers only, as roots and logarithms."""
    return isinstance(part, sympy.Function) or bool(part.is_Pow and not part.exp.is_integer)


def _is_finite(value: sympy.Expr) -> bool:
    return bool(
        value.is_number and value.is_finite and all(part.is_Float or part.is_zero for part in value.as_real_imag())
    )


def _is_relation(value: Any) -> bool:
    return isinstance(value, (Relational, And))


def _same_relation(expected: Any, given: Any) -> bool:
    """Equal up to a constant factor and up to exchanging the sides; chains link by link."""
    if isinstance(expected, And) != isinstance(given, And):
        return False
    if isinstance(expected, And):
        ours, theirs = expected._unsorted_args, given._unsorted_args
        return len(ours) == len(theirs) and all(map(_same_relation, ours, theirs))
    if type(expected) not in _FLIPPED or type(given) not in _FLIPPED:
        return bool(expected == given)
    difference = sympy.simplify(given.lhs - given.rhs)
    if not difference.free_symbols:
        return False  # equations without variables, such as 5 = 3, are not compared
    factor = sympy.simplify((expected.lhs - expected.rhs) / difference)
    if not factor.is_number or factor.is_zero:
        return False
    if isinstance(expected, Eq):
        return isinstance(given, Eq)
    wanted = type(expected) if factor.is_positive else _FLIPPED[type(expected)]
    return isinstance(given, wanted)
