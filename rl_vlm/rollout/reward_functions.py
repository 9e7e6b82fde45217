"""Reward functions as TRL calls them: `f(prompts, completions, completion_ids, **columns) -> list[float | None]`.

Each function gets a whole group at once and, of what is there, the arguments that its signature takes. The columns are
the cells of the data's row (`info["columns"]` of QA-v0) and the numbers and texts of the environment's info. Images are
PIL, as the policy saw them. Where the prompt is a list of messages, so are the completions; otherwise both are texts.
"""

from __future__ import annotations

import asyncio
import inspect
import io
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from PIL import Image

from rl_vlm.config import RewardFunction
from rl_vlm.envs.errors import describe_error
from rl_vlm.envs.loading import load_object, split_spec
from rl_vlm.rewards.functions import FUNCTIONS
from rl_vlm.types import Trajectory, UserInputError

if TYPE_CHECKING:
    from rl_vlm.rollout.reward_parts import AnsweredGroup

# What every function may take beside the columns.
ARGUMENTS = (
    "prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "images", "image",
)  # fmt: skip
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
# One call after the other, as TRL makes them, and beside the loop, which samples other groups meanwhile.
_THREAD = ThreadPoolExecutor(1, thread_name_prefix="reward")


def load_function(one: RewardFunction) -> Callable[..., Any]:
    """The function; of a class an instance. Raises UserInputError."""
    return _named(one.function) if one.given is None else one.given  # type: ignore[no-any-return]


@lru_cache(maxsize=64)
def _named(function: str) -> Callable[..., Any]:
    if function in FUNCTIONS:
        return FUNCTIONS[function]
    if not split_spec(function)[1]:
        raise UserInputError(
            f"env.reward: {function!r} is not a reward function; there are {', '.join(FUNCTIONS)}, and your own as "
            "file.py:function or package.module:function. One that rl_vlm.train was given must be given again."
        )
    found = load_object(function)
    try:
        found = found() if isinstance(found, type) else found
    except Exception as error:
        raise UserInputError(
            f"env.reward: {function} cannot be made without arguments: {describe_error(error)}."
        ) from error
    if not callable(found):
        raise UserInputError(f"env.reward: {function} is a {type(found).__name__}, not a function.")
    return found  # type: ignore[no-any-return]


def check_function(one: RewardFunction, info: Mapping[str, Any]) -> None:
    """Raise UserInputError for a function that needs an argument that neither the data's row nor `kwargs` gives."""
    known = {*ARGUMENTS, *columns_of(info), *info.get("image_columns", ()), *one.kwargs}
    for name, parameter in inspect.signature(load_function(one)).parameters.items():
        needed = parameter.default is parameter.empty and parameter.kind not in _VARIADIC
        if needed and name not in known:
            raise UserInputError(
                f"env.reward: {one.name} needs the column {name}, and the data have {', '.join(info['columns'])}: "
                "rename the argument or the column, or give it in the function's kwargs."
            )


def columns_of(info: Mapping[str, Any]) -> dict[str, Any]:
    """What an episode's info offers to reward functions, by name."""
    rest = {name: value for name, value in info.items() if name not in ("columns", "image_columns", "prompt")}
    columns = info.get("columns")
    return rest | (columns if isinstance(columns, dict) else {})


def _images_of(members: Sequence[Trajectory]) -> dict[str, list[Any]]:
    """The images of each episode as `images`, its first as `image`, and those of the row under the columns' names.

    Pillow decodes an image when a function looks at it; the completions of a group share it.
    """
    opened = {
        image.sha256: Image.open(io.BytesIO(image.png), formats=("PNG",)) for one in members for image in one.images
    }
    images = [[opened[image.sha256] for image in one.images] for one in members]

    def cell(shown: list[Any], place: Any) -> Any:
        return [shown[n] for n in place] if isinstance(place, list) else None if place is None else shown[place]

    places = {"image": 0 if images[0] else None, **members[0].info.get("image_columns", {})}
    return {"images": images, **{name: [cell(shown, place) for shown in images] for name, place in places.items()}}


async def call_function(
    one: RewardFunction, answered: AnsweredGroup
) -> tuple[list[Any], list[dict[str, Any]], dict[str, float]]:
    """What a function gives for a group: its rewards, what it logged for each trajectory, and its metrics."""
    function, members = load_function(one), answered.group.trajectories
    rows = [columns_of(member.info) for member in members]
    columns = {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}
    prompts = [_prompt(member, answered) for member in members]
    chat = isinstance(prompts[0], list)
    notes: list[dict[str, Any]] = [{} for _ in members]
    metrics: defaultdict[str, list[float]] = defaultdict(list)

    def log_extra(column: str, values: Iterable[Any]) -> None:
        for note, value in zip(notes, values, strict=True):
            note[column] = value

    arguments: dict[str, Any] = {
        **_images_of(members),
        **columns,
        **one.kwargs,
        "prompts": prompts,
        "completions": completions_of(answered.answers, chat),
        "completion_ids": [member.token_ids[member.loss_mask].tolist() for member in members],
        "trainer_state": SimpleNamespace(global_step=answered.group.newest_version),
        "log_extra": log_extra,
        "log_metric": lambda name, value: metrics[name].append(float(value)),
    }
    parameters = inspect.signature(function).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        arguments = {name: value for name, value in arguments.items() if name in parameters}

    def call() -> Any:  # uvloop, which Ray uses, sends no coroutine function to a thread: the coroutine is awaited here
        try:
            return function(**arguments)
        except StopIteration as error:  # no future holds it, so the loop would wait for it until the round's deadline
            raise RuntimeError("StopIteration").with_traceback(error.__traceback__) from error

    found = await asyncio.get_running_loop().run_in_executor(_THREAD, call)
    values = await found if inspect.isawaitable(found) else found
    return values, notes, {name: sum(logged) / len(logged) for name, logged in metrics.items()}


def completions_of(answers: Iterable[Sequence[str]], chat: bool) -> list[Any]:
    """The answers of each episode as functions get them: messages, or the last text."""
    return [[{"role": "assistant", "content": text} for text in said] if chat else said[-1] for said in answers]


def _prompt(member: Trajectory, answered: AnsweredGroup) -> Any:
    if "prompt" in member.info:
        return member.info["prompt"]
    text = answered.text
    return text.codec.decode(text.collapse(member.token_ids[: member.turns[0].start], member.images))
