"""Finds the part of a text that is graded, for the environments that grade short texts."""

from __future__ import annotations

from typing import Any, NamedTuple

from rl_vlm.rewards.text import refusal
from rl_vlm.safe_text import without_thoughts

_MAX_THOUGHT = 100_000  # characters


class ReadAnswer(NamedTuple):
    """What an answer says; None, and the reason, if that cannot be said."""

    value: Any
    reason: str = ""


def behind_thought(text: str, max_chars: int) -> tuple[str, str]:
    """The text without its thoughts, and the reason not to grade it: one of `refusal`, "too_long", or ""."""
    said = without_thoughts(text)
    if len(said) > max_chars:
        return said, "too_long"
    return said, refusal(text, _MAX_THOUGHT + max_chars)
