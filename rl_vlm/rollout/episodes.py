"""Conversation: the rules of an episode, whoever answers: budgets, unfinished turns, and what ends it."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from rl_vlm import tracing
from rl_vlm.chat import EncodedSpan, expand_image_tokens
from rl_vlm.config import RolloutSection
from rl_vlm.envs.base import Info, StepResult, VisionEnv
from rl_vlm.envs.errors import plain_values, reward_parts
from rl_vlm.envs.images import blanked, replaced
from rl_vlm.models.loading import TextSide
from rl_vlm.numerics import derive_seed
from rl_vlm.rollout.env_pool import EnvPool, GroupFailedError, discard_on_failure, reason_of
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.types import (
    Completion,
    EncodedImage,
    GenerationRequest,
    Message,
    Observation,
    RLVLMError,
    Sample,
    SamplingParams,
    StopReason,
    Trajectory,
    TrajectoryGroup,
    TrajectoryStatus,
    Turn,
    as_encoded,
)


@dataclass(slots=True)
class Conversation:
    """One episode while it is played. `num_sampled` counts tokens."""

    env: VisionEnv
    messages: list[Message]
    info: Info
    num_turns: int = field(default=0, kw_only=True)
    num_sampled: int = field(default=0, kw_only=True)
    status: TrajectoryStatus = field(default=TrajectoryStatus.COMPLETED, kw_only=True)

    def next_budget(self, rollout: RolloutSection, room: int | None = None) -> int:
        """The tokens that the next turn may have, with `room` left in the context. 0 ends the episode, which is truncated."""
        left = min(rollout.max_new_tokens_per_turn, rollout.max_new_tokens - self.num_sampled)
        budget = max(left if room is None else min(left, room), 0)
        if budget == 0 or self.num_turns >= rollout.max_turns:
            self.status = TrajectoryStatus.TRUNCATED
            return 0
        return budget

    def add_turn(self, rollout: RolloutSection, tokens: int, cut_off: bool) -> bool:
        """Count a turn; whether it goes to the environment. A turn that is not finished holds no answer to reward."""
        self.num_turns += 1
        self.num_sampled += tokens
        if cut_off and rollout.require_end_of_turn:
            self.status = TrajectoryStatus.TRUNCATED
            return False
        return True

    def receive(self, result: StepResult) -> Observation | None:
        """Take in what the environment replied; None where that ended the episode."""
        observation, _, terminated, truncated, info = result
        self.info.update(info)
        if truncated and not terminated:
            self.status = TrajectoryStatus.TRUNCATED
        return None if terminated or truncated else observation


# One sampled turn, in one request or, for partial rollouts, in pieces that may come from several versions of the policy.
#
# With in-flight updates one request's answer may consist of several versions, too (`Sample.pieces`).
#
# A piece that ends because of its length goes on from what was sampled so far: the next request's prompt is the prompt and these tokens,
# whose keys and values are computed anew under the weights that the replica has by then. So each token's log-probability is that of the
# version which sampled it, given everything before it (partial rollouts: Kimi k1.5, arXiv 2501.12599, section 2.6.2).


class CompletionClient(Protocol):
    """Answers generation requests: the Serve client, or an engine in the same process."""

    async def generate(self, request: GenerationRequest) -> Completion:
        """Answer one request."""
        ...


class ImageAccountingError(RLVLMError):
    """Engine and client count the tokens of a prompt's images differently."""


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """What the policy said: token ids int32 [T], log-probabilities float32 [T], and (tokens, version) of each piece in order."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    stop_reason: StopReason
    pieces: tuple[tuple[int, int], ...]
    replica_id: str


async def sample_turns(
    policy: CompletionClient, request: GenerationRequest, expected: np.ndarray, name: str, piece: int | None
) -> list[SampledTurn]:
    """The `sampling.n` answers to a request; `piece`: at most this many tokens of a turn in one request, None for all.

    `expected` is the prompt with images expanded. Raises ImageAccountingError where the engine's differs.
    """
    first = request if piece is None else _shortened(request, min(piece, request.sampling.max_new_tokens))
    completion = await policy.generate(first)
    _check_prompt(completion, expected, name)
    turns = [_turn([sample], [completion]) for sample in completion.samples]
    if piece is None:
        return turns
    outcomes = await asyncio.gather(
        *(
            _go_on(policy, request, expected, name, piece, number, sample, completion)
            for number, sample in enumerate(completion.samples)
        ),
        return_exceptions=True,
    )
    whole = []
    for outcome in outcomes:  # all have ended before an error is raised
        if isinstance(outcome, BaseException):
            raise outcome
        whole.append(outcome)
    return whole


async def _go_on(
    policy: CompletionClient,
    request: GenerationRequest,
    expected: np.ndarray,
    name: str,
    piece: int,
    number: int,
    sample: Sample,
    completion: Completion,
) -> SampledTurn:
    """The rest of answer `number`, of which `sample` is the first piece."""
    budget, seeds = request.sampling.max_new_tokens, request.sampling.seeds
    samples, completions, asked = [sample], [completion], min(piece, budget)
    # A sample that is shorter than it might be was ended by the engine.
    while samples[-1].stop_reason is StopReason.LENGTH and len(samples[-1].token_ids) == asked:
        said = np.concatenate([part.token_ids for part in samples])
        asked = min(piece, budget - len(said))
        if not asked:
            break
        further = replace(
            _shortened(request, asked),
            request_id=f"{request.request_id}+{number}.{len(samples)}",
            prompt_ids=np.concatenate([request.prompt_ids, said]),
            preferred_replica=completions[-1].replica_id,
        )
        own_seed = None if seeds is None else (derive_seed(seeds[number], len(samples)),)
        further = replace(further, sampling=replace(further.sampling, n=1, seeds=own_seed))
        completions.append(await policy.generate(further))
        _check_prompt(completions[-1], np.concatenate([expected, said]), name)
        samples.append(completions[-1].samples[0])
    return _turn(samples, completions)


def _shortened(request: GenerationRequest, max_new_tokens: int) -> GenerationRequest:
    return replace(request, sampling=replace(request.sampling, max_new_tokens=max_new_tokens))


def _turn(samples: list[Sample], completions: list[Completion]) -> SampledTurn:
    pieces: list[tuple[int, int]] = []
    for sample, completion in zip(samples, completions, strict=True):
        for count, version in sample.pieces or ((len(sample.token_ids), completion.policy_version),):
            if pieces and pieces[-1][1] == version:
                count += pieces.pop()[0]
            pieces.append((count, version))
    return SampledTurn(
        samples[0].token_ids if len(samples) == 1 else np.concatenate([sample.token_ids for sample in samples]),
        samples[0].logprobs if len(samples) == 1 else np.concatenate([sample.logprobs for sample in samples]),
        samples[-1].stop_reason,
        tuple(pieces),
        completions[-1].replica_id,
    )


def _check_prompt(completion: Completion, expected: np.ndarray, name: str) -> None:
    if not np.array_equal(completion.prompt_ids, expected):
        raise ImageAccountingError(
            f"Group {name}: the engine's prompt has {len(completion.prompt_ids)} tokens where grid / merge² gives "
            f"{len(expected)}; engine and client disagree about the images."
        )


# What the policy sees in the place of an environment's images, where a task asks whether it needs them.


async def viewed_opening(
    images: tuple[EncodedImage, ...], task: RolloutTask, pool: EnvPool
) -> tuple[EncodedImage, ...]:
    """What the policy sees in the place of the first turn's images; sizes stay, so the tokens do too."""
    if task.view != "swapped":
        return viewed(images, task)
    envs = await pool.borrow(1)
    with discard_on_failure(pool, envs):
        ((other, _),) = await pool.reset(envs, task.seed, {"index": task.other_index, "split": task.split})
    pool.give_back(envs)
    return replaced(images, as_encoded([image for message in other.messages for image in message.images]))


def viewed(images: tuple[EncodedImage, ...], task: RolloutTask) -> tuple[EncodedImage, ...]:
    """What the policy sees in the place of a turn's images."""
    return blanked(images) if task.view == "blank" else images


# Episodes and groups: runs the policy in environments until the episodes end.
#
# A group's first turn is one request with `n = group size`: one prefill and one image encoding for all its samples.
# After that the episodes of a group are independent.


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
    counts = [text.images.count_tokens(image.width, image.height) for image in span.images]
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
