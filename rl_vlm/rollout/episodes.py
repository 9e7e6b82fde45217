"""Episodes and groups: runs the policy in environments until the episodes end.

A group's first turn is one request with `n = group size`: one prefill and one image encoding for all its samples.
After that the episodes of a group are independent.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rl_vlm import tracing
from rl_vlm.chat import EncodedSpan, expand_image_tokens
from rl_vlm.config import RolloutSection
from rl_vlm.envs.base import Info, StepResult, VisionEnv
from rl_vlm.envs.errors import plain_values, reward_parts
from rl_vlm.models.loading import TextSide
from rl_vlm.rollout.conversation import Conversation
from rl_vlm.rollout.env_pool import EnvPool
from rl_vlm.rollout.failures import GroupFailedError, discard_on_failure, reason_of
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.rollout.turns import CompletionClient, SampledTurn, sample_turns
from rl_vlm.rollout.views import viewed, viewed_opening
from rl_vlm.seeding import derive_seed
from rl_vlm.types import (
    EncodedImage,
    GenerationRequest,
    Message,
    Observation,
    RLVLMError,
    SamplingParams,
    StopReason,
    Trajectory,
    TrajectoryGroup,
    Turn,
)


@dataclass(slots=True)
class _Episode(Conversation):
    """One conversation while it grows. `ids` has one placeholder per image; `spans` hold the expanded pieces; `logprobs`
    those of each sampled turn."""

    number: int
    ids: list[np.ndarray]
    images: list[EncodedImage]
    spans: list[np.ndarray]
    logprobs: list[np.ndarray]
    turns: list[Turn] = field(default_factory=list)
    length: int = 0
    state_id: str = ""  # of what was shown last
    replicas: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """A group whose episodes are reset and whose prompt is encoded, before the first request."""

    envs: list[VisionEnv]
    openings: list[tuple[Observation, Info]]
    prompt: EncodedSpan
    expanded: np.ndarray  # the prompt's ids, one per image token


async def open_group(task: RolloutTask, pool: EnvPool, text: TextSide) -> OpenGroup:
    """Reset the environments of a group and encode what they show. Raises GroupFailedError."""
    envs: list[VisionEnv] = []
    with tracing.span("open"), discard_on_failure(pool, envs):
        envs += await pool.borrow(task.size)
        openings = await pool.reset(envs, task.seed, {"index": task.index, "split": task.split})
        first = openings[0][0]
        prompt = text.codec.encode_prompt(first.messages)
        for observation, _ in openings[1:]:
            _check_same_opening(observation, first, prompt, text)
        prompt = replace(prompt, images=await viewed_opening(prompt.images, task, pool))
        return OpenGroup(envs, openings, prompt, _expand(prompt, text, task.group_id))


async def run_group(
    task: RolloutTask,
    pool: EnvPool,
    policy: CompletionClient,
    text: TextSide,
    rollout: RolloutSection,
    max_context: int,
    opened: OpenGroup | None = None,
) -> TrajectoryGroup:
    """Sample one group, from where `open_group` left it. Raises GroupFailedError when any of its episodes fails.

    `max_context` bounds prompt and sampled tokens of an episode together.
    """
    if opened is None:
        opened = await open_group(task, pool, text)
    with discard_on_failure(pool, opened.envs):
        group = await _run_group(task, opened, pool, policy, text, rollout, max_context)
    pool.give_back(opened.envs)
    return group


async def _run_group(
    task: RolloutTask,
    opened: OpenGroup,
    pool: EnvPool,
    policy: CompletionClient,
    text: TextSide,
    rollout: RolloutSection,
    max_context: int,
) -> TrajectoryGroup:
    envs, openings, prompt, expanded = opened.envs, opened.openings, opened.prompt, opened.expanded
    first = openings[0][0]
    budget = min(rollout.max_new_tokens_per_turn, rollout.max_new_tokens, max_context - len(expanded))
    if budget < 1:
        raise GroupFailedError(
            "prompt_too_long",
            f"The prompt of item {task.index} has {len(expanded)} tokens and serving.max_context is "
            f"{max_context}: raise it or shrink the images.",
        )
    seeds = tuple(derive_seed(task.sampling_seed, sample, 0) for sample in range(task.size))
    request = GenerationRequest(
        request_id=f"{task.group_id}:0",
        prompt_ids=prompt.token_ids,
        images=prompt.images,
        sampling=SamplingParams(budget, task.temperature, task.top_p, task.top_k, task.size, seeds),
        min_version=task.min_version,
    )
    turns = await sample_turns(policy, request, expanded, task.group_id, rollout.partial_tokens)
    opening_state = state_id(first, prompt.images)
    episodes = [
        _Episode(
            number=number,
            env=env,
            ids=[prompt.token_ids],
            images=list(prompt.images),
            spans=[expanded],
            logprobs=[],
            messages=list(first.messages) if task.record else [],
            length=len(expanded),
            state_id=opening_state,
            info=dict(opening[1]),
        )
        for number, (env, opening) in enumerate(zip(envs, openings, strict=True))
    ]
    samples = list(zip(episodes, turns, strict=True))
    # The first actions are sent to all environments together, later ones by each episode alone.
    observations = await _act(samples, pool, text, rollout, task)
    going_on = [
        _continue(episode, observation, task, pool, policy, text, rollout, max_context)
        for (episode, _), observation in zip(samples, observations, strict=True)
        if observation is not None
    ]
    # All episodes end before an error is raised, so that no environment is stepped after it was discarded.
    for outcome in await asyncio.gather(*going_on, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
    finished = [_finish(episode, task) for episode in episodes]
    return TrajectoryGroup(task.group_id, task.index, finished, task.env, task.stage)


async def _continue(
    episode: _Episode,
    observation: Observation,
    task: RolloutTask,
    pool: EnvPool,
    policy: CompletionClient,
    text: TextSide,
    rollout: RolloutSection,
    max_context: int,
) -> None:
    """The second and later turns of one episode."""
    current: Observation | None = observation
    while current is not None:
        ended = episode.turns[-1].stop_reason is StopReason.END_OF_TURN
        span = text.codec.encode_continuation(current.messages, ended)
        span = replace(span, images=viewed(span.images, task))
        expanded = _expand(span, text, task.group_id)
        budget = episode.next_budget(rollout, max_context - episode.length - len(expanded))
        if not budget:
            return
        _append(episode, span.token_ids, expanded)
        episode.images.extend(span.images)
        episode.state_id = state_id(current, span.images)
        if task.record:
            episode.messages.extend(current.messages)
        turn = len(episode.turns)
        request = GenerationRequest(
            request_id=f"{task.group_id}:{episode.number}:{turn}",
            prompt_ids=np.concatenate(episode.ids),
            images=tuple(episode.images),
            sampling=SamplingParams(
                budget,
                task.temperature,
                task.top_p,
                task.top_k,
                seeds=(derive_seed(task.sampling_seed, episode.number, turn),),
            ),
            min_version=task.min_version,
            preferred_replica=episode.replicas[-1],
        )
        (said,) = await sample_turns(
            policy, request, np.concatenate(episode.spans), task.group_id, rollout.partial_tokens
        )
        (current,) = await _act([(episode, said)], pool, text, rollout, task)


async def _act(
    samples: Sequence[tuple[_Episode, SampledTurn]],
    pool: EnvPool,
    text: TextSide,
    rollout: RolloutSection,
    task: RolloutTask,
) -> list[Observation | None]:
    """Give sampled turns to their environments; None where the episode ended."""
    acting: list[tuple[_Episode, str]] = []
    for episode, sample in samples:
        start = episode.length
        _append(episode, sample.token_ids, sample.token_ids)
        episode.logprobs.append(sample.logprobs)
        oldest = min(version for _, version in sample.pieces)
        pieces = sample.pieces if len(sample.pieces) > 1 else ()
        episode.turns.append(
            Turn(
                start,
                episode.length,
                oldest,
                sample.stop_reason,
                state_id=episode.state_id,
                pieces=pieces,
                well_formed=sample.stop_reason is not StopReason.LENGTH,
            )
        )
        episode.replicas.append(sample.replica_id)
        action = text.codec.decode(sample.token_ids)
        if task.record:
            episode.messages.append(Message.of("assistant", action))
        if episode.add_turn(rollout, len(sample.token_ids), sample.stop_reason is StopReason.LENGTH):
            acting.append((episode, action))
    results: list[StepResult | RLVLMError] = []
    if acting:
        with tracing.span("environment", episodes=len(acting)):
            results = await pool.step([episode.env for episode, _ in acting], [action for _, action in acting])
    observations: dict[int, Observation] = {}
    for (episode, _), result in zip(acting, results, strict=True):
        if isinstance(result, RLVLMError):
            raise GroupFailedError(reason_of(result), str(result)) from result
        reward, info = result[1], result[4]
        turn = episode.turns[-1]
        episode.turns[-1] = replace(
            turn,
            reward=reward,
            parts=reward_parts(info),
            well_formed=turn.well_formed and not _is_false(info.get("well_formed")),
        )
        if (observation := episode.receive(result)) is not None:
            observations[episode.number] = observation
    return [observations.get(episode.number) for episode, _ in samples]


def _is_false(value: object) -> bool:
    """Whether it is a bool and false, numpy's kind too, which comparisons of arrays give; no other value is a verdict."""
    return isinstance(value, bool | np.bool_) and not value


def state_id(observation: Observation, images: Sequence[EncodedImage]) -> str:
    """16 hexadecimal digits that equal observations share: of roles, texts and the encoded `images`, in order.

    Not of token ids, which depend on how the turn before ended.
    """
    found = hashlib.sha256()
    numbered = iter(images)
    for message in observation.messages:
        found.update(json.dumps([message.role, len(message.parts)]).encode())
        for part in message.parts:
            shown = ["text", part] if isinstance(part, str) else ["image", next(numbered).sha256]
            found.update(json.dumps(shown).encode())
    return found.hexdigest()[:16]


def _append(episode: _Episode, ids: np.ndarray, expanded: np.ndarray) -> None:
    episode.ids.append(ids)
    episode.spans.append(expanded)
    episode.length += len(expanded)


def _finish(episode: _Episode, task: RolloutTask) -> Trajectory:
    loss_mask = np.zeros(episode.length, dtype=bool)
    logprobs = np.zeros(episode.length, dtype=np.float32)
    # A conversation ends with the policy's last turn: nothing is appended after it.
    for turn, sampled in zip(episode.turns, episode.logprobs, strict=True):
        loss_mask[turn.start : turn.stop] = True
        logprobs[turn.start : turn.stop] = np.minimum(sampled, 0)  # rounding in log_softmax can give +1e-8
    return Trajectory(
        trajectory_id=f"{task.group_id}:{episode.number}",
        token_ids=np.concatenate(episode.spans, dtype=np.int32),
        loss_mask=loss_mask,
        logprobs=logprobs,
        turns=tuple(episode.turns),
        status=episode.status,
        images=tuple(episode.images),
        info=plain_values(episode.info),
        messages=tuple(episode.messages),
        replica_ids=tuple(episode.replicas),
    ).check()


def _expand(span: EncodedSpan, text: TextSide, name: str) -> np.ndarray:
    counts = [text.count_image_tokens(image.width, image.height) for image in span.images]
    return expand_image_tokens(span.token_ids, text.codec.image_token_id, counts, name)


def _check_same_opening(observation: Observation, first: Observation, prompt: EncodedSpan, text: TextSide) -> None:
    if observation == first:
        return
    other = text.codec.encode_prompt(observation.messages)
    same_images = [image.sha256 for image in other.images] == [image.sha256 for image in prompt.images]
    if not same_images or not np.array_equal(other.token_ids, prompt.token_ids):
        raise GroupFailedError(
            "env_not_seeded",
            "Copies of an environment opened differently with the same index and seed: seed its reset.",
        )
