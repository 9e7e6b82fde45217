"""Errors of environments, and checks of what `reset` and `step` return."""

from __future__ import annotations

import json
import math
import numbers
import re
import sysconfig
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import numpy as np
from PIL import Image

from rl_vlm.types import EncodedImage, Message, Observation, RLVLMError, Role

Info = dict[str, Any]
StepResult = tuple[Observation, float, bool, bool, Info]
ROLES = get_args(Role)
_SURROGATE = re.compile("[\ud800-\udfff]")
_MOST_CHARS = 65_536  # of one value of an info that is sent on
MAX_MESSAGE = 500  # characters of an exception's text
# Code that is not the user's: Python's, installed packages, and this one.
_LIBRARIES = "<", *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), str(Path(__file__).parents[1])
_MOST_METRICS = 64  # each is a column of progress.csv


class EnvError(RLVLMError):
    """An environment failed or returned something that is not a step; its episode is aborted.

    Do: run `rl-vlm envs check`; a run counts the episode as `dropped/env`.
    """


class EnvTimeoutError(EnvError):
    """An environment did not answer in time and was killed.

    Do: make the environment faster, or raise `env.step_timeout_s`.
    """


class EnvCrashError(EnvError):
    """The process of an environment died.

    Do: run `rl-vlm envs check`, and read what the process printed.
    """


def describe_error(error: BaseException) -> str:
    """An exception in one bounded line; of user code with its kind and place: "KeyError: 'row' (dots.py, line 12)".
    The place is the innermost in the user's own files, where there is one."""
    said = "(its message cannot be made)"
    with suppress(Exception):  # it is user code, too
        said = " ".join(str(error).split())[:MAX_MESSAGE] or type(error).__name__
    if isinstance(error, RLVLMError):
        return said
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)] or frames
    place = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {said}{place}"


def check_reset(result: Any) -> tuple[Observation, Info]:
    """What `reset` returned, if it is (Observation with at least one message, dict). Raises EnvError."""
    _expect(isinstance(result, tuple) and len(result) == 2, "reset()", "(observation, info)", result)
    observation, info = result
    check_observation(observation, "reset()")
    if not observation.messages:
        raise EnvError("reset() returned an observation without a message: there is nothing to ask the policy.")
    _expect(isinstance(info, dict), "reset()", "a dict as info", info)
    return observation, info


def check_step(result: Any) -> StepResult:
    """What `step` returned, with a float reward and bool flags. Raises EnvError if it is no step result.

    A step that does not end the episode must return a message for the policy to answer.
    """
    form = "(observation, reward, terminated, truncated, info)"
    _expect(isinstance(result, tuple) and len(result) == 5, "step()", form, result)
    observation, reward, terminated, truncated, info = result
    check_observation(observation, "step()")
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        _expect(isinstance(flag, bool | np.bool_), "step()", f"a bool as {name}", flag)
    _expect(isinstance(info, dict), "step()", "a dict as info", info)
    if not observation.messages and not (terminated or truncated):
        raise EnvError("step() returned an observation without a message although the episode goes on.")
    return observation, as_reward(reward, "step()"), bool(terminated), bool(truncated), info


def check_size(value: Any) -> int | None:
    """What `num_items` returned. Raises EnvError."""
    _expect(value is None or type(value) is int, "num_items()", "a whole number, or None", value)
    return value  # type: ignore[no-any-return]


def as_reward(value: Any, where: str) -> float:
    """`value` as a finite float. Raises EnvError that names `where`."""
    _expect(isinstance(value, numbers.Real | np.bool_), where, "a number as reward", value)
    try:
        reward = float(value)
    except OverflowError as error:
        raise EnvError(f"{where} returned a reward beyond the range of a float.") from error
    if not math.isfinite(reward):
        raise EnvError(f"{where} returned the reward {reward}; it must be finite.")
    return reward


def reward_parts(info: Info) -> tuple[tuple[str, float], ...]:
    """(name, value) of the parts of a step's reward, which `info["reward_parts"]` may hold. Raises EnvError."""
    given = info.get("reward_parts", {})
    _expect(isinstance(given, Mapping), "step()", "a dict as info['reward_parts']", given)
    if "env" in given:
        raise EnvError(
            "info['reward_parts'] may not hold a part 'env', which is the reward of step() itself: name it otherwise."
        )
    return tuple((str(name), as_reward(value, f"step(), part {name}")) for name, value in given.items())


def check_metrics(declared: Any) -> dict[str, tuple[float, ...]]:
    """`VisionEnv.metrics` of an environment elsewhere. Raises EnvError if it is no such declaration."""
    try:
        metrics = {str(name): tuple(map(float, quantiles)) for name, quantiles in dict(declared).items()}
    except (TypeError, ValueError) as error:
        raise EnvError(f"metrics must be a dict of names with their quantiles ({error}).") from error
    if len(metrics) > _MOST_METRICS or any(len(name) > 64 or not name.isprintable() for name in metrics):
        raise EnvError(f"metrics must be up to {_MOST_METRICS} names of printable text.")
    if not all(0 <= one <= 1 for quantiles in metrics.values() for one in quantiles):
        raise EnvError("metrics must give each name quantiles from 0 to 1.")
    return metrics


def plain_values(info: Info) -> Info:
    """What of an environment's info is sent to the driver: numbers, texts, and small lists and mappings of these."""
    kept: Info = {}
    for key, value in info.items():
        plain = type(value) in (bool, int, float) and abs(value) < 1e300  # these and texts at once: JSON takes time
        if plain or (type(value) is str and len(value) <= _MOST_CHARS):
            kept[key] = value
            continue
        with suppress(TypeError, ValueError, RecursionError):
            text = json.dumps(value, default=np.generic.item)
            if value is not None and len(text) <= _MOST_CHARS:
                kept[key] = json.loads(text, parse_int=_small)
    return kept


def _small(digits: str) -> int:
    if len(digits) > 300:  # beyond a float, which metrics make of it; an answer may hold a thousand digits
        raise ValueError
    return int(digits)


def check_observation(observation: Any, where: str) -> None:
    """Raise EnvError unless it is an Observation of well-formed messages."""
    _expect(isinstance(observation, Observation), where, "an Observation", observation)
    _check_messages(observation.messages, where)
    if observation.context is not None:
        _check_messages(observation.context, f"{where}: context()")
        if not observation.context or observation.context[-1].role == "assistant":
            raise EnvError(f"{where}: context() returned messages that do not end with one for the policy to answer.")


def _check_messages(messages: Any, where: str) -> None:
    if not isinstance(messages, tuple):
        raise EnvError(f"{where} returned an Observation whose messages are {_shape(messages)}, not a tuple.")
    for number, message in enumerate(messages):
        if not isinstance(message, Message) or not isinstance(message.parts, tuple):
            raise EnvError(f"{where} returned {_shape(message)} as message {number}; use Message.of(role, *parts).")
        if message.role not in ROLES:
            raise EnvError(f"{where} returned a message with role {message.role!r}; roles are {', '.join(ROLES)}.")
        for part in message.parts:
            place = f"{where}, message {number}"
            if isinstance(part, str) and _SURROGATE.search(part):
                raise EnvError(f"{place}: the text holds a lone surrogate, which no tokenizer can encode.")
            if isinstance(part, Image.Image) and min(part.size) < 1:
                raise EnvError(f"{place}: an image of {part.width}x{part.height} pixels is empty.")
            if not isinstance(part, str | Image.Image | EncodedImage):
                raise EnvError(f"{place}: a part is {_shape(part)}; parts are text or images.")


def _expect(holds: bool, where: str, what: str, value: Any) -> None:
    if not holds:
        raise EnvError(f"{where} must return {what}, not {_shape(value)}.")


def _shape(value: Any) -> str:
    """A short name for a wrong value: its type, and its length when it is a tuple."""
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return "None" if value is None else f"a value of type {type(value).__name__}"
