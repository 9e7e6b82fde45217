r"""Names on the left of an answer: `x = 5`, `\angle ABC = 40`, `\mu = 7`, `P(A \cap B) = 0.1`, `\cos B = 0.8`."""

from __future__ import annotations

import re
import unicodedata


def _command(letter: str) -> str:
    name = unicodedata.name(letter).rpartition(" ")[2].lower().replace("amda", "ambda")  # Unicode leaves out the b
    return rf"\{name.capitalize() if letter.isupper() else name} "


GREEK = {letter: _command(letter) for letter in "αβγδεζηθικλμνξοπρστυφχψωΓΔΘΛΞΠΣΦΨΩ"}

_END = r"(?![A-Za-z])"
_GREEK = rf"\\(?!pi{_END})(?:{'|'.join(command[1:-1] for command in GREEK.values())}|var[a-z]+|ell){_END}"
_ARGUMENT = r"\((?:[A-Za-z]|[0-9]{1,2})(?:, ?[A-Za-z])*\)"
# The value of a function: f(-1), but not x(-1), a product; P(A \cap B) and E[X], but not P(1 + r).
_VALUE = (
    r"[fghFGH]'*\((?:-?[0-9.]+|[fgh]\(-?[0-9.a-z]+\))\)|(?:[PEn]|\\Pr ?|\\mathbb\{[PE]\})[(\[]"
    r"(?:[A-Za-z0-9 ,'|=<>{}]|\\(?:cap|cup|mid|bar|overline|le|ge) ?)+[)\]]"
)
_MARK = r"\\(?:(?:measured)?angle|triangle|over(?:line|arc|rightarrow)|arc|widehat|hat|bar|tilde|vec|text)(?![A-Za-z])"
_SUBSCRIPT = r"_\{(?:\\[A-Za-z]+)?[0-9A-Za-z, {}+-]{0,20}\}"
_NAME = re.compile(
    rf"(?!.*\bnot\b)(?:\\(?:det|dim|min|max|lim){_END}(?:_\{{[^{{}}]*\}})? ?)?"
    rf"(?>{_GREEK}|{_VALUE}|{_ARGUMENT}|\\angle ?[0-9]{{1,2}}|{_MARK}"
    rf"|[A-Za-z]|{_SUBSCRIPT}|\{{(?:{_GREEK} ?|[A-Za-z .]{{1,40}})\}}|'| |\^\\cdot "
    r"|\|(?:\\(?:overline|vec|overrightarrow)\{)?(?:[A-Z]{2}|z)\}?\||\|\\vec\{[a-z]\}\||\\overset\{\\frown ?\}"
    rf"|\^\{{-1\}}{_ARGUMENT}){{1,60}}+|\\frac\{{d[A-Za-z]\}}\{{d[A-Za-z]\}}|\\chi ?\^\{{2\}}"
)
_FUNCTION = rf"\\(?:sin|cos|tan|sec|csc|cot){_END}"
_ANGLE = rf"[0-9]? ?(?:\\angle ?)?(?:[A-Z]{{1,3}}|[a-z]|{_GREEK}) ?"
_OF_AN_ANGLE = re.compile(rf"{_FUNCTION}(?:\^\{{[0-9]\}})? ?(?:{_ANGLE}|[({{]{_ANGLE}(?:[-+] ?{_ANGLE})*[)}}])")
_EQUALS = re.compile(r"=(?![^()]*\))")
_SYMBOL = re.compile(r"\\[A-Za-z]+|[A-Za-z]|[0-9]+")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z][a-z]{2}")
_ACCENT = re.compile(r"\\(?:bar|hat|tilde)|[{}']|\^\\cdot ?")


def is_name(text: str) -> bool:
    return len(text) <= 100 and _NAME.fullmatch(text) is not None


def detach_name(text: str) -> tuple[str, str, str]:
    r"""(value, name, equation) of `x = 5`, `AB = 5`, `x \in {1, 2}`, `A = \pi r^2 = 9\pi`, `x \approx 5.7`."""
    exact, approximately, decimal = text.partition("\\approx")
    if approximately:  # "4\sqrt{2} \approx 5.66" answers 4\sqrt{2}; "x \approx 5.66" answers 5.66
        named = not exact.strip() or is_name(exact) or _OF_AN_ANGLE.fullmatch(exact.strip())
        text = f"{exact}={decimal}" if named else exact
    left, *rest = _EQUALS.split(text)
    right = text[len(left) + 1 :]
    if rest and is_name(right) and not is_name(left):  # 5 = x
        return left.strip(), right.strip(), text
    # The value of \cos B is 0.8; an equation of \sin x and y is none of the one.
    for name, value in ((left, right), (right, left)):
        if _OF_AN_ANGLE.fullmatch(name.strip()) and not is_name(value):
            return value.strip(), name.strip(), text
    if rest and (not left.strip() or is_name(left)):
        return rest[-1].strip(), left.strip(), text if left.strip() else ""
    name, found, value = text.partition("\\in")
    if found and not value[:1].isalpha() and (not name.strip() or is_name(name)):  # \infty begins like \in
        return value.strip(), name.strip(), text if name.strip() else ""
    return text.strip(), "", ""


def are_rivals(one: str, other: str) -> bool:
    r"""Whether two names cannot name one thing: x and y, x_1 and x_2, \sin B and \cos B, \sin B and B. Names of other
    forms can, such as AB and x; so can AB and BA, and words."""
    ours, theirs = _SYMBOL.findall(one), _SYMBOL.findall(other)
    if not (ours and theirs) or _WORD.search(one):
        return False
    if (re.match(_FUNCTION, one) is None) != (re.match(_FUNCTION, other) is None) or ("(" in one and "(" in other):
        return one != other
    if _ACCENT.sub("", one) == _ACCENT.sub("", other):  # the mean of x is not x
        return one != other
    theirs_back = [s for s in theirs if len(s) > 1] + [s for s in theirs[::-1] if len(s) == 1]
    return _SYMBOL.sub(".", one) == _SYMBOL.sub(".", other) and ours not in (theirs, theirs_back)
