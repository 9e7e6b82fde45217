"""Outcome: what an evaluation keeps of one finished episode."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import ConfigDict

from rl_vlm.config import PolicyConfig
from rl_vlm.files import to_jsonable
from rl_vlm.rollout.episodes import Conversation
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.types import Trajectory, TrajectoryGroup

Side = Literal["policy", "against"]
Kind = Literal["greedy", "sampled"]
LOST = "lost"  # the status of an item without an outcome, in tables


@dataclass(frozen=True, slots=True)
class Outcome:
    """One finished episode. Its attributes are the columns of the items file.

    `id` names the item within a side and `sample` the episode of a sampled item. `env` is the environment's id, in a
    mixture its name, which `variant` then begins with. `info` holds the environment's numbers at the end, and the
    item's category as text. `answers` holds the policy's texts, turn by turn; files of earlier versions lack it.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

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
    answers: list[str] = field(default_factory=list)

    @property
    def is_plain(self) -> bool:
        """Whether it belongs to the main results: greedy and with the true images."""
        return self.kind == "greedy" and self.view == "true"


def label(env: str, variant: str) -> str:
    """The name of results: the variant, in a mixture after the environment's name."""
    if not env:
        return variant
    return env if variant == "default" else f"{env}/{variant}"


def new_outcome(task: RolloutTask, side: Side, sample: int, **measured: Any) -> Outcome:
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
    config: PolicyConfig, task: RolloutTask, episodes: Iterable[Trajectory | Conversation], side: Side = "policy"
) -> list[Outcome]:
    return [
        new_outcome(
            task,
            side,
            sample,
            env=task.env or config.env.id,
            correct=episode.correct,
            reward=episode.reward,
            turns=episode.num_turns,
            tokens=episode.num_sampled,
            status=episode.status.value,
            info=kept_info(episode.info, config.evaluation.category),
            answers=answers_of(episode),
        )
        for sample, episode in enumerate(episodes)
    ]


def outcomes_of_groups(
    config: PolicyConfig, tasks: Iterable[RolloutTask], groups: Iterable[TrajectoryGroup]
) -> list[Outcome]:
    """What is kept of all groups; tasks whose group was lost have no outcome."""
    found = {group.group_id: group.trajectories for group in groups}
    return [one for task in tasks for one in outcomes_of(config, task, found.get(task.group_id, ()))]


def answers_of(episode: Trajectory | Conversation) -> list[str]:
    """The policy's texts, turn by turn; none where the conversation was not recorded."""
    said = [message.text for message in episode.messages if message.role == "assistant"]
    return list(to_jsonable(said[max(len(said) - episode.num_turns, 0) :]))  # a prompt may hold earlier ones


def kept_info(info: dict[str, Any], category: str) -> dict[str, Any]:
    """The numbers of an environment's info, and the value of its key `category`, which may be text."""
    return {
        key: value
        for key, value in to_jsonable(info).items()
        if isinstance(value, bool | int | float) or (key == category and isinstance(value, str))
    }
