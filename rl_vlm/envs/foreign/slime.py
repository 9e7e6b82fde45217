"""Run environments written to slime's interactive interface, unchanged.

Such an environment is a module with `build_env(sample, args)`. What it builds has `reset() -> (obs, info)`, `step(text)
-> (obs, done, info)`, `format_observation(obs) -> message` and `close()`; an `obs` is a dict with `obs_str`, `role`
and, for images, `multi_modal_data`. One such environment is built per episode.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
from PIL import Image

from rl_vlm.envs import registry
from rl_vlm.envs.base import Count, EpisodeEnv, Info, Item, Reply
from rl_vlm.envs.data import QUESTIONS, DataSource, TableSet
from rl_vlm.envs.errors import EnvError, as_reward
from rl_vlm.envs.foreign.common import returned, to_message
from rl_vlm.rewards.math import grade_turns
from rl_vlm.types import Message, Observation, UserInputError


@dataclass
class Sample:
    """The task instance that `build_env` receives, under the names that such environments read."""

    prompt: str
    label: str | None
    metadata: dict[str, Any]
    multimodal_inputs: dict[str, list[Image.Image]]
    index: int = 0
    group_index: int = 0
    response: str = ""
    tokens: list[int] = field(default_factory=list)
    reward: float | None = None


class SlimeEnv(EpisodeEnv):
    """A VisionEnv around one interactive environment per episode.

    `env` is a `build_env` function, or names one as `rl_vlm.make` would. With `data` the samples are its questions: the
    prompt with its images opens the conversation, the answer is `sample.label`. Without, the sample is empty but for
    its metadata (split, index, seed) and `reset()` must bring the first message. All further arguments become
    attributes of `args`, next to `max_turns`.

    The reward, by `reward`: "grade" grades the last boxed answer that the policy itself wrote against `sample.label`
    at the end, as slime does; "env" takes `reward` from the info or observation of every step or, if there is none, the
    last `tool_score` at the end; "auto" takes the environment's `reward` if it gives one and grades otherwise
    (a `tool_score` counts only where there is no label: it judges a tool call, not the final answer).
    """

    def __init__(
        self,
        env: str | Callable[..., Any],
        data: DataSource | None = None,
        max_turns: Count = 3,
        reward: Literal["auto", "env", "grade"] = "auto",
        **args: Any,
    ) -> None:
        super().__init__(max_turns=max_turns, rows=TableSet(QUESTIONS, data) if data is not None else None)
        self._build = registry.find(env) if isinstance(env, str) else env
        if not callable(self._build):
            raise UserInputError(f"{env} is not a build_env(sample, args) function.")
        self._reward_source = reward
        self._args = SimpleNamespace(max_turns=max_turns, **args)
        self._inner: Any = None
        self._seed: int | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """See EpisodeEnv; the sample's metadata name the seed."""
        self._seed = seed
        return super().reset(seed=seed, options=options)

    def open(self, item: Item) -> tuple[Observation, Info]:
        """Build the environment of the item's question and open its conversation."""
        self.close()
        where = {"split": item.split, "index": item.index, "seed": self._seed}
        question, messages = self.row(item), []
        if question is None:
            self._sample = Sample("", None, where, {}, item.index, item.index)
        else:
            pictures = {"images": [image.to_pil() for image in question.images]}
            self._sample = Sample(question.problem, question.answer, where, pictures, item.index, item.index)
            messages.append(Message("user", question.parts()))
        self._turns: list[str] = []
        self._score: float | None = None
        self._env_rewarded = False
        if {"sample", "args"} <= inspect.signature(self._build).parameters.keys():
            self._inner = self._build(sample=self._sample, args=self._args)
        else:
            self._inner = self._build(self._sample, self._args)
        obs, info = returned(self._inner.reset(), "reset() -> (obs, info)")
        if obs and not (isinstance(obs, dict) and not obs.get("obs_str") and not obs.get("multi_modal_data")):
            messages.append(self._format(obs))
        if not messages:
            raise EnvError("There is nothing to ask: reset() brought no observation, and env.data names no questions.")
        return Observation(tuple(messages)), info

    def reply(self, text: str) -> Reply:
        """Pass the policy's text on; the episode ends when the environment is done."""
        self._turns.append(text)
        obs, done, info = returned(self._inner.step(text), "step(text) -> (obs, done, info)")
        if not isinstance(done, bool | np.bool_):
            raise EnvError("step() must return (obs, done, info) with a bool as done.")
        over = bool(done) or self.is_last_turn
        reward = self._read_reward(obs, info)
        info |= {"turn": self.turn, "status": "answered" if done else "out_of_turns" if over else "running"}
        if not over:
            return Reply(reward, Observation((self._format(obs),)), info)
        reward += self._final_reward(info)
        self.close()
        return Reply(reward, None, info, truncated=not done)

    def close(self) -> None:
        """Close the environment of the current episode, if there is one."""
        inner, self._inner = self._inner, None
        if inner is not None and hasattr(inner, "close"):
            inner.close()

    def _read_reward(self, obs: Any, info: Info) -> float:
        """The reward of this step from info or obs; remembers the last tool score."""
        if self._reward_source == "grade":
            return 0.0
        said = {**(obs if isinstance(obs, dict) else {}), **info}
        if said.get("tool_score") is not None:
            self._score = as_reward(said["tool_score"], "tool_score of step()")
        if said.get("reward") is None:
            return 0.0
        self._env_rewarded = True
        return as_reward(said["reward"], "step()")

    def _final_reward(self, info: Info) -> float:
        """The reward at the end of the episode, besides those of the steps."""
        if self._env_rewarded:
            return 0.0
        label, source = self._sample.label, self._reward_source
        if label is not None and source != "env":
            grade = grade_turns(self._turns, str(label))
            info |= {"correct": grade.correct, "answer": grade.answer, "reason": grade.reason}
            return float(grade.correct)
        if self._score is not None:
            info["correct"] = self._score >= 1.0
            return self._score
        raise EnvError(
            "The environment gave neither reward nor tool_score, and "
            + ("there is no label to grade against." if label is None else 'env.reward is "env".')
        )

    def _format(self, obs: Any) -> Message:
        """The message for an observation, by the environment's own `format_observation` where it has one.

        The usual one is its images, then its text, as the user.
        """
        if hasattr(self._inner, "format_observation"):
            return to_message(self._inner.format_observation(obs))
        if not isinstance(obs, dict):
            raise EnvError(f"An observation must be a dict with obs_str, not a {type(obs).__name__}.")
        content: list[dict[str, Any]] = []
        for images in (obs.get("multi_modal_data") or {}).values():
            shown = images if isinstance(images, list | tuple) else [images]
            content += [{"type": "image", "image": image} for image in shown]
        return to_message(
            {"role": "user", "content": [*content, {"type": "text", "text": str(obs.get("obs_str", ""))}]}
        )
