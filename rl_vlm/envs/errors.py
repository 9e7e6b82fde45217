"""Errors of environments, and checks of what `reset` and `step` return."""

from __future__ import annotations

import json
import math
import numbers
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from PIL import Image

from rl_vlm.types import EncodedImage, Message, Observation, RLVLMError, Role

if TYPE_CHECKING:
    from rl_vlm.envs.base import Info, StepResult

ROLES = get_args(Role)
_MOST_CHARS = 65_536  # of one value of an info that is sent on
_MOST_METRICS = 64  # each is a column of progress.csv


class EnvError(RLVLMError):
    """An environment failed or returned something that is not a step; its episode is aborted."""


class EnvTimeoutError(EnvError):
    """An environment did not answer in time and was killed."""


class EnvCrashError(EnvError):
    """The process of an environment died."""


def place_of(error: BaseException) -> str:
    """Where an exception was raised, such as ` (dots.py, line 12)`; empty where that is not known."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


def check_reset(result: Any) -> tuple[Observation, Info]:
    """Return what `reset` returned if it is (Observation with at least one message, dict); raise EnvError otherwise."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise EnvError(f"reset() must return (observation, info), not {_shape(result)}.")
    observation, info = result
    check_observation(observation, "reset()")
    if not observation.messages:
        raise EnvError("reset() returned an observation without a message: there is nothing to ask the policy.")
    if not isinstance(info, dict):
        raise EnvError(f"reset() must return a dict as info, not {_shape(info)}.")
    return observation, info


def check_step(result: Any) -> StepResult:
    """Return what `step` returned with a float reward and bool flags; raise EnvError if it is not a step result.

    A step that does not end the episode must return at least one message for the policy to answer.
    """
    if not isinstance(result, tuple) or len(result) != 5:
        raise EnvError(f"step() must return (observation, reward, terminated, truncated, info), not {_shape(result)}.")
    observation, reward, terminated, truncated, info = result
    check_observation(observation, "step()")
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(flag, bool | np.bool_):
            raise EnvError(f"step() must return a bool as {name}, not {_shape(flag)}.")
    if not isinstance(info, dict):
        raise EnvError(f"step() must return a dict as info, not {_shape(info)}.")
    if not observation.messages and not (terminated or truncated):
        raise EnvError("step() returned an observation without a message although the episode goes on.")
    return observation, as_reward(reward, "step()"), bool(terminated), bool(truncated), info


def as_reward(value: Any, where: str) -> float:
    """`value` as a finite float; EnvError that names `where` otherwise."""
    if not isinstance(value, numbers.Real | np.bool_):
        raise EnvError(f"{where} must return a number as reward, not {_shape(value)}.")
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
    if not isinstance(given, Mapping):
        raise EnvError(f"step() must return a dict as info['reward_parts'], not {_shape(given)}.")
    if "env" in given:
        raise EnvError(
            "info['reward_parts'] may not hold a part 'env', which is the reward of step() itself: name it otherwise."
        )
    return tuple((str(name), as_reward(value, f"step(), part {name}")) for name, value in given.items())


def check_metrics(declared: Any) -> dict[str, tuple[float, ...]]:
    """`VisionEnv.metrics` of an environment that another process or machine has; raise EnvError if it is not such a
    declaration."""
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
    """What of an environment's info is sent to the driver: numbers, texts, and small lists and mappings of these, such
    as GeoSpot's `parsed`; numpy's scalars are converted.
    """
    kept: Info = {}
    for key, value in info.items():
        with suppress(TypeError, ValueError, RecursionError):
            text = json.dumps(value, default=_scalar)
            if value is not None and len(text) <= _MOST_CHARS:
                kept[key] = json.loads(text, parse_int=_small)
    return kept


def _scalar(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError


def _small(digits: str) -> int:
    if len(digits) > 300:  # beyond a float, which figures make of it; an answer may hold a thousand digits
        raise ValueError
    return int(digits)


def check_observation(observation: Any, where: str) -> None:
    """Raise EnvError unless `observation` is an Observation of well-formed messages."""
    if not isinstance(observation, Observation):
        raise EnvError(f"{where} must return an Observation, not {_shape(observation)}.")
    if not isinstance(observation.messages, tuple):
        raise EnvError(
            f"{where} returned an Observation whose messages are {_shape(observation.messages)}, not a tuple."
        )
    for number, message in enumerate(observation.messages):
        if not isinstance(message, Message) or not isinstance(message.parts, tuple):
            raise EnvError(f"{where} returned {_shape(message)} as message {number}; use Message.of(role, *parts).")
        if message.role not in ROLES:
            raise EnvError(f"{where} returned a message with role {message.role!r}; roles are {', '.join(ROLES)}.")
        for part in message.parts:
            _check_part(part, f"{where}, message {number}")


def _check_part(part: Any, where: str) -> None:
    if isinstance(part, str):
        try:
            part.encode()
        except UnicodeEncodeError as error:
            raise EnvError(f"{where}: the text holds a lone surrogate, which no tokenizer can encode.") from error
    elif isinstance(part, Image.Image):
        if min(part.size) < 1:
            raise EnvError(f"{where}: an image of {part.width}x{part.height} pixels is empty.")
    elif not isinstance(part, EncodedImage):
        raise EnvError(f"{where}: a part is {_shape(part)}; parts are text or images.")


def _shape(value: Any) -> str:
    """A short name for a wrong value: its type, and its length when it is a tuple."""
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return "None" if value is None else f"a value of type {type(value).__name__}"
