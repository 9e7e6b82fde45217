"""Episodes: the rules of a conversation with an environment, and how the policy plays the episodes of a group."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from rl_vlm import tracing
from rl_vlm.asking import Client
from rl_vlm.chat import EncodedSpan
from rl_vlm.config import RolloutSection
from rl_vlm.envs.base import Info, StepResult, VisionEnv
from rl_vlm.envs.errors import plain_values, reward_parts
from rl_vlm.envs.images import blanked, replaced
from rl_vlm.models.images import TextSide
from rl_vlm.rollout.env_pool import EnvPool, GroupFailedError, discard_on_failure, reason_of
from rl_vlm.rollout.history import Shown
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.seeding import derive_seed
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
    TokenSegment,
    Trajectory,
    TrajectoryGroup,
    TrajectoryStatus,
    Turn,
    as_encoded,
    images_of,
    judged_correct,
    with_images,
)

T = TypeVar("T")


@dataclass(slots=True)
class Conversation:
    """One episode while it is played. `num_sampled` counts tokens."""

    env: VisionEnv
    messages: list[Message]
    info: Info
    num_turns: int = field(default=0, kw_only=True)
    num_sampled: int = field(default=0, kw_only=True)
    reward: float = field(default=0.0, kw_only=True)
    status: TrajectoryStatus = field(default=TrajectoryStatus.COMPLETED, kw_only=True)

    @property
    def correct(self) -> bool:
        return judged_correct(self.info, self.reward)

    def next_budget(self, rollout: RolloutSection, room: int | None = None) -> int:
        """The tokens that the next turn may have, with `room` left in the context; 0 ends the episode, truncated."""
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
        observation, reward, terminated, truncated, info = result
        self.reward += reward
        self.info.update(info)
        if truncated and not terminated:
            self.status = TrajectoryStatus.TRUNCATED
        return None if terminated or truncated else observation


class ImageAccountingError(RLVLMError):
    """Engine and client count the tokens of a prompt's images differently.

    Do: set `model.min_pixels` and `model.max_pixels` alike for server and client.
    """


@dataclass(frozen=True, slots=True)
class SampledTurn(Sample):
    """What the policy said in a whole turn; `pieces` has one element at least."""

    replica_id: str = ""

    def as_turn(self, start: int, state_id: str = "") -> Turn:
        """The turn of a trajectory whose first token has the place `start`."""
        return Turn(
            start,
            start + len(self.token_ids),
            min(version for _, version in self.pieces),
            self.stop_reason,
            state_id=state_id,
            pieces=self.pieces if len(self.pieces) > 1 else (),
            well_formed=self.stop_reason is not StopReason.LENGTH,
        )


async def request_turns(
    policy: Client, request: GenerationRequest, expected: np.ndarray, name: str, piece: int | None
) -> list[SampledTurn]:
    """The `sampling.n` answers to a request, with at most `piece` tokens of a turn in one request (None: all).

    A turn in pieces (partial rollouts; Kimi k1.5, arXiv 2501.12599, section 2.6.2) may come from several versions of
    the policy; with in-flight updates one answer may, too (`Sample.pieces`). The prompt of a further piece is all that
    came before, whose keys and values are computed anew under the replica's present weights. So each token's
    log-probability is that of the version which sampled it, given everything before it.

    `expected` is the prompt with images expanded. Raises ImageAccountingError where the engine's differs.
    """
    budget, seeds = request.sampling.max_new_tokens, request.sampling.seeds
    length = budget if piece is None else min(piece, budget)
    first = await policy.generate(replace(request, sampling=replace(request.sampling, max_new_tokens=length)))
    check_prompt(first, expected, name)

    if piece is None:
        return [whole_turn([sample], [first]) for sample in first.samples]

    async def go_on(number: int) -> SampledTurn:
        samples, completions, asked = [first.samples[number]], [first], length
        # A sample that is shorter than it might be was ended by the engine.
        while samples[-1].stop_reason is StopReason.LENGTH and len(samples[-1].token_ids) == asked:
            said = np.concatenate([sample.token_ids for sample in samples])
            asked = min(length, budget - len(said))
            if not asked:
                break
            own_seed = None if seeds is None else (derive_seed(seeds[number], len(samples)),)
            further = replace(
                request,
                request_id=f"{request.request_id}+{number}.{len(samples)}",
                prompt_ids=np.concatenate([request.prompt_ids, said]),
                preferred_replica=completions[-1].replica_id,
                sampling=replace(request.sampling, max_new_tokens=asked, n=1, seeds=own_seed),
            )
            completions.append(await policy.generate(further))
            check_prompt(completions[-1], np.concatenate([expected, said]), name)
            samples.append(completions[-1].samples[0])
        return whole_turn(samples, completions)

    return await all_ended([go_on(number) for number in range(len(first.samples))])


def whole_turn(samples: Sequence[Sample], completions: Sequence[Completion]) -> SampledTurn:
    """A turn of these pieces, each a sample of the completion beside it."""
    pieces: list[tuple[int, int]] = []
    for sample, completion in zip(samples, completions, strict=True):
        for count, version in sample.pieces or ((len(sample.token_ids), completion.policy_version),):
            if pieces and pieces[-1][1] == version:
                count += pieces.pop()[0]
            pieces.append((count, version))
    return SampledTurn(
        np.concatenate([sample.token_ids for sample in samples]),
        np.concatenate([sample.logprobs for sample in samples]),
        samples[-1].stop_reason,
        pieces=tuple(pieces),
        replica_id=completions[-1].replica_id,
    )


async def all_ended(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order. All have ended before an error is raised: no discarded environment is stepped."""
    results: list[T] = []
    for outcome in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
        results.append(outcome)
    return results


def check_prompt(completion: Completion, expected: np.ndarray, name: str) -> None:
    """Raise ImageAccountingError unless the engine saw the `expected` prompt."""
    if not np.array_equal(completion.prompt_ids, expected):
        raise ImageAccountingError(
            f"Group {name}: the engine's prompt has {len(completion.prompt_ids)} tokens where grid / merge² gives "
            f"{len(expected)}; engine and client disagree about the images."
        )


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
    return replaced(images, images_of(other.messages))


def viewed_observation(observation: Observation, task: RolloutTask) -> Observation:
    """What the policy sees of an observation, its images encoded."""

    def seen(messages: Sequence[Message]) -> tuple[Message, ...]:
        return tuple(with_images(messages, viewed(images_of(messages), task)))

    return Observation(seen(observation.messages), None if observation.context is None else seen(observation.context))


def viewed(images: tuple[EncodedImage, ...], task: RolloutTask) -> tuple[EncodedImage, ...]:
    """What the policy sees in the place of a turn's images."""
    return blanked(images) if task.view == "blank" else images


@dataclass(slots=True)
class _Episode(Conversation):
    """A conversation in tokens. `ids` and `expanded` are those of the present segment, with one placeholder per image
    and with one token per feature; `before` are the expanded ones of the segments before it."""

    number: int
    images: list[EncodedImage]  # that the environment has shown
    shows: Shown
    ids: list[np.ndarray] = field(default_factory=list)
    expanded: list[np.ndarray] = field(default_factory=list)
    shown: list[EncodedImage] = field(default_factory=list)  # in the present segment
    before: list[np.ndarray] = field(default_factory=list)
    segments: list[tuple[int, int, list[EncodedImage]]] = field(default_factory=list)
    sampled: list[SampledTurn] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    start: int = 0  # of the present segment
    length: int = 0
    state_id: str = ""  # of what was shown last
    reply: str = ""  # what the policy said last

    def append(self, span: EncodedSpan, expanded: np.ndarray) -> None:
        self.ids.append(span.token_ids)
        self.expanded.append(expanded)
        self.shown.extend(span.images)
        self.length += len(expanded)

    def close_segment(self) -> None:
        self.segments.append((self.start, self.length, self.shown))
        self.before += self.expanded
        self.ids, self.expanded, self.shown, self.start = [], [], [], self.length

    def add_sampled(self, sampled: SampledTurn) -> None:
        self.turns.append(sampled.as_turn(self.length, self.state_id))
        self.sampled.append(sampled)
        self.append(EncodedSpan(sampled.token_ids, ()), sampled.token_ids)


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """A group whose episodes are reset and whose prompt is encoded, before the first request."""

    task: RolloutTask
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
            if observation == first:
                continue
            other = text.codec.encode_prompt(observation.messages)
            same_images = [image.sha256 for image in other.images] == [image.sha256 for image in prompt.images]
            if not same_images or not np.array_equal(other.token_ids, prompt.token_ids):
                raise GroupFailedError(
                    "env_not_seeded",
                    "Copies of an environment opened differently with the same index and seed: seed its reset.",
                )
        prompt = replace(prompt, images=await viewed_opening(prompt.images, task, pool))
        return OpenGroup(task, envs, openings, prompt, text.expand(prompt.token_ids, prompt.images, task.group_id))


async def run_group(
    task: RolloutTask,
    pool: EnvPool,
    policy: Client,
    text: TextSide,
    rollout: RolloutSection,
    max_context: int,
    opened: OpenGroup | None = None,
) -> TrajectoryGroup:
    """Sample one group, from where `open_group` left it. `max_context` bounds prompt and sampled tokens of an episode
    together. Raises GroupFailedError when any of its episodes fails."""
    if opened is None:
        opened = await open_group(task, pool, text)
    with discard_on_failure(pool, opened.envs):
        group = await _GroupPlayer(task, pool, policy, text, rollout, max_context).play(opened)
    pool.give_back(opened.envs)
    return group


@dataclass(frozen=True, slots=True)
class _GroupPlayer:
    """Plays the episodes of one group to their ends.

    The first turn is one request with `n = group size`: one prefill and one image encoding for all samples. After that
    the episodes are independent.
    """

    task: RolloutTask
    pool: EnvPool
    policy: Client
    text: TextSide
    rollout: RolloutSection
    max_context: int

    async def play(self, opened: OpenGroup) -> TrajectoryGroup:
        task, rollout, prompt, expanded = self.task, self.rollout, opened.prompt, opened.expanded
        first = opened.openings[0][0]
        budget = min(rollout.max_new_tokens_per_turn, rollout.max_new_tokens, self.max_context - len(expanded))
        if budget < 1:
            raise GroupFailedError(
                "prompt_too_long",
                f"The prompt of item {task.index} has {len(expanded)} tokens and serving.max_context is "
                f"{self.max_context}: raise it or shrink the images.",
            )
        seeds = [derive_seed(task.sampling_seed, sample, 0) for sample in range(task.size)]
        turns = await self._ask_policy("0", prompt, expanded, budget, seeds)
        shown = Observation(tuple(with_images(first.messages, prompt.images)))
        opening_state = state_id(shown)
        episodes = [
            _Episode(
                number=number,
                env=env,
                images=list(prompt.images),
                shows=Shown(rollout.history, shown.messages),
                messages=list(first.messages) if task.record else [],
                state_id=opening_state,
                info=dict(info),
            )
            for number, (env, (_, info)) in enumerate(zip(opened.envs, opened.openings, strict=True))
        ]
        for episode in episodes:
            episode.append(prompt, expanded)
        # The first actions are sent to all environments together, later ones by each episode alone.
        observations = await self._step(episodes, turns)
        await all_ended(
            [
                self._play_further_turns(episode, observation)
                for episode, observation in zip(episodes, observations, strict=True)
                if observation is not None
            ]
        )
        trajectories = [_finish(episode, task) for episode in episodes]
        return TrajectoryGroup(task.group_id, task.index, trajectories, task.env, task.stage)

    async def _ask_policy(
        self, name: str, prompt: EncodedSpan, expanded: np.ndarray, budget: int, seeds: Sequence[int], replica: str = ""
    ) -> list[SampledTurn]:
        task, grammar = self.task, self.rollout.grammar
        limits = budget, task.temperature, task.top_p, task.top_k
        request = GenerationRequest(
            request_id=f"{task.group_id}:{name}",
            prompt_ids=prompt.token_ids,
            images=prompt.images,
            sampling=SamplingParams(*limits, len(seeds), tuple(seeds), grammar=grammar),
            min_version=task.min_version,
            preferred_replica=replica,
        )
        return await request_turns(self.policy, request, expanded, task.group_id, self.rollout.partial_tokens)

    async def _play_further_turns(self, episode: _Episode, observation: Observation | None) -> None:
        """The second and later turns of one episode."""
        task = self.task
        while observation is not None:
            seen, said = viewed_observation(observation, task), episode.sampled[-1]
            rewritten = self._rewritten_prompt(episode, seen)
            span = rewritten or self._continuation(said, seen.messages)
            expanded = self.text.expand(span.token_ids, span.images, task.group_id)
            length = 0 if rewritten else episode.length - episode.start
            budget = episode.next_budget(self.rollout, self.max_context - length - len(expanded))
            if not budget:
                return
            if rewritten:
                episode.close_segment()
            episode.append(span, expanded)
            episode.images.extend(images_of(seen.messages))
            episode.state_id = state_id(seen)
            if task.record:
                episode.messages.extend(observation.messages)
            number, turn = episode.number, len(episode.turns)
            prompt = EncodedSpan(np.concatenate(episode.ids), tuple(episode.shown))
            seed, so_far = derive_seed(task.sampling_seed, number, turn), np.concatenate(episode.expanded)
            turns = await self._ask_policy(f"{number}:{turn}", prompt, so_far, budget, [seed], said.replica_id)
            (observation,) = await self._step([episode], turns)

    def _rewritten_prompt(self, episode: _Episode, observation: Observation) -> EncodedSpan | None:
        """The next prompt where it does not go on from the last one. Replies in it are the tokens that were sampled."""
        blocks = episode.shows.rewritten(episode.reply, observation)
        if blocks is None:
            return None
        spans = [self.text.codec.encode_prompt(blocks[0])]
        for number, block in zip(episode.shows.replies, blocks[1:], strict=True):
            said = episode.sampled[number]
            spans += [EncodedSpan(said.token_ids, ()), self._continuation(said, block)]
        ids = np.concatenate([span.token_ids for span in spans])
        return EncodedSpan(ids, tuple(image for span in spans for image in span.images))

    def _continuation(self, said: SampledTurn, messages: Sequence[Message]) -> EncodedSpan:
        """What follows a sampled turn."""
        return self.text.codec.encode_continuation(messages, said.stop_reason is StopReason.END_OF_TURN)

    async def _step(self, episodes: Sequence[_Episode], turns: Sequence[SampledTurn]) -> list[Observation | None]:
        """Give sampled turns to their environments; None where the episode ended."""
        acting: list[tuple[_Episode, str]] = []
        for episode, sampled in zip(episodes, turns, strict=True):
            action = episode.reply = self.text.codec.decode(sampled.token_ids)
            episode.add_sampled(sampled)
            if self.task.record:
                episode.messages.append(Message.of("assistant", action))
            if episode.add_turn(self.rollout, len(sampled.token_ids), sampled.stop_reason is StopReason.LENGTH):
                acting.append((episode, action))
        results: list[StepResult | RLVLMError] = []
        if acting:
            with tracing.span("environment", episodes=len(acting)):
                results = await self.pool.step([episode.env for episode, _ in acting], [action for _, action in acting])
        observations: dict[int, Observation] = {}
        for (episode, _), result in zip(acting, results, strict=True):
            if isinstance(result, RLVLMError):
                raise GroupFailedError(reason_of(result), str(result)) from result
            reward, info = result[1], result[4]
            turn, verdict = episode.turns[-1], info.get("well_formed")
            # numpy's kind of False too, which comparisons of arrays give; no other value is a verdict.
            ill_formed = isinstance(verdict, bool | np.bool_) and not verdict
            well_formed = turn.well_formed and not ill_formed
            episode.turns[-1] = replace(turn, reward=reward, parts=reward_parts(info), well_formed=well_formed)
            if (observation := episode.receive(result)) is not None:
                observations[episode.number] = observation
        return [observations.get(episode.number) for episode in episodes]


def state_id(observation: Observation) -> str:
    """16 hexadecimal digits that equal observations share: of the newest messages' roles, texts and images. Not of
    token ids, which depend on how the turn before ended."""
    found = hashlib.sha256()
    for message in observation.messages:
        found.update(json.dumps([message.role, len(message.parts)]).encode())
        for part in message.parts:
            shown = ["text", part] if isinstance(part, str) else ["image", as_encoded(part).sha256]
            found.update(json.dumps(shown).encode())
    return found.hexdigest()[:16]


def sampled_arrays(length: int, turns: Sequence[Turn], sampled: Sequence[SampledTurn]) -> tuple[np.ndarray, np.ndarray]:
    """The loss mask bool [T] and the log-probabilities float32 [T] of a trajectory of `length` tokens."""
    loss_mask, logprobs = np.zeros(length, dtype=bool), np.zeros(length, dtype=np.float32)
    for turn, said in zip(turns, sampled, strict=True):
        loss_mask[turn.start : turn.stop] = True
        logprobs[turn.start : turn.stop] = np.minimum(said.logprobs, 0)  # rounding in log_softmax can give +1e-8
    return loss_mask, logprobs


def _finish(episode: _Episode, task: RolloutTask) -> Trajectory:
    # A conversation ends with the policy's last turn: nothing is appended after it.
    loss_mask, logprobs = sampled_arrays(episode.length, episode.turns, episode.sampled)
    images = [*episode.images]
    segments: list[TokenSegment] = []
    if episode.segments:
        episode.close_segment()
        numbers = {image.sha256: number for number, image in enumerate(images)}
        for start, stop, shown in episode.segments:
            for image in shown:
                if image.sha256 not in numbers:  # made by the environment's `context`
                    numbers[image.sha256] = len(images)
                    images.append(image)
            segments.append(TokenSegment(start, stop, tuple(numbers[image.sha256] for image in shown)))
    return Trajectory(
        trajectory_id=f"{task.group_id}:{episode.number}",
        token_ids=np.concatenate([*episode.before, *episode.expanded], dtype=np.int32),
        loss_mask=loss_mask,
        logprobs=logprobs,
        turns=tuple(episode.turns),
        status=episode.status,
        images=tuple(images),
        info=plain_values(episode.info),
        messages=tuple(episode.messages),
        replica_ids=tuple(sampled.replica_id for sampled in episode.sampled),
        segments=tuple(segments),
    ).check()
