"""Run environments written to vlm-gym's interface, unchanged: a `BaseEnv` class, or its `create_env(name, tokenizer,
...)`.

`reset(idx) -> (state, observation)`, `step(state, action_tokens) -> (state, out_tokens, reward, done, info)`. An
observation has `image` (or `image_path`) and `question`, or `image_left`, `image_right` and `statement`.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rl_vlm.envs import registry
from rl_vlm.envs.base import Count, Info, Item, Reply
from rl_vlm.envs.errors import EnvError, as_reward
from rl_vlm.envs.foreign.common import HeldOutEnv, Share, returned
from rl_vlm.envs.foreign.stand_ins import with_stand_ins
from rl_vlm.envs.images import as_image
from rl_vlm.safe_text import one_line
from rl_vlm.types import Message, Observation, Part, Split, UserInputError

# vlm-gym's own words around a statement, and the question that its prompt leaves out.
TWO_IMAGES = "Look at the two images. {statement} True or False?"

_LOCK = threading.Lock()
_SHARED: dict[Any, tuple[Any, threading.Lock]] = {}  # the environments of this process


class VlmGymEnv(HeldOutEnv):
    """A VisionEnv around an environment of vlm-gym's interface.

    env: a class, or a `create_env` function, or the name of one as `rl_vlm.make` takes it. name: the environment's name
    for `create_env`, such as nlvr2. tokenizer: a model folder or hub name whose tokenizer the environment gets; without
    one it gets bytes as tokens. max_turns: turns after which an episode that is not done is truncated. test: arguments
    for the test split in which it differs, such as {split: test}. Without it, `test_share` of the tasks are held out
    for it, the last ones; where tasks are drawn without end, every second number is for testing. All further arguments
    are the environment's own.

    One environment, with its data, serves all episodes of a process, as in vlm-gym, so that what its `reset` counts
    goes on. Each episode steps a shallow copy, so that episodes may run at once and write to their copies.

    `done` is honoured: an episode that is not done goes on, and `out_tokens` are decoded and shown as the next message.
    """

    def __init__(
        self,
        env: str | Callable[..., Any],
        *,
        name: str | None = None,
        tokenizer: str | None = None,
        max_turns: Count = 8,
        test: dict[str, Any] | None = None,
        test_share: Share = 0.1,
        **kwargs: Any,
    ) -> None:
        super().__init__(test_share if test is None else None, max_turns=max_turns)
        self._factory = registry.find(env) if isinstance(env, str) else env
        self._tokenizer = load_tokenizer(tokenizer)
        self._name = name

        self._envs: dict[Split, tuple[Any, threading.Lock]] = {"train": self._shared(tokenizer, kwargs)}
        self._envs["test"] = self._envs["train"] if test is None else self._shared(tokenizer, {**kwargs, **test})

    def num_tasks(self, split: Split) -> int | None:
        """The environment's own `num_tasks`; None where it has no end, or says nothing."""
        count = getattr(self._envs[split][0], "num_tasks", -1)
        return int(count) if isinstance(count, int | np.integer) and count >= 0 else None

    def open(self, item: Item) -> tuple[Observation, Info]:
        """Open the task of the item."""
        number = self.task(item)
        env, lock = self._envs[item.split]
        with lock:
            self._state, observation = returned(env.reset(number), "reset(idx) -> (state, observation)")
            self._inner = copy.copy(env)
        return Observation((to_message(observation),)), {"task": number}

    def reply(self, text: str) -> Reply:
        """Pass the policy's text on as token ids."""
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        self._state, out_tokens, reward, done, info = returned(
            self._inner.step(self._state, tokens),
            "step(state, action_tokens) -> (state, out_tokens, reward, done, info)",
        )
        info["turn"] = self.turn
        reward = as_reward(reward, "step()")
        if done or self.is_last_turn:
            return Reply(reward, None, info, truncated=not done)
        shown = self._tokenizer.decode([int(one) for one in out_tokens], skip_special_tokens=True)
        if not shown.strip():
            raise EnvError("step() was not done and returned no out_tokens: there is nothing to show the policy.")
        return Reply(reward, Observation.user(shown), info)

    def _shared(self, tokenizer: str | None, kwargs: dict[str, Any]) -> tuple[Any, threading.Lock]:
        """The environment of this process with these arguments, and the lock of its `reset`."""
        key = (self._factory, self._name, tokenizer, repr(sorted(kwargs.items())))
        with _LOCK:
            if key not in _SHARED:
                _SHARED[key] = (self._make(kwargs), threading.Lock())
            return _SHARED[key]

    def _make(self, kwargs: dict[str, Any]) -> Any:
        """Call the class, or `create_env`, with the tokenizer."""
        given: tuple[Any, ...] = (self._tokenizer,)
        if not isinstance(self._factory, type):
            if self._name is None:
                raise UserInputError("create_env needs the name of an environment: set env.kwargs.name, such as nlvr2.")
            given = (self._name, self._tokenizer)
        try:
            return with_stand_ins(partial(self._factory, *given, **kwargs), _file_of(self._factory))
        except Exception as error:  # whatever the user's code raises, a missing data set for example
            raise UserInputError(
                f"The environment cannot be made with these env.kwargs ({type(error).__name__}: {one_line(error)})."
            ) from error


def _file_of(factory: Callable[..., Any]) -> Path | None:
    """The file that holds a class or function: `create_env` imports the environment's module when it is called."""
    try:
        return Path(inspect.getfile(factory))
    except TypeError:  # a built-in, a partial
        return None


def to_message(observation: Any) -> Message:
    """The message of an observation, an object or a dict: its images first, then its text."""
    left, right, statement = (_field(observation, name) for name in ("image_left", "image_right", "statement"))
    if left is not None and right is not None and statement is not None:
        return Message("user", (_picture(left), _picture(right), TWO_IMAGES.format(statement=statement)))
    image = _field(observation, "image")
    image = _field(observation, "image_path") if image is None else image
    question = _field(observation, "question")
    parts: tuple[Part, ...] = () if image is None else (_picture(image),)
    if question:
        parts = (*parts, str(question))
    if not parts:
        raise EnvError(
            "An observation needs image (or image_path) and question, or image_left, image_right and statement; a "
            f"{type(observation).__name__} has none of them."
        )
    return Message("user", parts)


def _field(observation: Any, name: str) -> Any:
    return observation.get(name) if isinstance(observation, dict) else getattr(observation, name, None)


def _picture(image: Any) -> Any:
    return as_image(str(image) if hasattr(image, "__fspath__") else image)


class ByteTokenizer:
    """One token per byte of UTF-8, so every text comes back as it was; id 256 is the end of a sequence."""

    eos_token_id = pad_token_id = 256

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        """The bytes of a text."""
        return list(text.encode(errors="replace")) + [self.eos_token_id] * add_special_tokens

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True, **_: Any) -> str:
        """The text of bytes; what is no UTF-8 becomes U+FFFD."""
        return bytes(int(one) for one in token_ids if 0 <= int(one) < 256).decode(errors="replace")


def load_tokenizer(name: str | None) -> Any:
    """The tokenizer of a model folder or hub name; without a name, a ByteTokenizer. Raises UserInputError."""
    if name is None:
        return ByteTokenizer()
    from transformers import AutoTokenizer  # takes seconds

    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserInputError(
            f"env.kwargs.tokenizer {name!r} cannot be loaded ({str(error).splitlines()[0][:200]}): name a model "
            "folder or a model of the hub, or leave it out."
        ) from error
