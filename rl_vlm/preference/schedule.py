"""The schedule in environment steps: random actions, exploration, labelling sessions, learning. Pure functions."""

from __future__ import annotations

from typing import Literal

from rl_vlm.config import PreferenceSection
from rl_vlm.types import UserInputError

Phase = Literal["random", "explore", "learn"]


def first_session_step(settings: PreferenceSection) -> int:
    """When exploration ends: the first session, or (where the reward is not learned) the reset of the critics."""
    return settings.random_steps + settings.exploration_steps


def check_segments(settings: PreferenceSection, horizon: int) -> None:
    """Raise UserInputError where no episode of `horizon` steps holds a segment: no pair would ever be labelled."""
    asks_for_pairs = settings.reward == "learn_from_preference" and settings.labels.source != "cache"
    if asks_for_pairs and settings.segment_length > horizon:
        raise UserInputError(
            f"preference.segment_length is {settings.segment_length} and episodes have at most {horizon} steps: no pair of "
            "segments could be labelled. Take shorter segments, or longer episodes."
        )


def phase(settings: PreferenceSection, step: int) -> Phase:
    """The phase of the step after `step` steps."""
    if step < settings.random_steps:
        return "random"
    return "explore" if step < first_session_step(settings) else "learn"


def next_boundary(settings: PreferenceSection, step: int, next_session: int | None) -> int:
    """The next step at which the phase changes or a session takes place; collection stops there."""
    steps = [settings.random_steps, first_session_step(settings), settings.total_steps]
    if next_session is not None:
        steps.append(next_session)
    return min(boundary for boundary in steps if boundary > step)


def session_size(settings: PreferenceSection, step: int, asked: int) -> int:
    """Pairs of a session at `step` when `asked` were asked before; 0 when `max_feedback` is reached.

    Schedule 0 is constant. With T = total steps, 1 shrinks as (T - step) / T (never below a hundredth) and 2 grows as
    T / (T - step + 1), as in B-Pref.
    """
    total = settings.total_steps
    if settings.feedback_schedule == 1:
        share = max((total - step) / total, 0.01)
    elif settings.feedback_schedule == 2:
        share = total / max(total - step + 1, 1)
    else:
        share = 1.0
    wanted = max(int(settings.session_pairs * share), 1)
    return max(min(wanted, settings.max_feedback - asked), 0)
