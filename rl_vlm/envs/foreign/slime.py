"""Run environments written to slime's interactive interface, unchanged.

Such an environment is a module with `build_env(sample, args)`. What it builds has `reset() -> (obs, info)`, `step(text)
-> (obs, done, info)`, `format_observation(obs) -> message` and `close()`; an `obs` is a dict with `obs_str`, `role`
and, for images, `multi_modal_data`. One such environment is built per episode.
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import sys
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
from rl_vlm.envs.foreign.common import to_message
from rl_vlm.rewards.math import grade_turns
from rl_vlm.types import Message, Observation, UserInputError

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


class Arguments(SimpleNamespace):
    """The `args` of an environment, which remember the names that were read. A copy is a plain SimpleNamespace."""

    __slots__ = ("_reads",)

    def __init__(self, **values: Any) -> None:
        object.__setattr__(self, "_reads", set())
        super().__init__(**values)

    def __getattribute__(self, name: str) -> Any:
        reads: set[str] = object.__getattribute__(self, "_reads")
        if name == "_reads":
            return reads
        values = object.__getattribute__(self, "__dict__")
        reads.update(values if name == "__dict__" else (name,))  # vars(args) hands all of them on
        return object.__getattribute__(self, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return SimpleNamespace, (), vars(self)


class SlimeEnv(EpisodeEnv):
    """A VisionEnv around one interactive environment per episode.

    `env` is a `build_env` function, or names one as `rl_vlm.make` would. With `data` the samples are its questions: the
    prompt with its images opens the conversation, the answer is `sample.label`. Without, the sample is empty but for
    its metadata (split, index, seed) and `reset()` must bring the first message. All further arguments become
    attributes of `args`, next to `max_turns`; one that the environment does not read is a UserInputError of the first
    `reset`.

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
        reward: RewardSource = "auto",
        **args: Any,
    ) -> None:
        super().__init__(max_turns=max_turns, rows=TableSet(QUESTIONS, data) if data is not None else None)
        self._build = registry.find(env) if isinstance(env, str) else env
        if not callable(self._build):
            raise UserInputError(f"{env} is not a build_env(sample, args) function.")
        self._reward_source = reward
        self._args = Arguments(max_turns=max_turns, **args)
        self._unchecked = tuple(args)
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
        self._inner = self._call_build()
        result = self._inner.reset()
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
            raise EnvError("reset() must return (obs, info) with a dict as info.")
        self._check_all_used()
        obs = result[0]
        if obs and not (isinstance(obs, dict) and not obs.get("obs_str") and not obs.get("multi_modal_data")):
            messages.append(self._format(obs))
        if not messages:
            raise EnvError("There is nothing to ask: reset() brought no observation, and env.data names no questions.")
        return Observation(tuple(messages)), result[1]

    def reply(self, text: str) -> Reply:
        """Pass the policy's text on; the episode ends when the environment is done."""
        self._turns.append(text)
        result = self._inner.step(text)
        if not isinstance(result, tuple) or len(result) != 3:
            raise EnvError("step() of an interactive environment must return (obs, done, info).")
        obs, done, info = result
        if not isinstance(done, bool | np.bool_) or not isinstance(info, dict | None):
            raise EnvError("step() must return (obs, done, info) with a bool as done and a dict as info.")
        info = dict(info or {})
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

    def _call_build(self) -> Any:
        """Call `build_env` by keyword or, where its parameters have other names, by position."""
        signature, both = inspect.signature(self._build), (self._sample, self._args)
        for positional, named in (((), {"sample": both[0], "args": both[1]}), (both, {}), (both[:1], {})):
            try:
                signature.bind(*positional, **named)
            except TypeError:
                continue  # other parameters: try the next form
            return self._build(*positional, **named)
        raise UserInputError(f"build_env{signature} takes neither (sample, args) nor (sample).")

    def _check_all_used(self) -> None:
        """Raise UserInputError for an argument that `build_env` and the environment that it built do not know.

        Known is what has been read from `args` so far, and every name in the source of the modules that define
        `build_env` and the environment's classes: those may read an argument later. Without that source nothing is
        refused.
        """
        modules = {getattr(self._build, "__module__", ""), *(cls.__module__ for cls in type(self._inner).__mro__)}
        sources = [_names_in(module) for module in modules - {"builtins"}]
        known = self._args._reads.union(*(names for names in sources if names))
        for name in self._unchecked if None not in sources else ():
            if name not in known:
                near = {"data", "max_turns", "reward", *self._args._reads}
                nearest = difflib.get_close_matches(name, near, n=1, cutoff=0.7)
                raise UserInputError(
                    f"The environment {type(self._inner).__name__} reads no argument {name!r}, so it would change "
                    "nothing: " + (f"did you mean {nearest[0]}?" if nearest else "remove it from the arguments.")
                )
        self._unchecked = ()

    def _read_reward(self, obs: Any, info: Info) -> float:
        """The reward of this step from info or obs; remembers the last tool score."""
        if self._reward_source == "grade":
            return 0.0
        places = [place for place in (info, obs) if isinstance(place, dict)]
        score, reward = (
            next((place[key] for place in places if place.get(key) is not None), None)
            for key in ("tool_score", "reward")
        )
        if score is not None:
            self._score = as_reward(score, "tool_score of step()")
        if reward is None:
            return 0.0
        self._env_rewarded = True
        return as_reward(reward, "step()")

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
        """The message for an observation, by the environment's own `format_observation` where it has one."""
        return to_message(getattr(self._inner, "format_observation", _default_message)(obs))


def _default_message(obs: Any) -> dict[str, Any]:
    """The usual message for an observation: its images first, then its text, as the user."""
    if not isinstance(obs, dict):
        raise EnvError(f"An observation must be a dict with obs_str, not a {type(obs).__name__}.")
    content: list[dict[str, Any]] = []
    for images in (obs.get("multi_modal_data") or {}).values():
        content += [
            {"type": "image", "image": image} for image in (images if isinstance(images, list | tuple) else [images])
        ]
    return {"role": "user", "content": [*content, {"type": "text", "text": str(obs.get("obs_str", ""))}]}


@functools.lru_cache(maxsize=64)
def _names_in(module: str) -> frozenset[str] | None:
    """Every identifier, attribute and string constant of a module's source; None without source."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError, SyntaxError):
        return None
    fields = ("attr", "id", "arg", "value")
    found = (getattr(node, field, None) for node in ast.walk(tree) for field in fields)
    return frozenset(name for name in found if isinstance(name, str))
