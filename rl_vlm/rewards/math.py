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

from rl_vlm.rewards.exact import Monomial, parse_monomial
from rl_vlm.rewards.normalize import MAX_CHARS, AnswerTree, is_oversized, read_answer
from rl_vlm.rewards.symbolic import CPU_S, WORKER, Reason
from rl_vlm.rewards.units import units_clash
from rl_vlm.safe_text import without_thoughts

# One left-to-right scan over these tokens keeps the cost linear: no token contains another, and none backtracks
# over more than a few characters. `\\.` comes after the box so that `\{` and `\}` are not counted as braces; a doubled
# backslash before the box is accepted, because models over-escape.
_TOKEN = re.compile(
    r"(?P<box>\\{1,2}(?:boxed|fbox)(?![A-Za-z])(?:\s*(?P<brace>\{))?)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL
)
# What may follow an unbraced `\boxed`: only things that start like a number, so that the prose "use \boxed to
# answer" holds no answer.
_UNBRACED = re.compile(r"[ \t]*([-+]?(?:\.?[0-9]|\\(?:[dtc]?frac|sqrt|pi)(?![A-Za-z]))[^\s$]{0,200})")
_TRAILING = ".,;:!?"


def extract_boxed(text: str) -> str | None:
    r"""The content of the last box with balanced braces, or None.

    A box that never closes and a box with nothing in it hold no answer, so an earlier box counts instead. Of nested
    boxes the inner one is the last. Time and memory are linear in the length of the text.
    """
    stack: list[int] = []  # for every open brace: where its box's content starts, or -1 for a plain brace
    best_start, best_content = -1, ""
    for token in _TOKEN.finditer(text):
        if token["close"]:
            start = stack.pop() if stack else -1
            if start > best_start and (content := text[start : token.start()].strip()):
                best_start, best_content = start, content
        elif token["open"]:
            stack.append(-1)
        elif token["brace"]:
            stack.append(token.end())
        elif token["box"] and (argument := _UNBRACED.match(text, token.end())):
            best_start, best_content = token.end(), argument[1].rstrip(_TRAILING)
    return best_content if best_start >= 0 else None


# How data sets wrap a truth: marked as the answer at the end of a solution, or in marks of text or of a list.
_TRUTH_TAG = re.compile(r"(?i)(?:<\|?(?:answer|begin_of_box)\|?>|\[answer\])([^<>]*?)(?=<|\[/answer\]|\Z)")
_TRUTH_MARK = re.compile(
    r"####|\\text\{\s*answer\s*:\s*\}|\b(?:answer|ans|solution|result|option|choice)(?:\*\*)?(?: is)?\s*"
    r"(?:[-=]>|[:：=→])|\banswer is\b|\bans\.|\bans(?:wer)?\b(?=\s*[-+.$\\\d])|答案?(?:\s*[:：]|[为是])|"
    r"\b(?:option|choice|choose)\b(?: is)?(?=\s*\(?[A-J]\)?$)",
    re.IGNORECASE,
)
_QUOTED_TRUTH = re.compile(  # the last group that took part is the value
    r"""(?s)(\*{1,3}|_{1,2}|`+)(.+)\1|\[?(?:(["'])([^"']+)\3|“([^”]+)”|‘([^’]+)’|«([^»]+)»)\]?|"""
    r"""<(\w+)>([^<>]*)</\8>|\{\s*(?:["']\w+["']|\w{3,})\s*:\s*["']?([^:{},"']+)["']?\}"""
)
# What no bare value holds, a kind a line: marks that did not come off, a key or an option's letter, a number of a list,
# what follows a number, sentences, layout, values of a program, signs, and what stands for no value.
_NOT_BARE = re.compile(
    r"""(?<![\d'])["“”„«»`] | </\w+> | <(?:\||[A-Za-z]{2,})[^<>]*> | \[/\w+\] | \\(?:boxed|fbox) | &\w+; | ^&
    | (?<!\{)[^\W\d_]["')}*]*\s*(?:： | :\s+\S | :\s*[-\d"'{\[\\$]) | ^\(?[A-J][).]\s+(?![A-Z]\.)\S
    | ^\(?\d{1,2}[).]\s+\S | ^(?:[•∴⇒→] | =>) | →\s*-?\d+$
    | \d\s+\((?:[A-J]\) | [A-Za-z]{2,}) | \d\s+\[ | \s\# | %%
    | (?:\b(?:[Ii]s|are|was|equals|about|approximately) | 's)\s+[-+$\\(]*\d
    | ^(?:[Tt]herefore|[Tt]hus|[Hh]ence|[Ss]o)[\s,] | ^[所故因]
    | \\(?:(?:text)?color | tag | label | checkmark | therefore | begin\{(?:align|equation|gather)) | \\n(?![A-Za-z])
    | \b(?:np\.\w+ | tensor | array | Decimal | Fraction)\( | ^b'
    | [\u2600-\u27bf\U0001f000-\U0001faff] | ^(?:nan | NaN | None | null | N/A)$""",
    re.VERBOSE,
)
_TEXT_COMMAND = re.compile(r"\\(?:text\w*|math\w*|[mh]box) ?\{([^{}]*)\}(?:\\[ ,;])?")
_RATIO = re.compile(r"[^:=]+:[^:=]+=[^:=]+:[^:=]+")  # AB : CD = 3 : 4
_INTERVAL = re.compile(r"[\[\]()][^()\[\]]+,[^()\[\]]+[\[\]()]")  # also ]2, 5]
_RANGE = re.compile(r"(?P<dash>[0-9.]+(?: ?[-–] ?[0-9.]+)+)|.*(?:±|\\pm) ?[0-9]*\.[0-9]+")  # or a date, a tolerance
_BOXES = re.compile(r"\\(?:boxed|fbox)\{[^{}]*\}\$?\s*(?:,|;|and|or)\s*\$?\\(?:boxed|fbox)")  # one of them is no answer


def bare_truth(text: str) -> str:
    r"""The value of a truth as data sets store it: `145` of `<answer> 145 </answer>`, `\boxed{145}`, `#### 145`,
    `Answer: 145`, `**145**`, `['145']` and `{"answer": 145}`. A text without such marks is the value itself."""
    for _ in range(4):  # such as a box in a tag in bold type
        text = text.strip(" \t\n\r\ufeff。")
        tagged, marked = _TRUTH_TAG.findall(text), _TRUTH_MARK.split(text.rpartition("\n")[2])
        if _BOXES.search(text):
            break
        if (boxed := extract_boxed(text)) is not None:
            text = boxed
        elif tagged:
            text = tagged[-1]
        elif quoted := _QUOTED_TRUTH.fullmatch(text):
            text = next((group for group in reversed(quoted.groups()) if group), "")
        elif len(marked) > 1:
            text = marked[-1].strip().strip("*").rstrip("*.")
        else:
            break
    return text.strip()


def is_bare(truth: str) -> bool:
    """Whether a truth can be what a policy answers: one short line with its brackets closed, and no wrapping left."""
    opened, closed = (sum(map(truth.count, brackets)) for brackets in ("([{", ")]}"))
    truth = _TEXT_COMMAND.sub(r"\1 ", truth)
    short = bool(truth) and "\n" not in truth and not is_oversized(truth)
    whole = opened == closed or bool(_INTERVAL.fullmatch(truth))
    return short and whole and bool(_RATIO.fullmatch(truth) or not _NOT_BARE.search(truth))


def is_value(truth: str) -> bool:
    """Whether a bare truth with a digit in it holds numbers and expressions alone, as opposed to `It comes to 5`."""
    if _RANGE.fullmatch(truth):
        return False
    leaves = [read_answer(truth)]
    for leaf in leaves:
        leaves += leaf.items
    return not any(map(str.isdigit, truth)) or all(
        leaf.items or parse_monomial(leaf.text) or not (refusal(leaf.text) or _WORD.fullmatch(leaf.text[1:]))
        for leaf in leaves
    )


# Which normalised answers may be evaluated symbolically: short ones, of known commands, without huge powers. This
# refuses most hostile input at little cost; the time limit of `symbolic` holds for the rest.

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
    return "a value that takes too long" if _LARGE.search(text) else ""


_ONE = Monomial.of(1)
_PERCENT = Monomial.of(Fraction(1, 100))
_DEGREE = Monomial(Fraction(1, 180**2), pi_power=1)
_LEAST_S = 0.1  # with less time left the child would only be killed
_AFTER_COMMA = re.compile(r",\s+")
_VARIABLE = re.compile(r"(?<![A-Za-z\\])[A-Za-z]")
_WORD = re.compile(r"[A-Za-z][A-Za-z' ]*")


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
        if refusal(answer) or refusal(truth):
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
    if (between := _RANGE.fullmatch(truth)) and between["dash"]:  # 10-12 is no -2
        return Reason.WRONG
    return _same(read_answer(answer), read_answer(truth), _SymbolicBudget())


def _same(given: AnswerTree, expected: AnswerTree, budget: _SymbolicBudget) -> Reason:
    if bool(given.items) != bool(expected.items):  # the truth "1/2 or 0.5" is one value in two spellings
        spellings = expected.items if expected.order == "any" and not expected.opening else ()
        same = [_same(given, spelling, budget) is Reason.CORRECT for spelling in spellings]
        return Reason.CORRECT if same and all(same) else Reason.WRONG
    if len(given.name) == len(expected.name) == 1 and given.name != expected.name:
        return Reason.WRONG  # x = 5 is not y = 5; longer names are only different ways to name one thing
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
