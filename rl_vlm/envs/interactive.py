"""Run environments written to slime's interactive interface, unchanged.

Such an environment is a module with `build_env(sample, args)`. What it builds has `reset() -> (obs, info)`,
`step(text) -> (obs, done, info)`, `format_observation(obs) -> message` and `close()`; an `obs` is a dict with `obs_str`,
`role` and, for images, `multi_modal_data`. One such environment is built per episode.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
from PIL import Image

from rl_vlm.envs import registry
from rl_vlm.envs.arguments import Arguments, check_all_used
from rl_vlm.envs.base import Info, StepResult, VisionEnv
from rl_vlm.envs.data import DataSource, ImageTable, check_max_turns
from rl_vlm.envs.errors import ROLES, EnvError, as_reward
from rl_vlm.envs.images import as_image
from rl_vlm.envs.tables import TableSet
from rl_vlm.rewards.math import grade_turns
from rl_vlm.types import Message, Observation, Part, Split, UserInputError

RewardSource = Literal["auto", "env", "grade"]


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


class InteractiveEnvAdapter(VisionEnv):
    """A VisionEnv around one interactive environment per episode.

    `env` is a `build_env` function, or names one as `rl_vlm.make` would. With `data` (see `open_split`) the samples are
    its questions: the prompt with its images opens the conversation, the answer is `sample.label`. Without, the sample
    is empty but for its metadata (split, index, seed) and `reset()` must bring the first message. All further arguments
    become attributes of `args`, next to `max_turns`; one that the environment does not read is a UserInputError of the
    first `reset`.

    The reward, by `reward`: "grade" grades the last boxed answer that the policy itself wrote against `sample.label`
    at the end, as slime does; "env" takes `reward` from the info or observation of every step or, if there is none, the
    last `tool_score` at the end; "auto" takes the environment's `reward` if it gives one and grades otherwise
    (a `tool_score` counts only where there is no label: it judges a tool call, not the final answer).
    """

    def __init__(
        self,
        env: str | Callable[..., Any],
        data: DataSource | None = None,
        max_turns: int = 3,
        reward: RewardSource = "auto",
        **args: Any,
    ) -> None:
        super().__init__()
        if reward not in get_args(RewardSource):
            raise UserInputError(f"env.reward is {reward!r}; use one of {', '.join(get_args(RewardSource))}.")
        self._build = registry.find(env) if isinstance(env, str) else env
        if not callable(self._build):
            raise UserInputError(f"{env} is not a build_env(sample, args) function.")
        self._questions = TableSet(ImageTable, data) if data is not None else None
        self._max_turns = check_max_turns(max_turns)
        self._reward_source = reward
        self._given = tuple(args)
        self._args = Arguments(max_turns=max_turns, **args)
        self._args_checked = False
        self._inner: Any = None
        self._sample = Sample("", None, {}, {})
        self._turns: list[str] = []
        self._score: float | None = None
        self._env_paid = False

    def num_items(self, split: Split) -> int | None:
        """The number of questions in the split; None without `data`."""
        return None if self._questions is None else len(self._questions.split(split))

    def validate(self, split: Split, limit: int | None = None) -> int:
        """Check the split's rows before training starts (see `ImageTable.validate`); return how many."""
        return 0 if self._questions is None else self._questions.split(split).validate(limit)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """Build the environment of question `options["index"]` and open its conversation."""
        super().reset(seed=seed)
        self.close()
        split, index = self.item(options, self.num_items((options or {}).get("split", "train")))
        messages: list[Message] = []
        where = {"split": split, "index": index, "seed": seed}
        if self._questions is None:
            self._sample = Sample("", None, where, {}, index=index, group_index=index)
        else:
            question = self._questions.item(split, index)
            pictures = [image.to_pil() for image in question.images]
            self._sample = Sample(question.problem, question.answer, where, {"images": pictures}, index, index)
            messages.append(Message("user", question.parts()))
        self._turns = []
        self._score = None
        self._env_paid = False
        self._inner = self._call_build()
        result = self._inner.reset()
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
            raise EnvError("reset() must return (obs, info) with a dict as info.")
        if not self._args_checked:
            check_all_used(self._given, self._args, self._build, self._inner)
            self._args_checked = True
        if _has_content(result[0]):
            messages.append(self._format(result[0]))
        if not messages:
            raise EnvError("There is nothing to ask: reset() brought no observation, and env.data names no questions.")
        return Observation(tuple(messages)), result[1]

    def step(self, action: str) -> StepResult:
        """Pass the policy's text on; the episode ends when the environment is done, or is truncated after `max_turns`."""
        if self._inner is None:
            raise EnvError("This episode is over or never began: call reset() before step().")
        if not isinstance(action, str):
            raise EnvError(f"The action must be text, not {type(action).__name__}.")
        self._turns.append(action)
        result = self._inner.step(action)
        if not isinstance(result, tuple) or len(result) != 3:
            raise EnvError("step() of an interactive environment must return (obs, done, info).")
        obs, done, info = result
        if not isinstance(done, bool | np.bool_) or not isinstance(info, dict | None):
            raise EnvError("step() must return (obs, done, info) with a bool as done and a dict as info.")
        info = dict(info or {})
        terminated, truncated = bool(done), not done and len(self._turns) >= self._max_turns
        reward = self._read_reward(obs, info)
        info |= {"turn": len(self._turns), "status": "answered" if terminated else "running"}
        if not (terminated or truncated):
            return Observation((self._format(obs),)), reward, False, False, info
        if truncated:
            info["status"] = "out_of_turns"
        reward += self._final_reward(info)
        self.close()
        return Observation(), reward, terminated, truncated, info

    def close(self) -> None:
        """Close the environment of the current episode, if there is one."""
        inner, self._inner = self._inner, None
        if inner is not None and hasattr(inner, "close"):
            inner.close()

    def _call_build(self) -> Any:
        """Call `build_env` by keyword or, where its parameters have other names, by position."""
        signature = inspect.signature(self._build)
        for positional, named in (
            ((), {"sample": self._sample, "args": self._args}),
            ((self._sample, self._args), {}),
            ((self._sample,), {}),
        ):
            try:
                signature.bind(*positional, **named)
            except TypeError:
                continue  # other parameters: try the next form
            return self._build(*positional, **named)
        raise UserInputError(f"build_env{signature} takes neither (sample, args) nor (sample).")

    def _read_reward(self, obs: Any, info: Info) -> float:
        """The reward of this step from info or obs; remembers the last tool score."""
        if self._reward_source == "grade":
            return 0.0
        places = [place for place in (info, obs) if isinstance(place, dict)]
        for place in places:
            if place.get("tool_score") is not None:
                self._score = as_reward(place["tool_score"], "tool_score of step()")
                break
        for place in places:
            if place.get("reward") is not None:
                self._env_paid = True
                return as_reward(place["reward"], "step()")
        return 0.0

    def _final_reward(self, info: Info) -> float:
        """The reward at the end of the episode, besides those of the steps."""
        if self._env_paid:
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
        """The message for an observation, by the environment's own `format_observation` where it has one."""
        if hasattr(self._inner, "format_observation"):
            return to_message(self._inner.format_observation(obs))
        return to_message(default_message(obs))


def default_message(obs: Any) -> dict[str, Any]:
    """The usual message for an observation: its images first, then its text, as the user."""
    if not isinstance(obs, dict):
        raise EnvError(f"An observation must be a dict with obs_str, not a {type(obs).__name__}.")
    content: list[dict[str, Any]] = []
    for images in (obs.get("multi_modal_data") or {}).values():
        content += [
            {"type": "image", "image": image} for image in (images if isinstance(images, list | tuple) else [images])
        ]
    content.append({"type": "text", "text": str(obs.get("obs_str", ""))})
    return {"role": "user", "content": content}


def to_message(message: Any) -> Message:
    """A Message from {"role", "content"}; content is text or a list of text and image parts."""
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise EnvError(f"format_observation() must return a dict with a role among {', '.join(ROLES)}.")
    content = message.get("content")
    if isinstance(content, str):
        return Message.of(message["role"], content)
    if not isinstance(content, list | tuple):
        raise EnvError(f"The content of a message must be text or a list of parts, not a {type(content).__name__}.")
    return Message(message["role"], tuple(_part(part) for part in content))


def _part(part: Any) -> Part:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return part["text"]
    if kind == "image":
        return as_image(part.get("image"))
    if kind == "image_url":
        url = part.get("image_url")
        return as_image(url.get("url") if isinstance(url, dict) else url)
    raise EnvError('A part of a message must be {"type": "text", "text": ...} or {"type": "image", "image": ...}.')


def _has_content(obs: Any) -> bool:
    return bool(obs) and not (isinstance(obs, dict) and not obs.get("obs_str") and not obs.get("multi_modal_data"))
