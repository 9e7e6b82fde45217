"""Thoughts of the assistant's turns, as the templates of Qwen's Thinking models write a finished turn."""

from __future__ import annotations

from rl_vlm.types import UserInputError

_OPEN, _CLOSE = "<think>", "</think>"
_AFTER = f"\n{_CLOSE}\n\n"  # a thought, between it and the answer


def with_thought(thought: str, answer: str) -> str:
    """One text of both, as a template without thoughts would leave it."""
    thought = thought.strip("\n")
    return f"{_OPEN}\n{thought}{_AFTER}{answer}"


def after_opened_thought(text: str) -> tuple[str, str]:
    """How a turn goes on after a prompt that opens a thought: (what is given, what is said).

    An answer without a thought is given the end of an empty one. Raises UserInputError for a thought that does not end, or does
    not come first.
    """
    before, closed, answer = text.partition(_CLOSE)
    if not closed:
        if text.lstrip().startswith(_OPEN):
            raise UserInputError(f"an answer opens a thought ({_OPEN}) that it does not end ({_CLOSE}).")
        return _AFTER, text.lstrip("\n")
    outside, _, thought = before.rpartition(_OPEN)
    if outside.strip():
        raise UserInputError(f"an answer has text before its thought ({_OPEN}): the model's thought comes first.")
    thought, answer = thought.strip("\n"), answer.lstrip("\n")
    return ("", thought + _AFTER + answer) if thought else (_AFTER, answer)
