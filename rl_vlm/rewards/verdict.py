"""Whether an answer says True or False: read strictly enough that hedging never pays, tolerantly enough for honest forms."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rl_vlm.rewards.plain_text import spoken

MAX_CHARS = 8000
_ANSWER_TAG = re.compile(r"</?answer>", re.IGNORECASE)
_VERDICT = re.compile(r"(?<![^\W_])(true|false)(?![^\W_])", re.IGNORECASE)
# Words that turn a verdict around or take it back; "nottrue" and "untrue" hold no verdict at all.
_TURNED = re.compile(
    r"\b(?:not|never|neither|nor|hardly|isn'?t|wasn'?t|cannot|can'?t|if|whether|unless|either|maybe|perhaps|probably|possibly|or|might|may|could)\b",
    re.IGNORECASE,
)
_REASON = re.compile(r"\b(?:because|since)\b", re.IGNORECASE)  # what follows explains the verdict and may hold any word
_DECORATION = " \t*_`~#>\"'“”‘’()[]{}.!,:;-–—|\\$"


@dataclass(frozen=True, slots=True)
class Verdict:
    """value: what the answer says, None where it cannot be said. reason: why not; "" if it can.

    Reasons: too_long, hidden, special, look_alike (see `plain_text`), empty, none (neither word), both, repeated, turned (by a
    word such as "not" or "if"), misplaced (neither the first nor the last word of its line, or not in the last line).
    """

    value: bool | None
    reason: str = ""


def read_verdict(text: str) -> Verdict:
    """The verdict of an answer.

    One thought at the start is not read (see `without_thought`). In the rest, the last line holds "true" or "false" once, in any case
    and decoration, as its first or last word, without a word that turns it around. Lines before it may say the same word but
    not the other one: who says both says nothing.
    """
    said, reason = spoken(text, MAX_CHARS)
    if reason:
        return Verdict(None, reason)
    answer = _ANSWER_TAG.sub(" ", said)
    lines = [line for line in answer.splitlines() if line.strip(_DECORATION)]
    if not lines:
        return Verdict(None, "empty")
    words = {word.lower() for word in _VERDICT.findall(answer)}
    if len(words) != 1:
        return Verdict(None, "both" if words else "none")
    found = list(_VERDICT.finditer(lines[-1]))
    if len(found) != 1:
        return Verdict(None, "repeated" if found else "misplaced")
    before, after = lines[-1][: found[0].start()].strip(_DECORATION), lines[-1][found[0].end() :].strip(_DECORATION)
    if _TURNED.search(before) or _TURNED.search(_REASON.split(after)[0]):
        return Verdict(None, "turned")
    if before and after:
        return Verdict(None, "misplaced")
    return Verdict(words == {"true"})
