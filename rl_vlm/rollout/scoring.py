"""Parts of the reward that are computed when a group is complete, from all its answers. Users register more:

    @register_reward_part("brief")
    def brief(answered):
        return [-float(len(answers[-1].split())) for answers in answered.answers]

`env.reward.weights: {env: 1.0, brief: 0.01}` then adds the weighted value to each episode's last turn. A function that
waits for something, as the judge below does, is `async def`: the groups of a worker wait side by side.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from rl_vlm.asking import Answer, Ask, Client, HTTPEndpoint, Question, ServedEndpoint, ask_again
from rl_vlm.config import JudgeSection, RewardFunction, RewardSection
from rl_vlm.engines.base import BASE_MODEL
from rl_vlm.envs.errors import describe_error
from rl_vlm.models.images import TextSide
from rl_vlm.registry import Registry
from rl_vlm.rewards.functions import FUNCTIONS
from rl_vlm.rewards.judged import quoted, why_not_judged
from rl_vlm.rollout.env_pool import GroupFailedError
from rl_vlm.rollout.reward_functions import call_function, check_function, load_function
from rl_vlm.safe_text import without_thoughts
from rl_vlm.types import (
    EncodedImage,
    GenerationRequest,
    Message,
    RLVLMError,
    SamplingParams,
    StopReason,
    Trajectory,
    TrajectoryGroup,
    TrajectoryStatus,
    Turn,
    UserInputError,
)
from rl_vlm.waiting import all_or_none


@dataclass(frozen=True, slots=True)
class AnsweredGroup:
    """What a part sees: a complete group with the environment's own rewards, and `answers`, the text of each turn, per
    trajectory. A request to `policy` with `min_version` -1 is answered by the base model."""

    group: TrajectoryGroup
    answers: tuple[tuple[str, ...], ...]
    reward_settings: RewardSection
    policy: Client
    text: TextSide


@dataclass(frozen=True, slots=True)
class Noted:
    """One number per trajectory, None where the part does not apply, and notes that are added to its `info`."""

    values: Sequence[float | None]
    notes: Sequence[Mapping[str, Any]]
    metrics: Mapping[str, float] = field(default_factory=dict)  # logged as parts that do not count


Paid = Sequence[float | None] | Noted
RewardPart = Callable[[AnsweredGroup], Paid | Awaitable[Paid]]

REWARD_PARTS: Registry[RewardPart] = Registry("env.reward.weights")
register_reward_part = REWARD_PARTS.register


@register_reward_part("format")
def format_share(answered: AnsweredGroup) -> list[float]:
    """The share of turns that are well-formed: not cut off, and not `well_formed: False` in the environment's info."""
    return [float(np.mean([turn.well_formed for turn in one.turns])) for one in answered.group.trajectories]


@register_reward_part("length")
def tokens_over_budget(answered: AnsweredGroup) -> list[float]:
    """Sampled tokens beyond `length_budget`; its weight is negative where long answers cost."""
    budget = answered.reward_settings.length_budget
    return [float(max(one.num_sampled - budget, 0)) for one in answered.group.trajectories]


@register_reward_part("relative_length")
def relative_length(answered: AnsweredGroup) -> list[float]:
    """The length reward of Kimi k1.5 (arXiv 2501.12599, section 2.3.3) over the whole group: λ = 0.5 - (length -
    shortest) / (longest - shortest) for a correct answer, min(0, λ) for a wrong one; 0 where all are equally long."""
    lengths = np.array([one.num_sampled for one in answered.group.trajectories], dtype=np.float64)
    spread = np.ptp(lengths)
    if not spread:
        return [0.0] * len(lengths)
    values = 0.5 - (lengths - lengths.min()) / spread
    correct = np.array([one.correct for one in answered.group.trajectories])
    return [float(value) for value in np.where(correct, values, np.minimum(values, 0))]


CHOICES = ("1", "2")
_DIGIT = re.compile(r"(?<![\w.])[12](?![\w.]*\w)")


async def compare(
    ask: Ask,
    settings: JudgeSection,
    gate: asyncio.Semaphore,
    images: Sequence[EncodedImage],
    answer: str,
    reference: str,
) -> tuple[float, dict[str, float]]:
    """Ask in both orders, within `gate`. Returns the answer's value, which is the mean probability of its choice where
    the judge gives it, and notes."""
    ours, theirs = (quoted(text, settings.max_chars) for text in (answer, reference))
    if ours == theirs:
        return 0.5, _notes(0.5)

    async def reply(first: str, second: str) -> Answer:
        texts = {"{first}": first, "{second}": second}
        # In one pass: a text that holds a placeholder is left as it is.
        question = re.sub(r"\{first\}|\{second\}", lambda match: texts[match[0]], settings.question)
        message = Message("user", (*images, question))
        asked = Question((message,), settings.answer_tokens, choices=CHOICES if settings.guided else ())
        asked = asked.with_reason() if settings.guided == "reason" else asked
        async with gate:
            return await ask_again(
                ask,
                lambda attempt: replace(asked, seed=attempt),
                attempts=settings.attempts,
                deadline_s=settings.deadline_s,
                who="judge",
            )

    replies = await all_or_none([reply(ours, theirs), reply(theirs, ours)])
    shown_first = [_preference(one.lines) for one in replies]
    win = {(1.0, 0.0): 1.0, (0.0, 1.0): 0.0}.get((shown_first[0], shown_first[1]), 0.5)
    given, swapped = (one.probabilities if settings.probabilities else None for one in replies)
    value = (given["1"] + swapped["2"]) / 2 if given and swapped else win
    return value, _notes(win, shown_first, sum(one.prompt_tokens + one.sampled_tokens for one in replies))


def _notes(win: float, shown_first: Sequence[float] = (), tokens: int = 0) -> dict[str, float]:
    """What `judge_metrics` reads: whether the answer won, and the replies' preferences for the text shown first."""
    return {
        "judge_win": win,
        "judge_requests": float(len(shown_first)),
        "judge_first": shown_first.count(1) / len(shown_first) if shown_first else -1.0,  # -1: nobody was asked
        "judge_contradicts": float(bool(shown_first) and win == 0.5),
        "judge_unclear": float(shown_first.count(0.5)),
        "judge_refused": 0.0,
        "judge_tokens": float(tokens),
    }


def _preference(text: str) -> float:
    """1 if the reply's last line names the text shown first, 0 for the second, 0.5 where it names neither or both."""
    named = set(_DIGIT.findall(text.strip().rpartition("\n")[2]))
    return float(named == {"1"}) if len(named) == 1 else 0.5


@register_reward_part("judge")
async def judge(answered: AnsweredGroup) -> Noted:
    """A model compares each answer with a reference, in both orders. By default it is the base model of the very
    replicas that serve the policy.

    An answer that is preferred in both orders wins (1), one that is preferred in neither loses (0), and where the
    orders contradict each other the judge has looked at the place and not at the text (0.5). Answers that are malformed
    or speak to the judge lose without a question. Raises UserInputError without a reference, EndpointError where the
    judge gives no reply in time.
    """
    settings, members = answered.reward_settings.judge, answered.group.trajectories
    started = time.monotonic()
    texts = [without_thoughts(said[-1]) for said in answered.answers]
    asked = [
        place
        for place, (one, text) in enumerate(zip(members, texts, strict=True))
        if one.turns[-1].well_formed and not why_not_judged(text, settings.max_chars)
    ]
    values, notes = [0.0] * len(members), [_notes(0.0) | {"judge_refused": 1.0} for _ in members]
    if asked:
        reference, cost = await _reference(answered)
        gate = _gate_of(settings, asyncio.get_running_loop())
        elsewhere = settings.endpoint
        endpoint = ServedEndpoint(answered.policy, answered.text) if elsewhere is None else _http_endpoint(elsewhere)
        async with endpoint.open() as ask:
            opinions = await all_or_none(
                [compare(ask, settings, gate, members[place].images, texts[place], reference) for place in asked]
            )
        for place, opinion in zip(asked, opinions, strict=True):
            values[place], notes[place] = opinion
        # The group's one question for a reference is counted with its first answer.
        notes[0]["judge_requests"] += cost > 0
        notes[0]["judge_tokens"] += cost
    seconds = time.monotonic() - started
    return Noted(values, [{**one, "judge_seconds": seconds} for one in notes])


async def _reference(answered: AnsweredGroup) -> tuple[str, int]:
    """The text that the group's answers are compared with, and how many tokens it cost."""
    settings, members = answered.reward_settings.judge, answered.group.trajectories
    if settings.against == "start":
        return await _start(answered, members[0], settings.start_tokens)
    # An episode that was cut off never got its reference, and the others of the group have the same.
    for one in members:
        if isinstance(text := one.info.get(settings.key), str) and text.strip():
            return text, 0
    raise UserInputError(
        f"The environment's info has no text under {settings.key!r} to compare answers with: name the key that has one "
        "in env.reward.judge.key, or set env.reward.judge.against to start."
    )


async def _start(answered: AnsweredGroup, one: Trajectory, max_new_tokens: int) -> tuple[str, int]:
    """The base model's greedy answer to the prompt of an episode, and its tokens."""
    if len(one.turns) > 1:
        raise UserInputError(
            f"env.reward.judge.against: start compares answers to one prompt, and this episode had {len(one.turns)} "
            "turns: use against: reference."
        )
    codec = answered.text.codec
    prompt = answered.text.collapse(one.token_ids[: one.turns[0].start], one.images)
    shown = one.images[: int((prompt == codec.image_token_id).sum())]
    sampling = SamplingParams(max_new_tokens, temperature=0.0)
    request = GenerationRequest(f"{one.trajectory_id}:start", prompt, sampling, shown, BASE_MODEL)
    completion = await answered.policy.generate(request)
    said = completion.samples[0].token_ids
    return without_thoughts(codec.decode(said)), len(completion.prompt_ids) + len(said)


# One for all groups: it remembers how the server wants choices to be enforced.
_http_endpoint = lru_cache(maxsize=16)(HTTPEndpoint)


@lru_cache(maxsize=16)
def _gate_of(settings: JudgeSection, loop: asyncio.AbstractEventLoop) -> asyncio.Semaphore:
    """One for all groups of a worker, whose loop it is."""
    elsewhere = settings.endpoint and settings.endpoint.max_in_flight
    return asyncio.Semaphore(min(settings.max_in_flight, elsewhere or settings.max_in_flight))


OWN = "env"  # the environment's own reward


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
    found = await all_or_none([_paid(name, part, answered) for name, part in parts.items()])
    paid = dict(zip(parts, found, strict=True))
    scored = []
    for place, one in enumerate(group.trajectories):
        info = dict(one.info)
        at_the_end: dict[str, float] = {}
        for name, noted in paid.items():
            info |= noted.notes[place]
            at_the_end |= noted.metrics
            if (value := noted.values[place]) is not None:
                at_the_end[name] = value
        scored.append(_weighted(replace(one, info=info), settings, at_the_end))
    return replace(group, trajectories=scored)


def part_of(one: RewardFunction) -> RewardPart:
    """A reward function as a part; a name that is no built-in function's may be a registered part's. Raises
    UserInputError."""
    if one.given is None and one.function in REWARD_PARTS and one.function not in FUNCTIONS:
        return REWARD_PARTS[one.function]
    load_function(one)

    async def part(answered: AnsweredGroup) -> Noted:
        return Noted(*await call_function(one, answered))

    return part


def try_functions(settings: RewardSection, info: Mapping[str, Any]) -> None:
    """Load the reward functions and compare their arguments with the first item's info. Raises UserInputError."""
    for one in settings.functions:
        # Other environments bring what they know with their last reply.
        if part_of(one) not in REWARD_PARTS.values() and "columns" in info:
            check_function(one, info)


def try_parts(settings: RewardSection, text: TextSide) -> None:
    """Call the registered parts that do not ask the policy once, on two made answers without an `info`.

    Raises UserInputError for one that takes an `AnsweredGroup` for something else: each group of a run would be lost.
    """
    ids, mask = np.arange(6, dtype=np.int32), np.arange(6) >= 3
    turns = [(Turn(3, 6, 0, StopReason.END_OF_TURN, reward),) for reward in (0.0, 1.0)]
    logprobs = np.where(mask, -1.0, 0.0).astype(np.float32)
    made = [Trajectory(str(k), ids, mask, logprobs, turns[k], TrajectoryStatus.COMPLETED) for k in range(2)]
    nobody: Any = None  # those that ask the policy are coroutine functions
    answered = AnsweredGroup(TrajectoryGroup("made", 0, made), (("0",), ("1",)), settings, nobody, text)
    for name in set(settings.weights) & REWARD_PARTS.keys():
        if not inspect.iscoroutinefunction(part := REWARD_PARTS[name]):
            try:
                part(answered)
            except (AttributeError, TypeError) as error:
                raise UserInputError(f"The reward part {name} does not run: {describe_error(error)}.") from error
            except Exception:  # it misses what a real episode has, such as a key of its info
                pass


async def _paid(name: str, part: RewardPart, answered: AnsweredGroup) -> Noted:
    try:
        found: Any = part(answered)
        if inspect.isawaitable(found):
            found = await found
        noted = found if isinstance(found, Noted) else Noted(found, [{}] * len(answered.group))
        values = [None if value is None else float(value) for value in noted.values]
    except RLVLMError as error:
        raise GroupFailedError("reward_part", f"The reward part {name} failed: {error}") from error
    except Exception as error:
        # User code may raise anything; it costs this group.
        raise GroupFailedError(
            "reward_part", f"The reward part {name} raised {type(error).__name__}: {error}"
        ) from error
    counted = len(values) == len(noted.notes) == len(answered.group)
    if not counted or not all(value is None or math.isfinite(value) for value in values):
        raise GroupFailedError(
            "reward_part",
            f"The reward part {name} gave {values[:4]} for {len(answered.group)} answers: it must give one finite "
            "number for each, or None where it does not apply.",
        )
    return replace(noted, values=values)


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
