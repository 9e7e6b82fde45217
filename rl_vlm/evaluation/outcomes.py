"""Outcome: what an evaluation keeps of one finished episode, and its line in the items file."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from rl_vlm.evaluation.heldout import label
from rl_vlm.files import to_jsonable
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.types import Trajectory, TrajectoryGroup

Side = Literal["policy", "against"]
Kind = Literal["greedy", "sampled"]
LOST = "lost"  # the status of an item without an outcome, in tables


@dataclass(frozen=True, slots=True)
class Outcome:
    """One finished episode. Its attributes are the columns of the items file.

    `policy` is the measured policy, `against` the one that it is compared with. `id` names the item within a side and `sample` the episode
    of a sampled item. `env` is the environment's id, in a mixture its name, which `variant` then begins with. `info` holds the environment's numbers at the end, and the item's category as text.
    """

    side: Side
    id: str
    sample: int
    env: str
    split: str
    variant: str
    kind: Kind
    view: str
    index: int
    correct: bool
    reward: float
    turns: int
    tokens: int
    status: str
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def num_turns(self) -> int:
        """How many turns the policy had."""
        return self.turns

    def line(self) -> dict[str, Any]:
        """The outcome in JSON's own types."""
        return dict(to_jsonable(dataclasses.asdict(self)))


_NAMES = {column.name for column in dataclasses.fields(Outcome)}


def read_outcome(line: Any) -> Outcome:
    """The outcome of a line's JSON. Raises ValueError where it is none."""
    if not isinstance(line, dict) or line.keys() != _NAMES or not isinstance(line["info"], dict):
        raise ValueError(f"a line has the keys {', '.join(sorted(_NAMES))}")
    for name, kind in (
        ("id", str),
        ("sample", int),
        ("index", int),
        ("correct", bool),
        ("turns", int),
        ("tokens", int),
    ):
        if not isinstance(line[name], kind):
            raise ValueError(f"{name} is {line[name]!r}")
    return Outcome(**{**line, "reward": float(line["reward"])})


def kept_info(info: dict[str, Any], category: str) -> dict[str, Any]:
    """The numbers of an environment's info, and the value of its key `category`, which may be text."""
    return {
        key: value
        for key, value in to_jsonable(info).items()
        if isinstance(value, bool | int | float) or (key == category and isinstance(value, str))
    }


def outcome_of(
    task: RolloutTask, side: Side, sample: int, trajectory: Trajectory, *, env: str, category: str
) -> Outcome:
    """What is kept of one trajectory of a task."""
    return outcome(
        task,
        side,
        sample,
        env=env,
        correct=trajectory.correct,
        reward=trajectory.reward,
        turns=trajectory.num_turns,
        tokens=trajectory.num_sampled,
        status=trajectory.status.value,
        info=kept_info(trajectory.info, category),
    )


def outcome(task: RolloutTask, side: Side, sample: int, **measured: Any) -> Outcome:
    """An outcome whose place is the task's; `measured` holds the rest."""
    return Outcome(
        side=side,
        id=task.group_id,
        sample=sample,
        split=task.split,
        variant=label(task.env, task.variant),
        kind="greedy" if task.temperature == 0 else "sampled",
        view=task.view,
        index=task.index,
        **measured,
    )


def outcomes_of(group: TrajectoryGroup, task: RolloutTask, side: Side, *, env: str, category: str) -> list[Outcome]:
    """What is kept of a group."""
    return [
        outcome_of(task, side, sample, trajectory, env=env, category=category)
        for sample, trajectory in enumerate(group.trajectories)
    ]


@dataclass(frozen=True, slots=True)
class OutcomeGroup:
    """The outcomes of one item, in the form that `heldout.summarize` reads."""

    group_id: str
    trajectories: list[Outcome]


def grouped(outcomes: Iterable[Outcome], side: Side) -> list[OutcomeGroup]:
    """One side's outcomes by item, samples in order."""
    found: dict[str, list[Outcome]] = {}
    for one in outcomes:
        if one.side == side:
            found.setdefault(one.id, []).append(one)
    return [OutcomeGroup(name, sorted(members, key=lambda one: one.sample)) for name, members in found.items()]
