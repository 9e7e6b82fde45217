"""Outcome: what an evaluation keeps of one finished episode. All figures of evaluations are computed from these rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rl_vlm.config import PolicyConfig
from rl_vlm.files import to_jsonable
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.types import TrajectoryGroup, TrajectoryStatus

Side = Literal["policy", "against"]
Kind = Literal["greedy", "sampled"]
LOST = "lost"  # the status of an item without an outcome, in tables


@dataclass(frozen=True, slots=True)
class Outcome:
    """One finished episode. Its attributes are the columns of the items file.

    `policy` is the measured policy, `against` the one that it is compared with. `id` names the item within a side and `sample` the episode
    of a sampled item. `env` is the environment's id, in a mixture its name, which `variant` then begins with. `info` holds the environment's
    numbers at the end, and the item's category as text.
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
    def is_plain(self) -> bool:
        """Whether it belongs to the main figures: greedy and with the true images."""
        return self.kind == "greedy" and self.view == "true"

    def line(self) -> dict[str, Any]:
        """The outcome in JSON's own types."""
        return dict(to_jsonable(dataclasses.asdict(self)))


class Finished(Protocol):
    """A finished episode: a Trajectory, or what an endpoint's player has of one."""

    @property
    def correct(self) -> bool: ...
    @property
    def reward(self) -> float: ...
    @property
    def num_turns(self) -> int: ...
    @property
    def num_sampled(self) -> int: ...
    @property
    def status(self) -> TrajectoryStatus: ...
    @property
    def info(self) -> dict[str, Any]: ...


def label(env: str, variant: str) -> str:
    """The name of an environment's results under a variant: a single one's is the variant, in a mixture its own comes first."""
    if not env:
        return variant
    return env if variant == "default" else f"{env}/{variant}"


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


def outcomes_of(
    config: PolicyConfig, task: RolloutTask, episodes: Iterable[Finished], side: Side = "policy"
) -> list[Outcome]:
    """What is kept of the episodes of a task, samples in order."""
    return [
        outcome(
            task,
            side,
            sample,
            env=task.env or config.env.id,
            correct=one.correct,
            reward=one.reward,
            turns=one.num_turns,
            tokens=one.num_sampled,
            status=one.status.value,
            info=kept_info(one.info, config.evaluation.category),
        )
        for sample, one in enumerate(episodes)
    ]


def outcomes_of_groups(
    config: PolicyConfig, tasks: Iterable[RolloutTask], groups: Iterable[TrajectoryGroup]
) -> list[Outcome]:
    """What is kept of all groups; tasks whose group was lost have no outcome."""
    found = {group.group_id: group.trajectories for group in groups}
    return [one for task in tasks if task.group_id in found for one in outcomes_of(config, task, found[task.group_id])]


def kept_info(info: dict[str, Any], category: str) -> dict[str, Any]:
    """The numbers of an environment's info, and the value of its key `category`, which may be text."""
    return {
        key: value
        for key, value in to_jsonable(info).items()
        if isinstance(value, bool | int | float) or (key == category and isinstance(value, str))
    }


_NAMES = {column.name for column in dataclasses.fields(Outcome)}
_KINDS = {"id": str, "sample": int, "index": int, "correct": bool, "turns": int, "tokens": int, "info": dict}


def read_outcome(line: Any) -> Outcome:
    """The outcome of a line's JSON. Raises ValueError where it is none."""
    if not isinstance(line, dict) or line.keys() != _NAMES:
        raise ValueError(f"a line has the keys {', '.join(sorted(_NAMES))}")
    for name, kind in _KINDS.items():
        if not isinstance(line[name], kind):
            raise ValueError(f"{name} is {line[name]!r}")
    return Outcome(**{**line, "reward": float(line["reward"])})
