"""Rewards a complete group: the environment's reward, registered parts and reward functions, each with its weight."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from rl_vlm.asking import Client
from rl_vlm.config import RewardFunction, RewardSection
from rl_vlm.envs.errors import EnvError, as_reward, describe_error
from rl_vlm.models.images import TextSide
from rl_vlm.rewards.functions import FUNCTIONS
from rl_vlm.rollout import judge as judge  # which register themselves
from rl_vlm.rollout import judges as judges
from rl_vlm.rollout.env_pool import GroupFailedError
from rl_vlm.rollout.reward_functions import call_function, check_function, completions_of, load_function
from rl_vlm.rollout.reward_parts import REWARD_PARTS, AnsweredGroup, PartResult, RewardPart
from rl_vlm.rollout.reward_parts import register_reward_part as register_reward_part  # the name that users import
from rl_vlm.types import (
    Observation,
    RLVLMError,
    StopReason,
    Trajectory,
    TrajectoryGroup,
    TrajectoryStatus,
    Turn,
    UserInputError,
)
from rl_vlm.waiting import all_or_none

OWN = "env"  # the environment's own reward
_TRY_S = 60.0  # for a reward function to reward made answers


async def score_group(
    group: TrajectoryGroup, settings: RewardSection, policy: Client, text: TextSide
) -> TrajectoryGroup:
    """The group with the rewards that `settings` ask for; without weights, as it is.

    A part of the environment (`info["reward_parts"]`) is rewarded at its turn and wins over a registered one of the
    same name, which is rewarded at the last turn. Raises GroupFailedError where a part is missing from an episode that
    has ended by itself, fails, or is not a finite number.
    """
    if not settings.all_weights:
        return group
    own = {name for one in group.trajectories for turn in one.turns for name, _ in turn.parts}
    names = [name for name in settings.weights if name != OWN and name not in own]
    answers = tuple(
        tuple(text.codec.decode(one.token_ids[turn.start : turn.stop]) for turn in one.turns)
        for one in group.trajectories
    )
    answered = AnsweredGroup(group, answers, settings, policy, text)
    parts = {name: REWARD_PARTS[name] for name in names if name in REWARD_PARTS}
    parts |= {one.name: part_of(one) for one in settings.functions}
    found = await all_or_none([compute_part(name, part, answered) for name, part in parts.items()])
    computed = dict(zip(parts, found, strict=True))
    scored = []
    for place, one in enumerate(group.trajectories):
        info = dict(one.info)
        at_the_end: dict[str, float] = {}
        for name, result in computed.items():
            info |= result.notes[place]
            at_the_end |= result.metrics
            if (value := result.values[place]) is not None:
                at_the_end[name] = value
        scored.append(_weighted(replace(one, info=info), settings, at_the_end))
    return replace(group, trajectories=scored)


def part_of(one: RewardFunction) -> RewardPart:
    """A reward function as a part; a name that is no built-in function's may be a registered part's. Raises
    UserInputError."""
    if one.given is None and one.function in REWARD_PARTS and one.function not in FUNCTIONS:
        return REWARD_PARTS[one.function]
    load_function(one)

    async def part(answered: AnsweredGroup) -> PartResult:
        return PartResult(*await call_function(one, answered))

    return part


def try_functions(settings: RewardSection, info: Mapping[str, Any]) -> None:
    """Load the reward functions and compare their arguments with the first item's info. Raises UserInputError."""
    for one in settings.functions:
        # Other environments bring what they know with their last reply.
        if part_of(one) not in REWARD_PARTS.values() and "columns" in info:
            check_function(one, info)


def try_rewards(
    settings: RewardSection, shown: Observation, info: Mapping[str, Any], answers: Sequence[str], text: TextSide
) -> None:
    """Have the reward functions reward made answers to an observation once. Raises UserInputError."""
    span = text.codec.encode_prompt(shown.messages)
    prompt, made = text.expand(span.token_ids, span.images), []
    for number, said in enumerate(answers):
        ids = np.append(prompt, text.codec.encode_text(said)).astype(np.int32)
        mask = np.arange(len(ids)) >= len(prompt)
        turns = (Turn(len(prompt), len(ids), 0, StopReason.END_OF_TURN),)
        logprobs = -mask.astype(np.float32)
        made.append(
            Trajectory(
                str(number), ids, mask, logprobs, turns, TrajectoryStatus.COMPLETED, tuple(span.images), info=dict(info)
            )
        )
    no_client: Any = None
    answered = AnsweredGroup(
        TrajectoryGroup("made", 0, made), tuple((said,) for said in answers), settings, no_client, text
    )
    for one in settings.functions:
        if (part := part_of(one)) not in REWARD_PARTS.values():  # some of which ask the policy
            try:
                with ThreadPoolExecutor(1) as pool:  # a notebook has a loop of its own in this thread
                    pool.submit(asyncio.run, asyncio.wait_for(compute_part(one.name, part, answered), _TRY_S)).result()
            except (GroupFailedError, TimeoutError) as error:
                reason = str(error) or f"it takes more than {_TRY_S:g} s"
                given = completions_of(answered.answers, isinstance(info.get("prompt"), list))
                raise UserInputError(f"env.reward, called with completions={given!s:.200}: {reason}") from error


def try_parts(settings: RewardSection, text: TextSide) -> None:
    """Call the registered parts that do not ask the policy once, on two made answers without an `info`.

    Raises UserInputError for one that takes an `AnsweredGroup` for something else: each group of a run would be lost.
    """
    ids, mask = np.arange(6, dtype=np.int32), np.arange(6) >= 3
    turns = [(Turn(3, 6, 0, StopReason.END_OF_TURN, reward),) for reward in (0.0, 1.0)]
    logprobs = np.where(mask, -1.0, 0.0).astype(np.float32)
    made = [Trajectory(str(k), ids, mask, logprobs, turns[k], TrajectoryStatus.COMPLETED) for k in range(2)]
    no_client: Any = None  # parts that ask the policy are coroutine functions
    answered = AnsweredGroup(TrajectoryGroup("made", 0, made), (("0",), ("1",)), settings, no_client, text)
    for name in set(settings.weights) & REWARD_PARTS.keys():
        if not inspect.iscoroutinefunction(part := REWARD_PARTS[name]):
            try:
                part(answered)
            except (AttributeError, TypeError) as error:
                raise UserInputError(f"The reward part {name} does not run: {describe_error(error)}.") from error
            except Exception:  # it misses what a real episode has, such as a key of its info
                pass


async def compute_part(name: str, part: RewardPart, answered: AnsweredGroup) -> PartResult:
    try:
        found: Any = part(answered)
        if inspect.isawaitable(found):
            found = await found
    except RLVLMError as error:
        raise GroupFailedError("reward_part", f"The reward part {name} failed: {error}") from error
    except (Exception, SystemExit) as error:
        # User code may raise anything; it costs this group.
        raise GroupFailedError("reward_part", f"The reward part {name} raised {describe_error(error)}") from error
    result = found if isinstance(found, PartResult) else PartResult(found, [{}] * len(answered.group))
    try:
        values = [None if value is None else as_reward(float(value), name) for value in result.values]
        counted = len(values) == len(result.notes) == len(answered.group)
    except (TypeError, ValueError, EnvError):
        counted = False
    if not counted:
        raise GroupFailedError(
            "reward_part",
            f"The reward part {name} gave {str(result.values)[:100]} for {len(answered.group)} answers: it must give "
            "one finite number for each, or None where it does not apply.",
        )
    return replace(result, values=values)


def _weighted(one: Trajectory, settings: RewardSection, at_the_end: dict[str, float]) -> Trajectory:
    turns, weights = [], settings.all_weights
    for place, turn in enumerate(one.turns):
        parts = {OWN: turn.reward, **dict(turn.parts), **(at_the_end if place == len(one.turns) - 1 else {})}
        reward = sum(weight * parts.get(name, 0.0) for name, weight in weights.items())
        turns.append(replace(turn, reward=reward, parts=tuple(parts.items())))
    missing = set(settings.weights) - {name for turn in turns for name, _ in turn.parts}
    if missing and one.status is TrajectoryStatus.COMPLETED:
        known = sorted({name for turn in turns for name, _ in turn.parts} | REWARD_PARTS.keys())
        raise GroupFailedError(
            "reward_part",
            f"env.reward.weights names {', '.join(sorted(missing))}, and the parts here are {', '.join(known)}: "
            "correct the name, or let the environment give it in info['reward_parts'].",
        )
    scored = replace(one, turns=tuple(turns))
    # Noted before weights change the reward, which says what is correct where the environment does not. Functions that
    # take the environment's place say it by their reward.
    by_functions = settings.functions and "correct" not in one.info and one.status is TrajectoryStatus.COMPLETED
    return scored if by_functions else replace(scored, info={**one.info, "correct": one.correct})
