"""Episodes of a user's own agent: its calls of the policy become the segments of a trajectory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from rl_vlm.asking import Client
from rl_vlm.config import RolloutSection
from rl_vlm.envs.base import Reply
from rl_vlm.envs.errors import plain_values, reward_parts
from rl_vlm.envs.foreign.agent import AgentEnv
from rl_vlm.envs.images import blanked, replaced
from rl_vlm.http.agents import AgentEndpoint
from rl_vlm.http.gate import RequestError
from rl_vlm.models.images import TextSide
from rl_vlm.rollout.env_pool import EnvPool, GroupFailedError, discard_on_failure, reason_of
from rl_vlm.rollout.episodes import SampledTurn, check_prompt, sampled_arrays, whole_turn
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.seeding import derive_seed
from rl_vlm.types import (
    Completion,
    EncodedImage,
    GenerationRequest,
    Message,
    Part,
    RLVLMError,
    SamplingParams,
    StopReason,
    TokenSegment,
    Trajectory,
    TrajectoryGroup,
    TrajectoryStatus,
)

_SEEN = 64  # items whose pictures are kept for swapped views


@dataclass(slots=True)
class _Sequence:
    """Calls that continue each other: `ids` with one placeholder per image, `expanded` with one token per feature."""

    ids: np.ndarray
    expanded: np.ndarray
    images: tuple[EncodedImage, ...]
    text: bytes = b""  # of `ids`
    messages: list[Message] = field(default_factory=list)  # as the policy saw them
    turns: list[tuple[int, SampledTurn]] = field(default_factory=list)  # each with its first token
    is_busy: bool = False  # a call that continues it is running


class AgentEpisode:
    """The calls of one episode. They are sampled as the task says, whatever the agent asks for: the learner has to
    reproduce the distribution. Answers of a form that the agent asks for are kept, and not trained."""

    def __init__(
        self,
        task: RolloutTask,
        number: int,
        seen: dict[int, EncodedImage],
        policy: Client,
        text: TextSide,
        rollout: RolloutSection,
        max_context: int,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._task, self._number, self._policy, self._text = task, number, policy, text
        self._rollout, self._max_context = rollout, max_context
        self._seen = seen  # one picture of each of the last items, of all episodes here
        self._swapped: dict[str, EncodedImage] = {}
        self._sequences: list[_Sequence] = []
        self.calls, self.untrained, self.sampled, self.closed = 0, 0, 0, False

    async def complete(self, request: GenerationRequest) -> Completion:
        """Answer a call. Raises RequestError where a budget of the episode is spent."""
        rollout, codec = self._rollout, self._text.codec
        if self.closed:
            raise RequestError(400, "The episode has ended.")
        if self.calls + request.sampling.n > rollout.max_turns:
            raise RequestError(400, f"rollout.max_turns ({rollout.max_turns}) answers were given in this episode.")
        self.calls += request.sampling.n
        request = replace(request, images=tuple(map(self._viewed, request.images)))
        before, ids = self._continued(request)
        expanded = self._text.expand(ids, request.images, self._task.group_id)
        left = [request.sampling.max_new_tokens, rollout.max_new_tokens_per_turn, self._max_context - len(expanded)]
        budget = min(*left, (rollout.max_new_tokens - self.sampled) // request.sampling.n)
        if budget < 1:
            raise RequestError(400, "The episode's tokens are spent: see rollout.max_new_tokens, serving.max_context.")
        asked = replace(
            request,
            request_id=f"{self._task.group_id}:{self._number}:{self.calls}",
            prompt_ids=ids,
            sampling=self._sampling(request.sampling, budget),
            min_version=self._task.min_version,
            preferred_replica=before.turns[-1][1].replica_id if before is not None and before.turns else "",
        )
        if before is not None:
            before.is_busy = True
        try:
            completion = await self._policy.generate(asked)
        finally:
            if before is not None:
                before.is_busy = False
        check_prompt(completion, expanded, asked.request_id)
        turns = [whole_turn([sample], [completion]) for sample in completion.samples]
        self.sampled += sum(len(turn.token_ids) for turn in turns)
        is_trained = not request.sampling.bound
        self.untrained += 0 if is_trained else len(turns)
        for turn in reversed(turns):  # the first one goes on with the sequence, the others begin their own
            sequence = before if before is not None and turn is turns[0] else _Sequence(ids[:0], expanded, ())
            if sequence is not before:
                self._sequences.append(sequence)
            shown = self._message(ids[len(sequence.ids) :], request.images[len(sequence.images) :])
            said = Message.of("assistant" if is_trained else "user", codec.decode(turn.token_ids))
            sequence.messages += [shown, said]
            sequence.turns += [(len(expanded), turn)] if is_trained else []
            sequence.ids, sequence.expanded = (np.concatenate([one, turn.token_ids]) for one in (ids, expanded))
            sequence.images, sequence.text = request.images, self._bytes(sequence.ids)
        return completion

    def _sampling(self, wanted: SamplingParams, budget: int) -> SamplingParams:
        """Of what the agent asks for: the number, the stop strings and the form."""
        task = self._task
        seeds = [derive_seed(task.sampling_seed, self._number, self.calls, place) for place in range(wanted.n)]
        return SamplingParams(
            budget,
            task.temperature,
            task.top_p,
            task.top_k,
            wanted.n,
            tuple(seeds),
            stop=wanted.stop,
            choices=wanted.choices,
            grammar=wanted.grammar or (None if wanted.bound else self._rollout.grammar),
            opened_thought=wanted.opened_thought,
            max_thought_tokens=wanted.max_thought_tokens,
            top_logprobs=wanted.top_logprobs,
        )

    def _continued(self, request: GenerationRequest) -> tuple[_Sequence | None, np.ndarray]:
        """The longest sequence that a prompt goes on from, and the prompt with the tokens that were sampled in it: the
        client sends their text, which may be written in other tokens."""
        sizes = np.cumsum([len(self._text.codec.token_bytes(int(token))) for token in request.prompt_ids])
        whole = self._bytes(request.prompt_ids)
        for one in sorted(self._sequences, key=lambda one: -len(one.text)):
            place = int(np.searchsorted(sizes, len(one.text)))
            if (
                not one.is_busy
                and place < len(sizes) - 1
                and sizes[place] == len(one.text)
                and whole.startswith(one.text)
                and request.images[: len(one.images)] == one.images
            ):
                return one, np.concatenate([one.ids, request.prompt_ids[place + 1 :]])
        return None, request.prompt_ids

    def _viewed(self, image: EncodedImage) -> EncodedImage:
        """What the policy sees in the place of a picture, in its size; swapped: one that another item showed."""
        others = [one for index, one in self._seen.items() if index != self._task.index]
        if self._task.view == "swapped" and others:
            return self._swapped.setdefault(image.sha256, replaced([image], others[-1:])[0])
        self._seen[self._task.index] = image
        if len(self._seen) > _SEEN:
            del self._seen[next(iter(self._seen))]
        return image if self._task.view == "true" else blanked([image])[0]

    def _bytes(self, ids: np.ndarray) -> bytes:
        return b"".join(map(self._text.codec.token_bytes, ids.tolist()))

    def _message(self, ids: np.ndarray, images: Sequence[EncodedImage]) -> Message:
        """What the policy is shown, with the chat template's own marks."""
        first, *others = np.split(ids, np.flatnonzero(ids == self._text.codec.image_token_id))
        parts: list[Part] = [self._text.codec.text_of(first)]
        for image, piece in zip(images, others, strict=True):
            parts += [image, self._text.codec.text_of(piece[1:])]
        return Message("user", tuple(parts))

    def trajectory(self, reply: Reply) -> Trajectory:
        """What was sampled, with the reward at its end. Raises GroupFailedError where nothing is to be trained."""
        trained = [one for one in self._sequences if one.turns]
        if not trained:
            why = "only called it for answers of a form" if self.calls else "never called the policy"
            raise GroupFailedError("agent_without_calls", f"The agent {why}: use the client that it is given.")
        starts = np.cumsum([0, *(len(one.expanded) for one in trained)]).tolist()
        placed = [
            (start + first, said) for one, start in zip(trained, starts, strict=False) for first, said in one.turns
        ]
        turns, sampled = [said.as_turn(start) for start, said in placed], [said for _, said in placed]
        turns[-1] = replace(turns[-1], reward=reply.reward, parts=reward_parts(reply.info))
        mask, logprobs = sampled_arrays(starts[-1], turns, sampled)
        shown = np.cumsum([0, *(len(one.images) for one in trained)]).tolist()
        edges = zip(starts, starts[1:], shown, shown[1:], strict=False)
        segments = [TokenSegment(start, stop, tuple(range(*images))) for start, stop, *images in edges]
        cut = reply.truncated or any(turn.stop_reason is StopReason.LENGTH for turn in turns)
        return Trajectory(
            trajectory_id=f"{self._task.group_id}:{self._number}",
            token_ids=np.concatenate([one.expanded for one in trained], dtype=np.int32),
            loss_mask=mask,
            logprobs=logprobs,
            turns=tuple(turns),
            status=TrajectoryStatus.TRUNCATED if cut else TrajectoryStatus.COMPLETED,
            images=tuple(image for one in trained for image in one.images),
            info=plain_values({"calls": self.calls, "untrained_calls": self.untrained, **reply.info}),
            messages=tuple(said for one in trained for said in one.messages) if self._task.record else (),
            replica_ids=tuple(said.replica_id for said in sampled),
            segments=tuple(segments) if len(segments) > 1 else (),
        ).check()


async def run_agents(
    task: RolloutTask,
    endpoint: AgentEndpoint,
    pool: EnvPool,
    policy: Client,
    text: TextSide,
    rollout: RolloutSection,
    max_context: int,
) -> TrajectoryGroup:
    """Sample one group of an agent's episodes. Raises GroupFailedError when any of them fails."""
    envs: list[AgentEnv] = []
    with discard_on_failure(pool, envs), ExitStack() as stack:  # type: ignore[arg-type]
        envs += await pool.borrow(task.size)  # type: ignore[arg-type]
        await pool.reset(envs, task.seed, {"index": task.index, "split": task.split})
        episodes = [AgentEpisode(task, k, endpoint.seen, policy, text, rollout, max_context) for k in range(task.size)]
        tokens = [stack.enter_context(endpoint.opened(episode)) for episode in episodes]
        pairs = zip(envs, tokens, strict=True)
        replies = await pool.run([partial(env.act, endpoint.base_url, token) for env, token in pairs])
        for episode in episodes:
            episode.closed = True
        for reply in replies:
            if isinstance(reply, RLVLMError):
                raise GroupFailedError(reason_of(reply), str(reply)) from reply
        trajectories = [episode.trajectory(reply) for episode, reply in zip(episodes, replies, strict=True)]
    pool.give_back(envs)
    return TrajectoryGroup(task.group_id, task.index, trajectories, task.env, task.stage)
