"""Arguments of the built-in environments: whatever a configuration holds, there is an environment or one sentence that names the key."""

from __future__ import annotations

import datetime
import inspect
import math
import re
from typing import Any

import pytest

from rl_vlm.envs.base import VisionEnv
from rl_vlm.envs.registry import ENTRY_POINT_GROUP, make, resolve
from rl_vlm.registry import provided
from rl_vlm.types import UserInputError

NEEDED: dict[str, dict[str, Any]] = {"Control-v0": {"env": "CartPole-v1"}}
# What YAML can hold, and a set, an object and bytes from Python.
WRONG: tuple[Any, ...] = (
    "{}", "", "3 4", [], ["x"], [[1]], ["left", 3], {}, {"a": 1}, {"train": 3}, {"up": "x"}, math.nan, -math.inf, -1, 0, 1.5, 10**400,
    3, 17, 10**6, True, None, datetime.date(2026, 1, 1), b"x", {1, 2}, object(),
)  # fmt: skip
ARGUMENTS = [
    (env_id, name)
    for env_id in sorted(
        name for name, point in provided(ENTRY_POINT_GROUP).items() if point.value.startswith("rl_vlm.")
    )
    for name, parameter in inspect.signature(resolve(env_id)).parameters.items()
    if parameter.kind is not parameter.VAR_KEYWORD
]


def play(env: VisionEnv) -> None:
    env.num_items("test")
    env.reset(seed=0, options={"index": 0, "split": "train"})
    env.step("none")
    env.close()


@pytest.mark.parametrize(("env_id", "name"), ARGUMENTS)
def test_any_value_of_an_argument_is_taken_or_refused_by_name(env_id: str, name: str) -> None:
    for value in WRONG:
        try:
            env = make(env_id, **{**NEEDED.get(env_id, {}), name: value})
        except UserInputError as error:
            assert name in str(error) and len(str(error).splitlines()) == 1
            assert name == "data" or re.match(rf"({env_id}: )?env\.kwargs\.\w", str(error))
            continue
        try:
            play(env)
        except UserInputError:
            assert name == "data"  # which is opened when it is first asked for


@pytest.mark.parametrize(
    ("env_id", "arguments", "sentence"),
    [
        ("Shapes-v0", {"tool": "no"}, "Shapes-v0: env.kwargs.tool must be true or false, not 'no'."),
        ("Shapes-v0", {"second_reward": "0.5"}, "env.kwargs.second_reward must be a number, not '0.5'."),
        ("Shapes-v0", {"num_train": True}, "env.kwargs.num_train must be an integer, not True."),
        ("Geo3k-v0", {"tool_cost": math.nan}, "env.kwargs.tool_cost must be a finite number, not nan."),
        ("Geo3k-v0", {"image_size": "64"}, "env.kwargs.image_size must be an integer, not '64'."),
        ("Geo3k-v0", {"level": ["1"]}, "env.kwargs.level must be an integer, not ['1']."),
        ("Geo3k-v0", {"prompt": ["full"]}, "env.kwargs.prompt must be 'auto', 'full', 'brief' or 'none', not ['full']."),
        ("Geo3k-v0", {"max_turns": 0}, "env.kwargs.max_turns must be greater than or equal to 1, not 0."),
        ("NLVR2-v0", {"kinds": 3}, "env.kwargs.kinds must be a list, not 3."),
        ("GeoSpot-v0", {"weights": [1, "x", 0]}, "env.kwargs.weights.1 must be a number, not 'x'."),
        ("Caption-v0", {"data": ["a.parquet"]}, "must be a text or a mapping, not ['a.parquet']."),
        ("Zoom-v0", {"prompt": {"full": 1}}, "env.kwargs.prompt must be 'full' or 'brief', not {'full': 1}."),
        ("GeoSpot-v0", {"taus": [[1]]}, "env.kwargs.taus must be a mapping, not [[1]]."),
        ("Shapes-v0", {"image_size": 8}, "Shapes-v0: env.kwargs.image_size must be greater than or equal to 64, not 8."),
        ("GeoSpot-v0", {"weights": [0, 0, 0]}, "GeoSpot-v0: env.kwargs.weights are all 0: one must be above 0."),
        ("GridWalk-v0", {"holes": 99}, "GridWalk-v0: env.kwargs.walls (2) and holes (99) leave no room"),
        ("Zoom-v0", {"zoom": 3}, "Zoom-v0: env.kwargs.view_size must be a multiple of 64 and zoom even for drawn pictures, not 64 and 3."),
        ("Control-v0", {"env": "CartPole-v1", "image_size": 8}, "Control-v0: env.kwargs.image_size must be greater than or equal to 16, not 8."),
        ("Control-v0", {"env": 3}, "Control-v0: env.kwargs.env must be a text, not 3."),
        ("Control-v0", {"env": "CartPole-v1", "num_test": 0}, "num_test must be greater than or equal to 1, not 0."),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_refused_in_words(env_id: str, arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserInputError) as refused:
        make(env_id, **arguments)
    assert sentence in str(refused.value)
