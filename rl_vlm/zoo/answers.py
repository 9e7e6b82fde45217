"""What the answers of several environments share: the part of a text that is graded."""

from __future__ import annotations

from rl_vlm.rewards.plain_text import refusal, without_thought

_MAX_THOUGHT = 100_000  # characters


def behind_thought(text: str, max_chars: int) -> tuple[str, str]:
    """What a text says behind its thought, and why it must not be graded; "" if it may be.

    The reasons are those of `refusal`, with `max_chars` of what is said, and "misplaced": a thought that does not end, or another.
    """
    said = without_thought(text)
    if len(said) > max_chars:
        return said, "too_long"
    if reason := refusal(text, _MAX_THOUGHT + max_chars):
        return said, reason
    return said, "misplaced" if "<think>" in said or "</think>" in said else ""
