"""EndpointPlayer: plays tasks by asking an OpenAI-compatible server for each turn, images as data URIs. It needs no Ray and no model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rl_vlm.asking.endpoints import Answer, Ask, Question
from rl_vlm.asking.retries import ask_again
from rl_vlm.config import RunConfig
from rl_vlm.envs.base import Info, VisionEnv
from rl_vlm.envs.images import blank, replaced
from rl_vlm.evaluation.outcomes import Outcome, Side, kept_info, outcome
from rl_vlm.rollout.env_pool import EnvPool
from rl_vlm.rollout.env_pools import EnvPools
from rl_vlm.rollout.failures import discard_on_failure
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.seeding import derive_seed
from rl_vlm.types import EncodedImage, Message, RLVLMError, TrajectoryStatus, as_encoded, judged_correct

# Longer replies are cut off: a token is rarely more than a word.
_CHARACTERS_PER_TOKEN = 64


@dataclass(slots=True)
class _Episode:
    env: VisionEnv
    messages: list[Message]
    info: Info
    reward: float = 0.0
    turns: int = 0
    tokens: int = 0
    status: TrajectoryStatus = TrajectoryStatus.COMPLETED
    ended: bool = field(default=False)


class EndpointPlayer:
    """Plays a run's environments with the answers of `ask`.

    Rewards are the environments' own: parts that `env.reward` adds need the served model. Budgets of turns and tokens are the run's; tokens are counted as the server reports them. A question is asked `1 + rollout.group_retries`
    times at most, those where the server is busy not counted, and has serving.request_timeout_s in all.
    """

    def __init__(self, run: RunConfig, ask: Ask) -> None:
        self._run, self._ask = run, ask
        self._pools = EnvPools(run)

    async def play(self, task: RolloutTask, side: Side = "policy") -> list[Outcome] | str:
        """The outcomes of all samples, or why the item is lost."""
        pool = self._pools.of(task)
        envs: list[VisionEnv] = []
        try:
            envs += await pool.borrow(task.size)
            openings = await pool.reset(envs, task.seed, {"index": task.index, "split": task.split})
            shown = await self._opening_images(task, pool, openings[0][0].messages)
            episodes = [
                _Episode(env, _with_images(observation.messages, shown), dict(info))
                for env, (observation, info) in zip(envs, openings, strict=True)
            ]
            async with asyncio.TaskGroup() as group:
                for sample, episode in enumerate(episodes):
                    group.create_task(self._play_out(task, sample, episode, pool))
        except RLVLMError as error:
            pool.discard(envs)
            return str(error)
        except ExceptionGroup as several:
            pool.discard(envs)
            lost, others = several.split(RLVLMError)
            if others is not None:
                raise others.exceptions[0] from None
            return str(lost.exceptions[0] if lost else several)
        pool.give_back(envs)
        return [self._outcome(task, side, sample, episode) for sample, episode in enumerate(episodes)]

    async def _play_out(self, task: RolloutTask, sample: int, episode: _Episode, pool: EnvPool) -> None:
        rollout = self._run.rollout
        while not episode.ended:
            budget = min(rollout.max_new_tokens_per_turn, rollout.max_new_tokens - episode.tokens)
            if budget < 1 or episode.turns >= rollout.max_turns:
                episode.status = TrajectoryStatus.TRUNCATED
                return
            answer = await self._answer(task, sample, episode, budget)
            episode.turns += 1
            episode.tokens += answer.sampled_tokens
            episode.messages.append(Message.of("assistant", answer.text))
            if answer.cut_off and rollout.require_end_of_turn:
                # The turn is not finished, so there is no answer to reward.
                episode.status = TrajectoryStatus.TRUNCATED
                return
            await self._act(task, episode, answer.text, pool)

    async def _answer(self, task: RolloutTask, sample: int, episode: _Episode, budget: int) -> Answer:
        messages = tuple(episode.messages)

        def question(attempt: int) -> Question:
            seed = derive_seed(task.sampling_seed, sample, episode.turns, attempt)
            return Question(messages, budget, task.temperature, seed=seed)

        attempts, deadline_s = 1 + self._run.rollout.group_retries, self._run.serving.request_timeout_s
        answer = await ask_again(self._ask, question, attempts=attempts, deadline_s=deadline_s, who="endpoint")
        longest = _CHARACTERS_PER_TOKEN * budget
        if len(answer.text) <= longest:
            return answer
        return Answer(answer.text[:longest], answer.prompt_tokens, answer.sampled_tokens, cut_off=True)

    async def _act(self, task: RolloutTask, episode: _Episode, text: str, pool: EnvPool) -> None:
        (result,) = await pool.step([episode.env], [text])
        if isinstance(result, RLVLMError):
            raise result
        observation, reward, terminated, truncated, info = result
        episode.reward += reward
        episode.info.update(info)
        episode.ended = terminated or truncated
        if truncated and not terminated:
            episode.status = TrajectoryStatus.TRUNCATED
        if not episode.ended:
            later = _images(observation.messages)
            blanks = [blank(image.width, image.height) for image in later]
            episode.messages += _with_images(observation.messages, blanks if task.view == "blank" else later)

    async def _opening_images(
        self, task: RolloutTask, pool: EnvPool, messages: Sequence[Message]
    ) -> Sequence[EncodedImage]:
        """What is shown in the first turn, by the task's view; each in the size of the true image."""
        own = _images(messages)
        if task.view == "blank":
            return [blank(image.width, image.height) for image in own]
        if task.view == "true":
            return own
        envs = await pool.borrow(1)
        with discard_on_failure(pool, envs):
            ((other, _),) = await pool.reset(envs, task.seed, {"index": task.other_index, "split": task.split})
        pool.give_back(envs)
        return replaced(own, _images(other.messages))

    def _outcome(self, task: RolloutTask, side: Side, sample: int, episode: _Episode) -> Outcome:
        return outcome(
            task,
            side,
            sample,
            env=task.env or self._run.env.id,
            correct=judged_correct(episode.info, episode.reward),
            reward=episode.reward,
            turns=episode.turns,
            tokens=episode.tokens,
            status=episode.status.value,
            info=kept_info(episode.info, self._run.evaluation.category),
        )

    def close(self) -> None:
        """Close all environments."""
        self._pools.close()


def _images(messages: Sequence[Message]) -> tuple[EncodedImage, ...]:
    return as_encoded([image for message in messages for image in message.images])


def _with_images(messages: Sequence[Message], images: Sequence[EncodedImage]) -> list[Message]:
    """The messages with other images in the places of their own, in order."""
    left: Iterator[EncodedImage] = iter(images)
    return [
        Message(message.role, tuple(part if isinstance(part, str) else next(left) for part in message.parts))
        for message in messages
    ]
