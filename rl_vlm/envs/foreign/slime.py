"""Run environments written to slime's interactive interface, unchanged.

`build_env(sample, args)` of a module builds one for each episode. It has `reset() -> (obs, info)`, `step(text) -> (obs,
done, info)`, `format_observation(obs) -> message` and `close()`; an `obs` is a dict with `obs_str`, `role` and, for
images, `multi_modal_data`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from rl_vlm.envs.base import Count, EpisodeEnv, Info, Item, Reply
from rl_vlm.envs.data import TableSet
from rl_vlm.envs.errors import EnvError, as_reward
from rl_vlm.envs.foreign.common import read_result, to_message
from rl_vlm.envs.images import as_image
from rl_vlm.envs.questions import QUESTIONS
from rl_vlm.envs.sources import DataSource
from rl_vlm.rewards.math import grade_turns
from rl_vlm.types import Message, Observation, Part


class SlimeEnv(EpisodeEnv):
    """A VisionEnv around one interactive environment per episode.

    `env` is a `build_env` function. With `data` the samples are its questions: the
    prompt with its images opens the conversation, and the answer is `sample.label`. Without it a sample holds its
    metadata alone (split, index, seed), and `reset()` must bring the first message. Further arguments become attributes
    of `args`, next to `max_turns`.

    reward: "grade" grades the last boxed answer that the policy wrote against `sample.label`, at the end, as slime
    does. "env" takes `reward` from the info or observation of every step; if there is none, the last `tool_score` at
    the end. "auto" takes the environment's `reward` if it gives one, else the grade; `tool_score` counts only without a
    label, because it judges a tool call and not the final answer.
    """

    def __init__(
        self,
        env: Callable[..., Any],
        data: DataSource | None = None,
        max_turns: Count = 3,
        reward: Literal["auto", "env", "grade"] = "auto",
        **args: Any,
    ) -> None:
        super().__init__(max_turns=max_turns, rows=TableSet(QUESTIONS, data) if data is not None else None)
        self._build, self._reward_source = env, reward
        self._args = SimpleNamespace(max_turns=max_turns, **args)
        self._inner: Any = None

    def open(self, item: Item) -> tuple[Observation, Info]:
        self.close()
        question = self.row(item)
        # Under the names that such environments read.
        sample = SimpleNamespace(index=item.index, group_index=item.index, response="", tokens=[], reward=None)
        sample.metadata = {"split": item.split, "index": item.index, "seed": self.np_random_seed}
        sample.prompt, sample.label, sample.multimodal_inputs = "", None, {}
        if question is not None:
            sample.prompt, sample.label = question.problem, question.answer
            sample.multimodal_inputs = {"images": [image.to_pil() for image in question.images]}
        self._label = sample.label
        self._turns: list[str] = []
        self._score: float | None = None
        self._env_rewarded = False
        both = {"sample": sample, "args": self._args}
        by_name = both.keys() <= inspect.signature(self._build).parameters.keys()
        self._inner = self._build(**both) if by_name else self._build(*both.values())
        obs, info = read_result(self._inner.reset(), "reset() -> (obs, info)")
        messages = [Message("user", question.parts())] if question else []
        if obs and not (isinstance(obs, dict) and not obs.get("obs_str") and not obs.get("multi_modal_data")):
            messages.append(self._format(obs))
        if not messages:
            raise EnvError("There is nothing to ask: reset() brought no observation, and env.data names no questions.")
        return Observation(tuple(messages)), info

    def reply(self, text: str) -> Reply:
        self._turns.append(text)
        obs, done, info = read_result(self._inner.step(text), "step(text) -> (obs, done, info)")
        if not isinstance(done, bool | np.bool_):
            raise EnvError("step() must return (obs, done, info) with a bool as done.")
        over = bool(done or self.is_last_turn)
        info |= {"turn": self.turn, "status": "answered" if done else "out_of_turns" if over else "running"}
        reward = self._reward({**(obs if isinstance(obs, dict) else {}), **info}, info, over)
        if not over:
            return Reply(reward, Observation((self._format(obs),)), info)
        self.close()
        return Reply(reward, None, info, truncated=not done)

    def close(self) -> None:
        inner, self._inner = self._inner, None
        if hasattr(inner, "close"):
            inner.close()

    def _reward(self, said: Info, info: Info, over: bool) -> float:
        """The reward of a step, of which the environment said this; at the end that of an episode without one."""
        if self._reward_source != "grade":
            if said.get("tool_score") is not None:
                self._score = as_reward(said["tool_score"], "tool_score of step()")
            if said.get("reward") is not None:
                self._env_rewarded = True
                return as_reward(said["reward"], "step()")
        if not over or self._env_rewarded:
            return 0.0
        if self._label is not None and self._reward_source != "env":
            grade = grade_turns(self._turns, str(self._label))
            info |= {"correct": grade.correct, "answer": grade.answer, "reason": grade.reason}
            return float(grade.correct)
        if self._score is not None:
            info["correct"] = self._score >= 1.0
            return self._score
        why = "there is no label to grade against" if self._label is None else 'env.reward is "env"'
        raise EnvError(f"The environment gave neither reward nor tool_score, and {why}.")

    def _format(self, obs: Any) -> Message:
        """The message of an observation, by the environment's own `format_observation` if it has one; else its images
        and then its text, as the user."""
        if hasattr(self._inner, "format_observation"):
            return to_message(self._inner.format_observation(obs))
        if not isinstance(obs, dict):
            raise EnvError(f"An observation must be a dict with obs_str, not a {type(obs).__name__}.")
        parts: list[Part] = []
        for images in (obs.get("multi_modal_data") or {}).values():
            parts += map(as_image, images if isinstance(images, list | tuple) else [images])
        return Message("user", (*parts, str(obs.get("obs_str", ""))))
