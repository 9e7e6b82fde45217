"""What an answer is worth."""

from __future__ import annotations

import re


def score(text: str, answer: str) -> float:
    """The reward of the policy's text, where `answer` is right: 1 if it is `<answer>N</answer>` with that N, else 0.

    Be strict: a policy finds whatever else is rewarded. A text with two answers, for example, must earn nothing.
    """
    match = re.fullmatch(r"<answer>([^<>]*)</answer>", text.strip())
    return 1.0 if match and match[1].strip() == answer else 0.0
