"""Reads whether an answer says True or False."""

from __future__ import annotations

import re

from rl_vlm.rewards.text import ReadAnswer, behind_thought

MAX_CHARS = 8000
_ANSWER_TAG = re.compile(r"</?answer>", re.IGNORECASE)
_VERDICT = re.compile(r"(?<![^\W_])(true|false)(?![^\W_])", re.IGNORECASE)
# What turns a verdict around or takes it back: in its own clause before it ("far from true", "un-true", "!true") and
# anywhere behind it, and in its own sentence the words that leave it open. "nottrue" and "untrue" hold no verdict at
# all.
_NEGATED = re.compile(
    r"\b(?:not|never|neither|nor|hardly|[a-z]+n['’]t|isnt|wasnt|cant|aint|cannot|or|wrong|incorrect|opposite|contrary|doubt|deny|lie|unlikely|no way|far from|un|non|half)\b"  # noqa: E501
    r"|¬|\\l?n(?:ot|eg)\b|~~|(?<![^\s`*(])!\s*$",
    re.IGNORECASE,
)
_OPEN = re.compile(r"\b(?:if|whether|unless|either|maybe|perhaps|probably|possibly|might|may|could)\b", re.IGNORECASE)
_SENTENCE_END, _CLAUSE_END = re.compile(r"[.!?]\s"), re.compile(r"[.!?,;–—]\s")
_REASON = re.compile(r"\b(?:because|since)\b", re.IGNORECASE)  # what follows explains the verdict and may hold any word
_DECORATION = " \t*_`~#>\"'“”‘’()[]{}.!,:;-–—|\\$"


def read_verdict(text: str) -> ReadAnswer:
    """The verdict of an answer: True or False.

    The last line holds "true" or "false" once, in any case and decoration, as its first or last word, without a word
    that turns it around in its clause or leaves it open in its sentence. What stands before may say the same word but
    not the other one: an answer that says both says nothing. Thoughts are not read.

    Reasons: those of `behind_thought`, empty, none (neither word), both, repeated, turned (by a word such as "not" or
    "if"), misplaced (neither the first nor the last word of its line, or not in the last line).
    """
    said, reason = behind_thought(text, MAX_CHARS)
    if reason:
        return ReadAnswer(None, reason)
    answer = _ANSWER_TAG.sub(" ", said)
    lines = [line for line in answer.splitlines() if line.strip(_DECORATION)]
    if not lines:
        return ReadAnswer(None, "empty")
    words = {word.lower() for word in _VERDICT.findall(answer)}
    if len(words) != 1:
        return ReadAnswer(None, "both" if words else "none")
    found = list(_VERDICT.finditer(lines[-1]))
    if len(found) != 1:
        return ReadAnswer(None, "repeated" if found else "misplaced")
    before, after = lines[-1][: found[0].start()], lines[-1][found[0].end() :]
    behind = _REASON.split(after)[0]
    if (
        _NEGATED.search(_CLAUSE_END.split(before)[-1])
        or _OPEN.search(_SENTENCE_END.split(before)[-1])
        or _NEGATED.search(behind)
        or _OPEN.search(behind)
        or after.startswith("?")
    ):
        return ReadAnswer(None, "turned")
    if before.strip(_DECORATION) and after.strip(_DECORATION):
        return ReadAnswer(None, "misplaced")
    return ReadAnswer(words == {"true"})
