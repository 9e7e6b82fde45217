"""Run environments written to vlm-gym's interface, unchanged: a `BaseEnv` class, or `create_env(name, tokenizer, ...)`.

`reset(idx) -> (state, observation)`, `step(state, action_tokens) -> (state, out_tokens, reward, done, info)`. An
observation has `image` (or `image_path`) and `question`, or `image_left`, `image_right` and `statement`.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

from rl_vlm.envs.base import Count, EpisodeEnv, Info, Item, Reply
from rl_vlm.envs.errors import EnvError
from rl_vlm.envs.foreign.common import Share, held_out, make_foreign, read_result
from rl_vlm.envs.images import as_image
from rl_vlm.types import Message, Observation, Split, UserInputError

# vlm-gym's own words around a statement, and the question that its prompt leaves out.
TWO_IMAGES = "Look at the two images. {statement} True or False?"

_LOCK = threading.Lock()
_SHARED: dict[Any, tuple[Any, threading.Lock]] = {}  # the environments of this process


class VlmGymEnv(EpisodeEnv):
    """A VisionEnv around an environment of vlm-gym's interface.

    env: a class or a `create_env` function. name: the environment's name for `create_env`, such as nlvr2. tokenizer: a
    model folder or hub name whose tokenizer the environment gets; by default it gets bytes as tokens. test: arguments
    that differ for the test split, such as {split: test}; without it `test_share` of the tasks are held out. kwargs:
    the environment's own arguments.

    As in vlm-gym, one environment with its data serves all episodes of a process, so that what its `reset` counts goes
    on. Each episode steps a shallow copy, so that episodes may run at once and write to their copies.

    `done` is honoured: an episode that is not done goes on, and `out_tokens` are decoded and shown as the next message.
    """

    def __init__(
        self,
        env: Callable[..., Any],
        *,
        name: str | None = None,
        tokenizer: str | None = None,
        max_turns: Count = 8,
        test: dict[str, Any] | None = None,
        test_share: Share = 0.1,
        **kwargs: Any,
    ) -> None:
        self._tokenizer: Any = ByteTokenizer()
        if tokenizer is not None:
            from transformers import AutoTokenizer  # takes seconds

            self._tokenizer = make_foreign(AutoTokenizer.from_pretrained, tokenizer, trust_remote_code=False)
        given = (self._tokenizer,) if isinstance(env, type) else (name, self._tokenizer)
        if None in given:
            raise UserInputError("create_env needs the name of an environment: set env.kwargs.name, such as nlvr2.")
        # Of each split, the environment of this process with these arguments, and the lock of its `reset`.
        self._envs: dict[Split, tuple[Any, threading.Lock]] = {}
        arguments_of: dict[Split, dict[str, Any]] = {"train": kwargs, "test": {**kwargs, **(test or {})}}
        for split, arguments in arguments_of.items():
            key = (env, name, tokenizer, repr(sorted(arguments.items())))
            with _LOCK:
                if key not in _SHARED:
                    _SHARED[key] = make_foreign(env, *given, **arguments), threading.Lock()
            self._envs[split] = _SHARED[key]
        counts = [getattr(one, "num_tasks", None) for one, _ in self._envs.values()]
        num_train, num_test = (None if count is None or count < 0 else int(count) for count in counts)
        self._one_set = test is None
        if self._one_set and num_train is not None:
            num_train, num_test = held_out(num_train, test_share)
        super().__init__(num_train=num_train, num_test=num_test, max_turns=max_turns)

    def open(self, item: Item) -> tuple[Observation, Info]:
        number = self.number(item) if self._one_set else item.index
        env, lock = self._envs[item.split]
        with lock:
            self._state, observation = read_result(env.reset(number), "reset(idx) -> (state, observation)")
            self._inner = copy.copy(env)
        return Observation((to_message(observation),)), {"task": number}

    def reply(self, text: str) -> Reply:
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        form = "step(state, action_tokens) -> (state, out_tokens, reward, done, info)"
        self._state, out_tokens, reward, done, info = read_result(self._inner.step(self._state, tokens), form)
        info["turn"] = self.turn
        if done or self.is_last_turn:
            return Reply(reward, None, info, truncated=not done)
        shown = self._tokenizer.decode([int(one) for one in out_tokens], skip_special_tokens=True)
        if not shown.strip():
            raise EnvError("step() was not done and returned no out_tokens: there is nothing to show the policy.")
        return Reply(reward, Observation.user(shown), info)


def to_message(observation: Any) -> Message:
    """The message of an observation, an object or a dict: its images first, then its text."""
    read = observation.get if isinstance(observation, dict) else lambda *field: getattr(observation, *field)
    left, right, statement = (read(name, None) for name in ("image_left", "image_right", "statement"))
    if left is not None and right is not None and statement is not None:
        return Message("user", (as_image(left), as_image(right), TWO_IMAGES.format(statement=statement)))
    image, path, question = (read(name, None) for name in ("image", "image_path", "question"))
    shown = [as_image(one) for one in (path if image is None else image,) if one is not None]
    said = [str(question)] if question else []
    if not shown and not said:
        raise EnvError(
            "An observation needs image (or image_path) and question, or image_left, image_right and statement; a "
            f"{type(observation).__name__} has none of them."
        )
    return Message("user", (*shown, *said))


class ByteTokenizer:
    """One token per byte of UTF-8, so every text comes back as it was; id 256 is the end of a sequence."""

    eos_token_id = pad_token_id = 256

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        return list(text.encode(errors="replace")) + [self.eos_token_id] * add_special_tokens

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True, **_: Any) -> str:
        return bytes(int(one) for one in token_ids if 0 <= int(one) < 256).decode(errors="replace")
