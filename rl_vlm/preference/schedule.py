"""The schedule of the preference loop, in environment steps: phases, sessions and their sizes."""

from __future__ import annotations

from typing import Literal

from rl_vlm.config import PreferenceSection


def first_session_step(settings: PreferenceSection) -> int:
    """When exploration ends: the first session, or (where the reward is not learned) the reset of the critics."""
    return settings.random_steps + settings.exploration_steps


def phase(settings: PreferenceSection, step: int) -> Literal["random", "explore", "learn"]:
    """The phase of the step after `step` steps."""
    if step < settings.random_steps:
        return "random"
    return "explore" if step < first_session_step(settings) else "learn"


def next_boundary(settings: PreferenceSection, step: int, next_session: int | None) -> int:
    """The next step at which the phase changes or a session takes place; collection stops there."""
    steps = (settings.random_steps, first_session_step(settings), settings.total_steps, next_session or 0)
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
