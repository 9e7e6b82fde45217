"""What an answer to Zoom-v0 says, as it is compared."""

from __future__ import annotations

import re

from rl_vlm.rewards.text import ReadAnswer, behind_thought

MAX_CHARS = 8000
# `Answer: x` to the end of its line or on the line below, `<answer>x</answer>`, `\boxed{x}`, and a heading `# Answer`
# above x.
_MARKED = re.compile(
    r"(?:(?<![^\W_])answer[\"'*_`]{0,3}\s*[:：]|答案\s*[:：]|^#{1,6}[ *_]*(?:final )?answer[ "
    r"*_]*$)[*_`\s]*(?P<line>[^\n]*)|<answer>(?P<tag>[^<>]*)</answer>|\\(?:boxed|fbox)\s?\{(?P<box>[^{}]*)\}",
    re.IGNORECASE | re.MULTILINE,
)
_SENTENCE = re.compile(
    r"(?:(?:so|thus|therefore|hence),? )?(?:the |my )?(?:final |right |correct )?answer is\b:?(?P<value>.+)",
    re.IGNORECASE,
)
_BOXED = re.compile(r"\\(?:boxed|fbox)\s?\{([^{}]*)\}|<answer>([^<>]*)</answer>", re.IGNORECASE)
_FONT = re.compile(r"\\(?:text|textbf|mathrm)\s?\{([^{}]*)\}")
_ARTICLE = re.compile(r"(?:a|an|the)\s+(?=\S)")
_DECORATION = " \t\r\n*_`~#>\"'“”‘’()[]{}.!,:;-–—|\\$"
# A number, also one of LaTeX whose backslash is decoration. What is stripped before it may hold its sign and its point.
_QUANTITY = re.compile(r"\d|[€£¥√]|[dt]?frac\b|sqrt\b")
_SIGN = re.compile(r"−|[-–](?=\S*$)")
_POINT = re.compile(r"(?<!\.)\.$")


def normalized(text: str) -> str:
    """What answers are compared by: lower case, single spaces, no article before it, no marks around it.

    A number keeps its sign, as "-", and its point, as "0.": "–.5" is "-0.5".
    """
    bare = text.strip(_DECORATION)
    number = bare.lstrip(_DECORATION + "−")
    if _QUANTITY.match(number):
        before = text[: text.find(number)]
        sign = "-" if _SIGN.search(before) else ""
        point = "0." if _POINT.search(before) and number[0].isdigit() else ""
        bare = f"{sign}{point}{number}"
    return _ARTICLE.sub("", " ".join(bare.casefold().split()), count=1)


def read_answer(text: str) -> ReadAnswer:
    """The answer of a text, which is compared as a whole: a list of answers is none of them.

    The answer is marked by `Answer:`, `<answer>` or `\\boxed{}` and ends the text; marks that name different answers
    name none. Without a mark a last line "The answer is x" says x, and a text of one line is the answer itself.

    Reasons: those of `behind_thought`, empty, several (marked answers that differ), misplaced (text follows the marked
    answer), unmarked (many lines, none of which is marked as the answer).
    """
    said, reason = behind_thought(text, MAX_CHARS)
    if reason:
        return ReadAnswer(None, reason)
    said = _FONT.sub(r"\1", said)
    marks = list(_MARKED.finditer(said))
    if not marks:
        lines = [line for line in said.splitlines() if line.strip(_DECORATION)]
        if lines and (sentence := _SENTENCE.fullmatch(lines[-1].strip(_DECORATION))):
            return _answer(sentence["value"])
        return _answer(lines[0]) if len(lines) == 1 else ReadAnswer(None, "unmarked" if lines else "empty")
    if said[marks[-1].end() :].strip(_DECORATION):
        return ReadAnswer(None, "misplaced")
    values = {_answer(mark["line"] or mark["tag"] or mark["box"] or "") for mark in marks}
    return values.pop() if len(values) == 1 else ReadAnswer(None, "several")


def _answer(text: str) -> ReadAnswer:
    value = normalized(_BOXED.sub(lambda box: box[1] or box[2] or "", text))
    return ReadAnswer(value) if value else ReadAnswer(None, "empty")
