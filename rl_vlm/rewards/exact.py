r"""Exact values rational · √integer · π^integer, without a computer algebra system.

Nearly every answer to a geometry question has this form (`12`, `0.5`, `\frac{3}{4}`, `4\sqrt{2}`, `9\pi`), and two
such values compare in microseconds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from math import isqrt

_MAX_BITS = 16_384  # of the square of a value
_MAX_EXPONENT = 64
_MIXED = re.compile(r"(\d+)\\frac\{(\d+)\}\{(\d+)\}")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\{(\d+)\}")
_NUMBER = re.compile(r"\d+(?:\.\d*)?|\.\d+")
_SCIENTIFIC = re.compile(r"([-+]?\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})")
_POWER = re.compile(r"\^\{(-?\d{1,2})\}")


class NotExactError(ValueError):
    """The text is not of the form rational · √integer · π^integer, or its numbers are too large."""


@dataclass(frozen=True, slots=True)
class Monomial:
    """A value √rational · π^pi_power of either sign, as its square with that sign, so that equal values are equal
    objects."""

    square: Fraction
    pi_power: int = 0

    @classmethod
    def of(cls, rational: Fraction | int) -> Monomial:
        value = Fraction(rational)
        return cls(value * abs(value))

    def times(self, other: Monomial) -> Monomial:
        square = self.square * other.square
        if max(square.numerator.bit_length(), square.denominator.bit_length()) > _MAX_BITS:
            raise NotExactError("too large")
        return Monomial(square, self.pi_power + other.pi_power if square else 0)

    def inverse(self) -> Monomial:
        """One over the value; NotExactError for zero."""
        if not self.square:
            raise NotExactError("division by zero")
        return Monomial(1 / self.square, -self.pi_power)

    def root(self) -> Monomial:
        """The square root of a non-negative rational."""
        ratio = self.square.as_integer_ratio()
        if self.pi_power or self.square < 0 or any(isqrt(number) ** 2 != number for number in ratio):
            raise NotExactError("root of something that is not a rational")
        return Monomial(Fraction(*map(isqrt, ratio)))

    def power(self, exponent: int) -> Monomial:
        if abs(exponent) > _MAX_EXPONENT:
            raise NotExactError("large exponent")
        base = self if exponent >= 0 else self.inverse()
        return reduce(Monomial.times, [base] * abs(exponent), Monomial.of(1))


def parse_monomial(text: str) -> Monomial | None:
    r"""Read normalised LaTeX; None where it is anything but one exact product, or where the reading is ambiguous."""
    try:
        if match := _SCIENTIFIC.fullmatch(text):
            return Monomial.of(Fraction(match[1])).times(Monomial.of(Fraction(10) ** int(match[2])))
        reader = _Reader(text)
        value = reader.product()
        return value if reader.position == len(text) else None
    except NotExactError:
        return None


class _Reader:
    """Recursive descent; the caller bounds the nesting of the text."""

    def __init__(self, text: str) -> None:
        self.text, self.position = text, 0

    def product(self) -> Monomial:
        value = self.factor()
        divided = False
        while self.position < len(self.text):
            if self.take("\\cdot"):
                self.take(" ")
                value = value.times(self.factor())
            elif self.take("/"):
                value = value.times(self.factor().inverse())
                divided = True
            elif self.text[self.position] in "\\({" and not self.text.startswith("\\}", self.position):
                if divided:
                    raise NotExactError("1/2\\pi can be read in two ways")
                value = value.times(self.power())
            else:
                break
        return value

    def factor(self) -> Monomial:
        sign = 1
        while self.text.startswith(("-", "+"), self.position):
            sign *= -1 if self.text[self.position] == "-" else 1
            self.position += 1
        return self.power().times(Monomial.of(sign))

    def power(self) -> Monomial:
        base = self.atom()
        if match := _POWER.match(self.text, self.position):
            self.position = match.end()
            return base.power(int(match[1]))
        return base

    def atom(self) -> Monomial:
        if match := _MIXED.match(self.text, self.position):
            whole, above, below = (int(group) for group in match.groups())
            if not 0 < above < below:  # 2\frac{3}{2} may be a product or a mixed number
                raise NotExactError("ambiguous mixed number")
            self.position = match.end()
            return Monomial.of(whole + Fraction(above, below))
        if match := _REPEATING.match(self.text, self.position):
            self.position = match.end()
            return Monomial.of(_repeating(*match.groups()))
        if match := _NUMBER.match(self.text, self.position):
            self.position = match.end()
            return Monomial.of(Fraction(match[0]))
        if self.take("\\frac"):
            return self.group("{", "}").times(self.group("{", "}").inverse())
        if self.take("\\sqrt"):
            return self.group("{", "}").root()
        if self.take("\\pi"):
            return Monomial(Fraction(1), 1)
        return self.group("(", ")") if self.text.startswith("(", self.position) else self.group("{", "}")

    def group(self, opening: str, closing: str) -> Monomial:
        self.expect(opening)
        value = self.product()
        self.expect(closing)
        return value

    def take(self, token: str) -> bool:
        found = self.text.startswith(token, self.position)
        self.position += len(token) * found
        return found

    def expect(self, token: str) -> None:
        if not self.take(token):
            raise NotExactError(f"{token} expected")


def _repeating(whole: str, fixed: str, cycle: str) -> Fraction:
    start = Fraction(int((whole or "0") + fixed), 10 ** len(fixed))
    return start + Fraction(int(cycle), (10 ** len(cycle) - 1) * 10 ** len(fixed))
