"""True answers as data sets store them: taken out of what they are wrapped in, and checked."""

from __future__ import annotations

import re

from rl_vlm.rewards.algebra import why_not_evaluated
from rl_vlm.rewards.boxes import extract_boxed
from rl_vlm.rewards.exact import parse_monomial
from rl_vlm.rewards.normalize import is_oversized, read_answer

# How data sets wrap a truth: marked as the answer at the end of a solution, or in marks of text or of a list.
_TRUTH_TAG = re.compile(
    r"(?is)(?:<\|?(?:answer|begin_of_box)\|?>|\[answer\])(.*?)(?=<(?:/|answer|\|(?!box|obj))|\[/answer\]|\Z)"
)
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
_BOXES = re.compile(r"\\(?:boxed|fbox)\{[^{}]*\}\$?\s*(?:,|;|and|or)\s*\$?\\(?:boxed|fbox)")  # one of them is no answer
RANGE = re.compile(r"(?P<dash>[0-9.]+(?: ?[-–] ?[0-9.]+)+)|.*(?:±|\\pm) ?[0-9]*\.[0-9]+")  # or a date, a tolerance
WORD = re.compile(r"[A-Za-z][A-Za-z' ]*")


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
    if RANGE.fullmatch(truth):
        return False
    leaves = [read_answer(truth)]
    for leaf in leaves:
        leaves += leaf.items
    return not any(map(str.isdigit, truth)) or all(
        leaf.items or parse_monomial(leaf.text) or not (why_not_evaluated(leaf.text) or WORD.fullmatch(leaf.text[1:]))
        for leaf in leaves
    )
