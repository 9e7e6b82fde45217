"""Which normalised answers may be evaluated symbolically: short ones, of known commands, without huge powers.

This rejects most hostile input at little cost; the time limit of `symbolic` holds for the rest.
"""

from __future__ import annotations

import re

MAX_SYMBOLIC_CHARS = 300
MAX_DIGITS = 50  # in one number

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
    r"[A-Za-z]{4}|[A-Z]{2}|[0-9]_|[0-9]\.?[eE][+-]?[0-9]|[0-9]\.? [0-9]|:.*:|\.[0-9]*\.|!\s*!|[})\]!]!"
)
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{[pb]matrix\}|\\mathbb\{[A-Z]\}")
_INTEGER = re.compile(r"[0-9]+")
# What takes longest: a tower of powers of numbers, a factorial in an exponent, an exponent or a binomial of four
# digits, a factorial of three.
_LARGE = re.compile(r"\^\{[^{}]*(?:[0-9]\}?\^|!|\\binom|[0-9]{4})|\\binom\{[0-9]{4}|[0-9]{3}!")


def why_not_evaluated(text: str) -> str:
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
    return "a value that takes too long" if _LARGE.search(text) else ""
