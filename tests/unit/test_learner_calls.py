"""Calls to learners of which some are dead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from rl_vlm.algorithms.learners import LearnerLostError, on_every_learner, on_one_learner


@dataclass
class Result:
    """As RLlib's: a failed call holds its exception and raises nothing."""

    value: Any

    @property
    def ok(self) -> bool:
        return not isinstance(self.value, Exception)

    def get(self) -> Any:
        return self.value


class Group:
    """A learner group with given answers."""

    is_local = False

    def __init__(self, *values: Any) -> None:
        self._values = values

    def foreach_learner(self, function: Any, timeout_seconds: float) -> list[Result]:
        return [Result(value) for value in self._values]


def test_the_first_learner_that_answers_counts() -> None:
    assert on_one_learner(Group(RuntimeError("died"), 7), lambda _: 0) == 7


@pytest.mark.parametrize("values", [(), (RuntimeError("died"),)])
def test_a_dead_learners_exception_is_never_an_answer(values: tuple[Any, ...]) -> None:
    with pytest.raises(LearnerLostError, match="No learner answered: (died|none is alive)"):
        on_one_learner(Group(*values), lambda _: 0)


def test_every_learner_must_answer() -> None:
    on_every_learner(Group(1, 2), lambda _: 0)
    with pytest.raises(LearnerLostError, match="could not be restored: died"):
        on_every_learner(Group(1, RuntimeError("died")), lambda _: 0)
