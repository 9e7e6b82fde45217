"""Plays the items of an evaluation, a bounded number at once, with any policy or an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

from rl_vlm.asking import Answer, Ask, Question, ask_again
from rl_vlm.config import PolicyConfig
from rl_vlm.envs.base import VisionEnv
from rl_vlm.evaluation.outcomes import Outcome, outcomes_of
from rl_vlm.rollout.env_pool import EnvPool, EnvPools, discard_on_failure
from rl_vlm.rollout.episodes import Conversation, all_ended, viewed_observation, viewed_opening
from rl_vlm.rollout.history import Shown
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.seeding import derive_seed
from rl_vlm.types import Message, RLVLMError, images_of, with_images
from rl_vlm.waiting import all_or_none

# Plays one task: its outcomes, or why it is lost.
Play = Callable[[RolloutTask], Awaitable[list[Outcome] | str]]


class EpisodesLostError(RLVLMError):
    """No episode could be finished, or too many in a row were lost.

    Do: repair the environment or the server that the last reason names, then `--resume`.
    """


async def play_tasks(
    tasks: Sequence[RolloutTask],
    play: Play,
    keep: Callable[[list[Outcome]], None],
    *,
    at_once: int,
    max_losses: int,
) -> dict[str, str]:
    """Play all tasks, `at_once` at a time; returns why which task was lost. Raises EpisodesLostError after `max_losses`
    losses in a row; what was finished before is kept."""
    slots, lost, in_a_row = asyncio.Semaphore(at_once), dict[str, str](), 0

    async def work(task: RolloutTask) -> None:
        nonlocal in_a_row
        async with slots:
            played = await play(task)
            if not isinstance(played, str):
                in_a_row = 0
                return keep(played)
            lost[task.group_id] = played
            in_a_row += 1
            if in_a_row >= max_losses:
                raise EpisodesLostError(f"{in_a_row} episodes in a row were lost, the last because of: {played}")

    await all_or_none([work(task) for task in tasks])
    return lost


def check_some_are_left(found: Collection[Any], lost: Mapping[str, str], count: int) -> None:
    """Raise EpisodesLostError where nothing was found of `count` tasks."""
    if not found:
        reason = next(iter(lost.values()), "no tasks")
        raise EpisodesLostError(f"All {count} episodes failed, the last because of: {reason}")


class EndpointPlayer:
    """Plays a run's environments with the answers of `ask`, within the run's budgets; the server reports how many
    tokens it sampled.

    Rewards are the environments' own: parts that `env.reward` adds need the served model. A question is asked `1 +
    rollout.group_retries` times at most, not counting those where the server is busy, and has serving.request_timeout_s
    in all.
    """

    def __init__(self, config: PolicyConfig, ask: Ask) -> None:
        self._config, self._ask = config, ask
        self._pools = EnvPools(config)

    async def play(self, task: RolloutTask) -> list[Outcome] | str:
        """The outcomes of all samples, or why the item is lost."""
        pool = self._pools.of(task)
        envs: list[VisionEnv] = []
        try:
            with discard_on_failure(pool, envs):
                envs += await pool.borrow(task.size)
                openings = await pool.reset(envs, task.seed, {"index": task.index, "split": task.split})
                first = openings[0][0].messages
                shown = with_images(first, await viewed_opening(images_of(first), task, pool))
                pairs = zip(envs, openings, strict=True)
                episodes = [Conversation(env, list(shown), dict(info)) for env, (_, info) in pairs]
                await all_ended([self._play_out(task, sample, one, pool) for sample, one in enumerate(episodes)])
        except RLVLMError as error:
            return str(error)
        pool.give_back(envs)
        return outcomes_of(self._config, task, episodes)

    async def _play_out(self, task: RolloutTask, sample: int, episode: Conversation, pool: EnvPool) -> None:
        rollout, answers = self._config.rollout, []
        shows = Shown(rollout.history, episode.messages)
        while budget := episode.next_budget(rollout):
            answer = await self._answer(task, sample, episode, budget)
            answers.append(Message.of("assistant", answer.text))
            episode.messages.append(answers[-1])
            if not episode.add_turn(rollout, answer.sampled_tokens, answer.cut_off):
                return
            (result,) = await pool.step([episode.env], [answer.text])
            if isinstance(result, RLVLMError):
                raise result
            observation = episode.receive(result)
            if observation is None:
                return
            seen = viewed_observation(observation, task)
            episode.messages += seen.messages
            if (blocks := shows.rewritten(answer.text, seen)) is not None:
                first, *others = blocks
                pairs = zip(shows.replies, others, strict=True)
                episode.messages[:] = [*first, *(one for turn, block in pairs for one in (answers[turn], *block))]

    async def _answer(self, task: RolloutTask, sample: int, episode: Conversation, budget: int) -> Answer:
        messages, turn = tuple(episode.messages), episode.num_turns

        def question(attempt: int) -> Question:
            seed = derive_seed(task.sampling_seed, sample, turn, attempt)
            return Question(messages, budget, task.temperature, grammar=self._config.rollout.grammar, seed=seed)

        attempts, deadline_s = 1 + self._config.rollout.group_retries, self._config.serving.request_timeout_s
        return await ask_again(self._ask, question, attempts=attempts, deadline_s=deadline_s, who="endpoint")

    def close(self) -> None:
        self._pools.close()
