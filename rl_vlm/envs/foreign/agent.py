"""Run an agent of the user's own: `async def agent(client, task)` talks to the policy as to any OpenAI server.

It returns the episode's reward: a number, or a `Reply` that has facts beside it. `client` is an `openai.AsyncOpenAI`
(`openai.OpenAI` for a `def` without `async`); other clients use `task.base_url` and `task.api_key`. A class has the
loop in `run(client, task)`, and the reward in `reward(task, result)`, whose result is what the loop returned.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from PIL import Image

from rl_vlm.envs.base import EpisodeEnv, Item, Reply
from rl_vlm.envs.data import TableSet
from rl_vlm.envs.errors import EnvError, as_reward
from rl_vlm.envs.questions import QUESTIONS
from rl_vlm.envs.sources import DataSource
from rl_vlm.types import Observation, UserInputError

MODEL = "policy"  # its name at the endpoint


@dataclass(frozen=True, slots=True)
class AgentTask:
    """One item, and where the policy answers during this episode."""

    item: Item
    base_url: str
    api_key: str  # opens this episode only
    question: str = ""  # of the data; without data there is none
    images: tuple[Image.Image, ...] = ()
    answer: str = ""
    model: str = MODEL

    @property
    def index(self) -> int:
        return self.item.index

    @property
    def split(self) -> str:
        return self.item.split

    @property
    def environ(self) -> dict[str, str]:
        """What a program that is started for this episode has to find in its environment."""
        return {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key}

    def random(self) -> np.random.Generator:
        """Random numbers of this item alone."""
        return self.item.random()


class AgentEnv(EpisodeEnv):
    """The items that an agent is given. A run's env runners play it with `act`; no one can step it.

    `data` holds questions as `Geo3k-v0` reads them. Without data the items are `num_train` and `num_test` numbers, or
    numbers without end. Further arguments are the agent's own keywords: of the function, or of the class, of which each
    episode has an object.
    """

    def __init__(
        self,
        agent: Callable[..., Any],
        data: DataSource | None = None,
        num_train: int | None = None,
        num_test: int | None = None,
        **arguments: Any,
    ) -> None:
        try:
            inspect.signature(agent).bind(*(() if isinstance(agent, type) else ("client", "task")), **arguments)
        except TypeError as error:
            raise UserInputError(
                f"{agent.__name__} does not take these arguments ({error}): correct env.kwargs, or --env-arg."
            ) from error
        rows = TableSet(QUESTIONS, data) if data is not None else None
        super().__init__(num_train=num_train, num_test=num_test, rows=rows)
        self._agent, self._arguments = agent, arguments
        self._item = Item("train", 0)

    def open(self, item: Item) -> Observation:
        self._item = item
        question = self.row(item)
        return Observation.user(*(question.parts() if question is not None else (f"Item {item.index}.",)))

    def reply(self, text: str) -> Reply:
        raise EnvError("An agent asks for answers itself: train, evaluate or roll it out.")

    def act(self, base_url: str, api_key: str) -> Reply:
        """Play the episode that was opened last; blocks. Raises EnvError where the agent returns no reward."""
        question = self.row(self._item)
        asked = {"question": question.problem, "answer": question.answer} if question is not None else {}
        images = tuple(image.to_pil() for image in question.images) if question is not None else ()
        task = AgentTask(self._item, base_url, api_key, **asked, images=images)
        if isinstance(self._agent, type):
            played = self._agent(**self._arguments)
            said = played.reward(task, _play(played.run, task))
        else:
            said = _play(partial(self._agent, **self._arguments), task)
        if isinstance(said, Reply):
            return Reply(as_reward(said.reward, "agent()"), info=dict(said.info), truncated=said.truncated)
        return Reply(as_reward(said, "agent()"))


def _play(loop: Callable[..., Any], task: AgentTask) -> Any:
    """What a loop returns, with asyncio or without."""
    openai, place = _openai(), {"base_url": task.base_url, "api_key": task.api_key}
    # Plain HTTP on this machine: without a proxy, and without certificates, which take 25 ms to read.
    how = {"verify": False, "trust_env": False}

    async def play() -> Any:
        async with openai.AsyncOpenAI(**place, http_client=openai.DefaultAsyncHttpxClient(**how)) as client:
            return await loop(client, task)

    if inspect.iscoroutinefunction(loop):
        return asyncio.run(play())
    with openai.OpenAI(**place, http_client=openai.DefaultHttpxClient(**how)) as client:
        return loop(client, task)


def _openai() -> Any:
    try:
        import openai
    except ModuleNotFoundError as error:
        raise UserInputError("An agent needs the package openai: install it with pip install openai.") from error
    return openai
