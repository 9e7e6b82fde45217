r"""Decides which normalised answers may be evaluated symbolically: short ones, of known commands, without huge powers.

These checks refuse most hostile input at little cost; the time limit of `symbolic` holds for the rest.
"""

from __future__ import annotations

import re

MAX_SYMBOLIC_CHARS = 300
MAX_DIGITS = 50  # in one number
MAX_EXPONENT = 1000
MAX_EXPONENT_PRODUCT = 10_000  # over the whole text, against ((9^{99})^{99})^{99}
MAX_FACTORIAL = 30
MAX_BINOMIAL = 100

# Commands that state a value. Those that pose a problem (\int, \sum, \lim, \det) are no answers, and cost time.
_COMMANDS = re.compile(
    r"frac|sqrt|pi|cdot|pm|sin|cos|tan|sec|csc|cot|arcsin|arccos|arctan|sinh|cosh|tanh|ln|log|exp|infty|cup|cap|"
    r"alpha|beta|gamma|delta|theta|lambda|mu|phi|omega|le|ge|lt|gt|ne|lfloor|rfloor|lceil|rceil|lvert|rvert|"
    r"binom|mathbb|emptyset|varnothing|setminus|[{}\\]"
)
_COMMAND = re.compile(r"\\([A-Za-z]+|.?)", re.DOTALL)
_CHARACTERS = re.compile(r"[A-Za-z0-9\\{}()\[\]^_+\-/=<>.,!|&: ]+")
# No algebra: words, E notation, point names such as ABC (where the order matters), numbers side by side, 1.2.3, 9!!.
_NOT_ALGEBRA = re.compile(
    r"[A-Za-z]{4}|[A-Z]{2}|[0-9]_|[0-9]\.?[eE][+-]?[0-9]|[0-9] [0-9]|:.*:|\.[0-9]*\.|!\s*!|[})\]!]!"
)
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{[pb]matrix\}|\\mathbb\{[A-Z]\}")
_EXPONENT = re.compile(r"\^(\{)?")
_INTEGER = re.compile(r"[0-9]+")
_BINOMIAL = re.compile(r"\\binom\{([^{}]*)\}\{([^{}]*)\}")
_FACTORIAL = re.compile(r"([0-9]+)!")


def refusal(text: str) -> str:
    """Why a normalised text must not be evaluated; "" if it may be."""
    if len(text) > MAX_SYMBOLIC_CHARS:
        return f"longer than {MAX_SYMBOLIC_CHARS} characters"
    if not _CHARACTERS.fullmatch(text):
        return "empty, or a character that no expression has"
    bare = _ENVIRONMENT.sub(" ", text)
    for command in _COMMAND.findall(bare):
        if not _COMMANDS.fullmatch(command):
            return f"command \\{command}"
    if _NOT_ALGEBRA.search(_COMMAND.sub(";", bare)):
        return "words, point names or numbers side by side"
    if any(len(digits) > MAX_DIGITS for digits in _INTEGER.findall(text)):
        return f"a number of more than {MAX_DIGITS} digits"
    return _large_value(text)


def _large_value(text: str) -> str:
    """Why evaluating a text would take too long; "" if it would not."""
    product = 1
    for match in _EXPONENT.finditer(text):
        exponent = _group(text, match.end()) if match[1] else text[match.end() : match.end() + 1]
        after = match.end() + len(exponent) + bool(match[1])
        numbers = [int(digits) for digits in _INTEGER.findall(exponent)]
        if text.startswith("^", after) or ("^" in exponent and numbers and not _is_variable_power(exponent)):
            return "a tower of powers"
        if "!" in exponent or "binom" in exponent:
            return "a factorial in an exponent"
        if any(number > MAX_EXPONENT for number in numbers):
            return f"an exponent above {MAX_EXPONENT}"
        for number in numbers:
            product *= max(1, number)
    if product > MAX_EXPONENT_PRODUCT:
        return "powers of powers"
    if any(int(number) > MAX_FACTORIAL for number in _FACTORIAL.findall(text)):
        return f"a factorial above {MAX_FACTORIAL}"
    if "\\binom" in text:
        arguments = [number for pair in _BINOMIAL.findall(text) for number in pair]
        if len(arguments) != 2 * text.count("\\binom") or any(
            not number.isdigit() or int(number) > MAX_BINOMIAL for number in arguments
        ):
            return f"a binomial beyond {MAX_BINOMIAL}"
    return ""


def _is_variable_power(exponent: str) -> bool:
    """e^{-x^{2}} is fine, 9^{9^{9}} is not: every inner power has a variable as its base and a number above."""
    return re.search(r"(?<![A-Za-z])[A-Za-z]\^\{[0-9]\}", exponent) is not None and exponent.count("^") == 1


def _group(text: str, start: int) -> str:
    """The content of a brace group that opened just before `start`."""
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position]
    return text[start:]
