r"""Normalises the spelling of answers: spacing, fractions, roots, units, degrees, percent, names such as `x=`.

`normalize_answer` gives one canonical text. `read_answer` keeps the structure as well (tuple, list, set) and what the
text loses (name, unit, percent sign). Nothing here evaluates anything.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, replace
from typing import Literal

from rl_vlm.rewards.names import GREEK, detach_name
from rl_vlm.rewards.units import detach_unit

MAX_CHARS = 1000  # longer texts are no answers and are left as they are
MAX_NESTING = 20  # braces, brackets and parentheses inside each other

# Every fraction of one character (⅓) is two numbers.
_FRACTIONS = {
    letter: "\\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", letter).split("⁄"))
    for letter in "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞↉"
}
_UNICODE = str.maketrans(
    {
        **dict.fromkeys("−–—‐‑－", "-"), **dict.fromkeys("\xa0\u2009\u202f\u200b\u3000", " "),
        **dict.fromkeys("°º˚∘ᵒ", r"^\circ "), **dict.fromkeys("≤⩽", r"\le "), **dict.fromkeys("≥⩾", r"\ge "), **GREEK,
        **_FRACTIONS, **dict.fromkeys("×·⋅", r"\cdot "), **dict.fromkeys("÷⁄∕", "/"), "∞": r"\infty ", "√": r"\sqrt ",
        "∛": r"\sqrt[3]", "∜": r"\sqrt[4]", "≠": r"\ne ", "≈": r"\approx ", "±": r"\pm ", "∠": r"\angle ",
        "∪": r"\cup ", "∩": r"\cap ", **dict(zip("％＝，．（）", "%=,.()", strict=True)),
    }
)  # fmt: skip
# A raised 0 behind a number is how some write a degree sign; a power of 0 has no use there.
_RAISED_DEGREE = re.compile("(?<=[0-9])⁰(?![⁰¹²³⁴⁵⁶⁷⁸⁹])")
_RAISED, _LOWERED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿˣ", "₀₁₂₃₄₅₆₇₈₉ₐₑₘₙₓ"
_PLAIN = str.maketrans(_RAISED + _LOWERED, "0123456789+-nx" + "0123456789aemnx")
_SMALL_FRACTION = re.compile(f"([{_RAISED[:10]}]+)⁄([{_LOWERED[:10]}]+)")
_RAISED_RUN, _LOWERED_RUN = re.compile(f"[{_RAISED}]+"), re.compile(f"[{_LOWERED}]+")
_EMPHASIS = re.compile(r"(?s)(\*{1,3}|_{1,2}|`+)(?!\1)(.+)(?<![*_`])\1")
_END = r"(?![A-Za-z])"
_FUNCTIONS = "sin|cos|tan|sec|csc|cot|arcsin|arccos|arctan|ln|log|exp"
_TEXT = r"\\(?:text(?:bf|it|rm|normal|sf|tt|sl|sc|up|md)?|emph|mathrm|[mh]box)"
_IN_TEXT = rf"{_TEXT} ?\{{[\^ ]*\\circ ?\}}"
_CIRCLE = rf"(?:\\(?:circ|(?:text)?degrees?){_END}|{_IN_TEXT})"
_O = rf"(?:{_TEXT} ?\{{ ?o ?\}}|o{_END})"
# Spellings of textbooks and models, replaced in this order, in text whose whitespace is single spaces.
_REWRITES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<=[0-9])(?<![0-9]{4})(?:\\[,;:! ] ?|\{,\}|~| )(?=[0-9]{3}(?![0-9]))", ""),  # 1\,000, 1{,}000, 1 000
        (r"(?<!\\)\\[()\[\]$!]|\$|(?<!\\)\\$", ""),
        (rf"\\(?:tiny|small|normalsize|[lL]arge|LARGE|[hH]uge|bf|it|rm|tt|sf|sl|sc|em|bfseries|boldmath){_END} ?", ""),
        (r"\{,\}", ","),
        (r"(?<![0-9.^{/])([0-9]+) ([0-9]+) ?/ ?([0-9]+)(?![0-9])", r"\1\\frac{\2}{\3}"),  # 2 3/4
        (rf"(?<!\\)\\[,;:> ]|~|\\(?:quad|qquad|thinspace|displaystyle|textstyle|limits){_END}", " "),
        (rf"\\(?:m?left|m?right|[bB]igg?[lrm]?){_END} ?", ""),
        (r"\\(?:math(?:bf|it|sf|tt|normal)|boldsymbol|bm|pmb|underline|framebox) ?\{([^{}]*)\}", r"\1"),
        (rf"\\[dtc](frac|binom){_END}", r"\\\1"),
        (r"\\root ?\{? ?([0-9A-Za-z]+) ?\}? ?\\of ?", r"\\sqrt[\1]"),
        (r"\\pmatrix ?\{((?:[^{}]|\{[^{}]*\})*)\}", r"\\begin{pmatrix}\1\\end{pmatrix}"),
        (rf"\\cr{_END} ?", r"\\\\"),
        (r"\\(?:mathrm|operatorname\*?|text) ?\{ ?(\\[A-Za-z]+|[ei]) ?\}", r"\1 "),
        (rf"\\(?:mathrm|operatorname\*?) ?\{{ ?({_FUNCTIONS}) ?\}}", r"\\\1 "),
        (r"\*\*|\\textsuperscript", "^"),
        (r"\^ ?(?:\\prime|\{ ?\\prime ?\})", "'"),
        (rf"\\[lr]vert{_END} ?", "|"),
        (r"(?<!\\)\{ ?(\{[^{}]*\}) ?\}", r"\1"),
        (r"\\ang ?\{([0-9.]+)\}", r"\1^\\circ "),
        (rf"\\times{_END}|\*|(?<=[0-9]) [xX] (?=[0-9])", r"\\cdot "),
        (rf"\\div{_END} ?", "/"),
        (rf"\\leq{_END}|<=", r"\\le "),
        (rf"\\geq{_END}|>=", r"\\ge "),
        (rf"\\neq{_END}|!=", r"\\ne "),
        (rf"\\lbrace{_END}", r"\\{"),
        (rf"\\rbrace{_END}", r"\\}"),
        (
            rf"(?:\{{\}} ?)?(?:\^ ?)+(?:{_CIRCLE}|\{{[\^ ]*{_CIRCLE} ?\}})|{_IN_TEXT}|\{{ ?\^ ?{_CIRCLE} ?\}}"
            rf"|\\(?:text)?degrees?{_END}|(?<=[0-9}}]) ?\^ ?(?:{_O}|\{{ ?{_O} ?\}})"
            rf"|(?<=[0-9]) ?\\(?:circ|deg){_END}(?! ?[^ .,)\]])",
            r"^\\circ ",
        ),
        (rf",?(?:{_TEXT} ?\{{ ?(?:and|or) ?\}}| (?:and|or) )", ", "),
        (rf"{_TEXT} ?\{{", r"\\text{"),
        (rf"(?<![A-Za-z\\])(sqrt|pi|{_FUNCTIONS}|theta){_END}", r"\\\1"),
        # TeX takes the next token as the argument: \frac12, \sqrt2. After ^ the whole number is meant.
        (r"\\(frac|binom) ?([0-9A-Za-z]) ?([0-9A-Za-z])", r"\\\1{\2}{\3}"),
        (r"\\(frac|binom) ?([0-9A-Za-z]) ?\{", r"\\\1{\2}{"),
        (r"\\(frac|binom) ?(\{[^{}]*\}) ?([0-9A-Za-z])", r"\\\1\2{\3}"),
        (r"\\sqrt ?\(([^()]*)\)", r"\\sqrt{\1}"),
        (
            r"\\sqrt(\[[0-9A-Za-z]+\])? ?([1-9][0-9]{0,2}(?:,[0-9]{3})+(?!,?[0-9]|[^(\[]*[)\]])(?:\.[0-9]+)?"
            r"|[0-9]+(?:\.[0-9]+)?|\.[0-9]+|[A-Za-z])",
            r"\\sqrt\1{\2}",
        ),
        (r"\^ ?\(([^()]*)\)", r"^{\1}"),
        (r"\^ ?(-?[0-9]+(?:\.[0-9]+)?|[A-Za-z])", r"^{\1}"),
        (r"_ ?([0-9A-Za-z])", r"_{\1}"),
        (r"(?<![0-9])\.(?=[0-9])", "0."),
        (r" +", " "),
    )
)
_TRIGONOMETRY = re.compile(rf"\\(?:sin|cos|tan|sec|csc|cot){_END}")
_DEGREES_INSIDE = re.compile(r"([0-9.]+) ?\^\\circ ?")
_SPACES = re.compile(r"(\\[A-Za-z]+) (?=[A-Za-z])|([0-9.]) (?=[0-9.])| ")
_THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9])")
_TUPLE = re.compile(r"\(|(?<!\\sqrt)\[|\\\{")
_BRACKETS = re.compile(r"\\\\|\\[{}]|[(){}\[\],;]")
_OPENING, _CLOSING = ("(", "[", "{", "\\{"), (")", "]", "}", "\\}")
_WHOLE_TEXT = re.compile(r"\\text\{(?P<content>[^{}]*)\}(?P<power>\^\{[23]\})?")
_COUNTED = re.compile(r"(?P<number>-?[0-9][0-9.,/]*) (?P<thing>[A-Za-z]{2}[A-Za-z ./]*)")
# {3 \\over 4} and {5 \\choose 2} of plain TeX, whose parts reach to the ends of their group.
_INNER = r"(?:[^][(){}]|[({[](?:[^][(){}]|[({[][^][(){}]*[])}])*[])}])*"
_PART = rf"(?:(?!\\(?:over|choose|text){_END})[^][(){{}},;=<>]|[({{[]{_INNER}[])}}])*+"
_INFIX = re.compile(rf"({_PART})\\(over|choose){_END}({_PART})(?!\\)")
# 2{\frac{1}{3}} is a mixed number, and 2\binom{5}{2} none, which the parser takes for one.
_MIXED, _FACTOR = re.compile(r"(?<=[0-9]) ?\{(\\frac\{[0-9]+\}\{[0-9]+\})\}"), re.compile(r"(?<=[0-9])(\{?\\binom)")
# 2/3\pi, 1/2\sqrt{3}, 2/3x: not after a function, as in \sin2/3x, nor before a mixed number or an exponent of ten.
_QUOTIENT_BEFORE_FACTOR = re.compile(
    r"(?:(?<![0-9.A-Za-z/}])|(?<=\\cdot))([0-9]+(?:\.[0-9]+)?)/([0-9]+(?:\.[0-9]+)?)"
    r"(?=\\(?!frac)[A-Za-z]|(?![eE][-+]?[0-9])[A-Za-z(])"
)
_EITHER = re.compile(rf"{_TEXT} ?\{{ ?or ?\}}| or ")
_LINE_BREAKS = re.compile(r"(?: ?\\\\)+[ .,;:]*$")


@dataclass(frozen=True, slots=True)
class AnswerTree:
    r"""One answer, read. A leaf has `text`; a tuple, list or set has `items` and its brackets ("" for a bare list).

    `equation` is the leaf with its name (`y=2x+1` where text is `2x+1`). `order`: whether it counts: "any" for sets,
    for values joined by "or" and for several values of one name, "both" for `\pm`, which has none.
    """

    text: str = ""
    items: tuple[AnswerTree, ...] = ()
    opening: str = ""
    closing: str = ""
    name: str = ""
    equation: str = ""
    unit: str = ""
    percent: bool = False
    order: Literal["", "any", "both"] = ""

    def __str__(self) -> str:
        return f"{self.opening}{','.join(map(str, self.items))}{self.closing}" if self.items else self.text


def normalize_answer(text: str) -> str:
    r"""`\dfrac12 \text{ cm}.` becomes `\frac{1}{2}`; texts beyond MAX_CHARS or MAX_NESTING are only stripped."""
    return text.strip() if is_oversized(text) else str(read_answer(text))


def is_oversized(text: str) -> bool:
    return len(text) > MAX_CHARS or nesting(text) > MAX_NESTING


def nesting(text: str) -> int:
    """The greatest depth of brackets of any kind."""
    depth = deepest = 0
    for char in text:
        depth = max(0, depth + (char in "([{") - (char in ")]}"))
        deepest = max(deepest, depth)
    return deepest


def read_answer(text: str) -> AnswerTree:
    """Read an answer; the caller has checked that it is not oversized."""
    if emphasised := _EMPHASIS.fullmatch(text.strip()):
        text = emphasised[2]
    text = _SMALL_FRACTION.sub(lambda small: rf"\frac{{{small[1]}}}{{{small[2]}}}".translate(_PLAIN), text)
    text = _RAISED_RUN.sub(r"^{\g<0>}", _RAISED_DEGREE.sub("°", text))
    text = _LOWERED_RUN.sub(r"_{\g<0>}", text).translate(_PLAIN)
    text = _LINE_BREAKS.sub("", " ".join(text.translate(_UNICODE).split()))
    either = _EITHER.search(text) is not None
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    if _TRIGONOMETRY.search(text):  # elsewhere the degree sign is a unit; here it changes the value
        text = _DEGREES_INSIDE.sub(r"(\\frac{\1\\pi }{180})", text)
    text = text.strip(" .,;:")
    while ("\\over" in text or "\\choose" in text) and (infix := _INFIX.search(text)):
        prefix = f"\\{'frac' if infix[2] == 'over' else 'binom'}{{{infix[1].strip()}}}{{{infix[3].strip()}}}"
        text = text[: infix.start()] + prefix + text[infix.end() :]
    text = _FACTOR.sub(r"\\cdot\1", _MIXED.sub(r"\1", text))
    if not _TUPLE.search(text):  # (1,234) is a point, 1,234 is a number
        text = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    answer = _read_list(_without_text(text))
    names = {item.name for item in answer.items}
    alternatives = answer.items and not answer.opening and (either or (len(names) == 1 and "" not in names))
    return replace(answer, order="any") if alternatives else answer


def _read_list(text: str) -> AnswerTree:
    parts = _split(text)
    return AnswerTree(items=tuple(map(_read_item, parts))) if len(parts) > 1 else _read_item(text)


def _read_item(text: str) -> AnswerTree:
    text, name, equation = detach_name(_without_text(text.strip(" .;:")))
    if _enclosing(text) == ("{", "}") and len(_split(text[1:-1])) == 1:
        text = text[1:-1].strip()
    measured = detach_unit(_without_text(text))
    body = _without_text(measured.text.strip())
    opening = closing = ""
    while (pair := _enclosing(body)) is not None:
        inside = body[len(pair[0]) : len(body) - len(pair[1])].strip()
        if pair[0] == "\\{" or len(_split(inside)) > 1:
            opening, closing = pair
            break
        if pair not in (("(", ")"), ("{", "}")):
            break
        body = inside
    if opening and opening != "{":
        items = tuple(_read_item(part) for part in _split(inside))
        return AnswerTree(
            items=items, opening=opening, closing=closing, name=name, order="any" if opening == "\\{" else ""
        )
    if opening:
        return AnswerTree(items=_read_list(inside).items, name=name)
    if body.count("\\pm") == 1 and nesting(body.partition("\\pm")[0]) == 0:
        both = tuple(_read_item(body.replace("\\pm", sign).lstrip(" +")) for sign in "+-")
        return AnswerTree(items=both, name=name, order="both")
    return AnswerTree(
        text=_left_to_right(_squeeze(body).removeprefix("+")),
        name=_squeeze(name),
        equation=_left_to_right(_squeeze(equation)),
        unit=measured.unit,
        percent=measured.percent,
    )


def _without_text(text: str) -> str:
    r"""The content of a `\text{}` around a whole answer: `12 cm`; of `\text{3 apples}` it is `3\text{ apples}`."""
    whole = _WHOLE_TEXT.fullmatch(text)
    if whole is None:
        return text
    content = whole["content"].strip()
    if not whole["power"] and (counted := _COUNTED.fullmatch(content)):
        return f"{counted['number']}\\text{{ {counted['thing']}}}"
    return content + (whole["power"] or "")


def _split(text: str) -> list[str]:
    """Split at the commas and semicolons that are outside all brackets."""
    parts, depth, start = [], 0, 0
    for match in _BRACKETS.finditer(text):
        if match[0] in _OPENING:
            depth += 1
        elif match[0] in _CLOSING:
            depth -= 1
        elif match[0] in ",;" and depth == 0:
            parts.append(text[start : match.start()])
            start = match.end()
    parts.append(text[start:])
    return [part for part in parts if part.strip()] or [""]


def _enclosing(text: str) -> tuple[str, str] | None:
    """The bracket pair around the whole text, if there is one; half-open intervals count."""
    depth = 0
    opening = ""
    for match in _BRACKETS.finditer(text):
        if match[0] in _OPENING:
            if match.start() == 0:
                opening = match[0]
            depth += 1
        elif match[0] in _CLOSING:
            depth -= 1
            if depth == 0:
                return (opening, match[0]) if opening and match.end() == len(text) else None
        if not opening:
            return None
    return None


def _left_to_right(text: str) -> str:
    r"""`2/3\pi` as `\frac{2}{3}\pi`: quotients and products of one line are read as they are written."""
    return _QUOTIENT_BEFORE_FACTOR.sub(r"\\frac{\1}{\2}", text)


def _squeeze(text: str) -> str:
    r"""Remove all spaces but the one in `\pi r` and the one between the numbers `2 3`."""
    return _SPACES.sub(lambda match: f"{match[1] or match[2]} " if match[1] or match[2] else "", text.strip())
