"""The reward of a complete group as the weighted sum of its parts."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import Any

import rl_vlm.rollout.judge  # noqa: F401  registers its part
from rl_vlm.config import RewardSection
from rl_vlm.models.loading import TextSide
from rl_vlm.rollout.failures import GroupFailedError
from rl_vlm.rollout.reward_parts import REWARD_PARTS, AnsweredGroup, Noted
from rl_vlm.rollout.turns import CompletionClient
from rl_vlm.types import RLVLMError, Trajectory, TrajectoryGroup, TrajectoryStatus

OWN = "env"  # the environment's own reward


async def score_group(
    group: TrajectoryGroup, settings: RewardSection, policy: CompletionClient, text: TextSide
) -> TrajectoryGroup:
    """The group with the rewards that `settings` ask for; without weights, as it is.

    A part of the environment (`info["reward_parts"]`) is paid at its turn and wins over a registered one of the same name; a registered
    part is paid at the last turn. What was correct stays so: it is noted before weights change the rewards. Raises
    GroupFailedError where a part is missing from an episode that has ended by itself, fails, or is not a finite number.
    """
    if not settings.weights:
        return group
    own = {name for one in group.trajectories for turn in one.turns for name, _ in turn.parts}
    names = [name for name in settings.weights if name != OWN and name not in own]
    answers = tuple(
        tuple(text.codec.decode(one.token_ids[turn.start : turn.stop]) for turn in one.turns)
        for one in group.trajectories
    )
    answered = AnsweredGroup(group, answers, settings, policy, text)
    paid = {name: await _paid(name, answered) for name in names if name in REWARD_PARTS.names()}
    scored = [
        _weighted(
            replace(
                one,
                info={**one.info, **{key: note for found in paid.values() for key, note in found.notes[place].items()}},
            ),
            settings,
            {name: found.values[place] for name, found in paid.items()},
        )
        for place, one in enumerate(group.trajectories)
    ]
    return replace(group, trajectories=scored)


async def _paid(name: str, answered: AnsweredGroup) -> Noted:
    try:
        found: Any = REWARD_PARTS.get(name)(answered)
        if inspect.isawaitable(found):
            found = await found
        noted = found if isinstance(found, Noted) else Noted(found, [{}] * len(answered.group))
        values = [float(value) for value in noted.values]
    except RLVLMError as error:
        raise GroupFailedError("reward_part", f"The reward part {name} failed: {error}") from error
    except Exception as error:
        # User code may raise anything; it costs this group.
        raise GroupFailedError(
            "reward_part", f"The reward part {name} raised {type(error).__name__}: {error}"
        ) from error
    if not len(values) == len(noted.notes) == len(answered.group) or not all(map(math.isfinite, values)):
        raise GroupFailedError(
            "reward_part",
            f"The reward part {name} gave {values[:4]} for {len(answered.group)} answers: it must give one finite number for each.",
        )
    return Noted(values, noted.notes)


def _weighted(one: Trajectory, settings: RewardSection, at_the_end: dict[str, float]) -> Trajectory:
    turns = []
    for place, turn in enumerate(one.turns):
        parts = {OWN: turn.reward, **dict(turn.parts), **(at_the_end if place == len(one.turns) - 1 else {})}
        reward = sum(weight * parts.get(name, 0.0) for name, weight in settings.weights.items())
        turns.append(replace(turn, reward=reward, parts=tuple(parts.items())))
    missing = set(settings.weights) - {name for turn in turns for name, _ in turn.parts}
    if missing and one.status is TrajectoryStatus.COMPLETED:
        known = sorted({name for turn in turns for name, _ in turn.parts} | set(REWARD_PARTS.names()))
        raise GroupFailedError(
            "reward_part",
            f"env.reward.weights names {', '.join(sorted(missing))}, and the parts here are {', '.join(known)}: correct the name, or "
            "let the environment give it in info['reward_parts'].",
        )
    # Without the environment's word the reward of 1 is what is correct, and weights change the reward.
    return replace(one, turns=tuple(turns), info={**one.info, "correct": one.correct})
