"""When what happens in the preference loop."""

from __future__ import annotations

from typing import Any

import pytest
from tables import table

from rl_vlm.algorithms.preference_sac import first_session_step, next_boundary, phase, session_size
from rl_vlm.config import PreferenceSection, parse_config
from rl_vlm.types import UserInputError


def settings(**changes: Any) -> PreferenceSection:
    base = {"total_steps": 1000, "random_steps": 100, "exploration_steps": 50, "session_pairs": 40, "max_feedback": 100}
    return PreferenceSection(**{**base, **changes})


def test_random_steps_come_first_then_exploration_then_learning() -> None:
    assert [phase(settings(), step) for step in (0, 99, 100, 149, 150, 999)] == [
        "random", "random", "explore", "explore", "learn", "learn",
    ]  # fmt: skip
    assert first_session_step(settings()) == 150
    assert phase(settings(exploration_steps=0), 100) == "learn"


def test_collecting_stops_where_something_changes() -> None:
    assert next_boundary(settings(), 0, 150) == 100
    assert next_boundary(settings(), 100, 150) == 150
    assert next_boundary(settings(), 150, 400) == 400
    assert next_boundary(settings(), 400, None) == 1000


def test_constant_sessions_end_at_max_feedback() -> None:
    assert [session_size(settings(), 500, asked) for asked in (0, 40, 80, 100, 130)] == [40, 40, 20, 0, 0]


def test_schedule_1_shrinks_with_the_remaining_steps() -> None:
    one = settings(feedback_schedule=1)
    assert [session_size(one, step, 0) for step in (0, 500, 750, 1000)] == [40, 20, 10, 1]


def test_schedule_2_grows() -> None:
    two = settings(feedback_schedule=2, max_feedback=10_000)
    assert [session_size(two, step, 0) for step in (1, 501, 901)] == [40, 80, 400]


@pytest.mark.parametrize(("data", "words"), table("refused_settings")["preference_schedule"])
def test_settings_that_cannot_work_are_refused(data: dict[str, Any], words: str) -> None:
    with pytest.raises(UserInputError, match=words):
        parse_config({"algorithm": {"name": "preference_sac"}} | data)
