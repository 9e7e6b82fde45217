"""What holds for every built-in environment: episodes, items, seeds, arguments, and gymnasium's own checks."""

from __future__ import annotations

import datetime
import importlib.util
import inspect
import math
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from gymnasium.utils.env_checker import check_env

from rl_vlm.envs.base import VisionEnv
from rl_vlm.envs.registry import ENTRY_POINT_GROUP, make, resolve
from rl_vlm.registry import provided
from rl_vlm.types import RLVLMError, UserInputError

GEO3K = str(Path(__file__).parents[1] / "fixtures" / "geo3k")
CARTPOLE = {"env": "CartPole-v1", "image_size": 64}
DRAWN: dict[str, dict[str, Any]] = {
    "Shapes-v0": {}, "GridWalk-v0": {}, "NLVR2-v0": {}, "Caption-v0": {}, "Zoom-v0": {}, "Geo3k-v0": {}, "GeoSpot-v0": {}, "Control-v0": CARTPOLE,
}  # fmt: skip
ENVS = [*DRAWN.items(), ("Geo3k-v0", {"data": GEO3K})]
INF, NAN = math.inf, math.nan
# Values out of range or without a meaning; the last name of each is the one that is refused.
WRONG: dict[str, list[dict[str, Any]]] = {
    "Shapes-v0": [{"task": "sum"}, {"turns": 3}, {"image_size": 32}, {"num_train": 0}, {"colour": "red"}],
    "GridWalk-v0": [
        {"size": 2}, {"size": 7}, {"walls": -1}, {"walls": 7, "holes": 8}, {"max_turns": 1}, {"max_turns": 11}, {"min_distance": 9},
    ],
    "NLVR2-v0": [{"prompt": "long"}, {"image_size": 32}, {"turns": 2}, {"data": "nowhere/at/all"}],
    "Caption-v0": [{"prompt": "long"}, {"image_size": 32}, {"synonyms": "sofa"}, {"data": "nowhere/at/all"}],
    "Zoom-v0": [{"view_size": 63}, {"view_size": 100}, {"zoom": 3}, {"zoom": 1}, {"call_cost": -0.1}, {"call_cost": NAN}, {"max_turns": 1}],
    "Geo3k-v0": [
        {"level": 6}, {"level": []}, {"level": [1, "2"]}, {"angle_step": 7}, {"level": 5, "image_size": 64}, {"image_size": 63},
        {"level": 2, "data": "anywhere"}, {"data": GEO3K, "max_turns": 0}, {"data": GEO3K, "square": True, "image_size": None},
    ],
    "GeoSpot-v0": [
        {"countries": 1}, {"countries": 500}, {"cities": 0}, {"image_size": 32}, {"stage": 5}, {"stage": -0.1}, {"stage": NAN}, {"weights": (1, 2)},
        {"weights": (0, 0, 0)}, {"weights": (1, -1, 0)}, {"taus": {"planet": 1}}, {"taus": {"city": 0}}, {"taus": {"city": INF}},
    ],
    "Control-v0": [
        {"env": "No-such-v0"}, {**CARTPOLE, "actions": ["a", "b", "c"]}, {**CARTPOLE, "actions": {"far": 7}}, {"env": "Pendulum-v1", "actions": None},
        {"env": "Pendulum-v1", "actions": {"push": [9.0]}}, {**CARTPOLE, "history": 0}, {**CARTPOLE, "wind": 3},
    ],
}  # fmt: skip


@pytest.fixture(params=ENVS, ids=[f"{env_id}{'-rows' if 'data' in kwargs else ''}" for env_id, kwargs in ENVS])
def env(request: pytest.FixtureRequest) -> Any:
    made = make(request.param[0], **request.param[1])
    yield made
    made.close()


def shown(env: VisionEnv, **options: Any) -> Any:
    return env.reset(options=options)[0].messages


def test_a_step_needs_an_open_episode(env: VisionEnv) -> None:
    with pytest.raises(RLVLMError, match="call reset"):
        env.step("x")
    env.reset(options={"index": 0})
    for _ in range(100):
        if any(env.step("x")[2:4]):
            break
    with pytest.raises(RLVLMError, match="call reset"):
        env.step("x")


@pytest.mark.parametrize("options", [{"index": 10**6}, {"index": -1}, {"split": "dev"}])
def test_an_item_that_does_not_exist_is_a_user_error(env: VisionEnv, options: dict[str, Any]) -> None:
    with pytest.raises(UserInputError):
        env.reset(options=options)


@pytest.mark.parametrize("env_id", DRAWN)
def test_an_item_depends_on_its_index_split_and_seed_alone(env_id: str) -> None:
    first, again, other = (make(env_id, **DRAWN[env_id], **more) for more in ({}, {"num_train": 5000}, {"seed": 1}))
    item = shown(first, index=7, split="train")
    shown(again, index=3, split="test")
    assert shown(again, index=7, split="train") == item
    others = [shown(first, index=8, split="train"), shown(first, index=7, split="test"), shown(other, index=7)]
    assert all(messages != item for messages in others)


# Settings, how many items of each split are looked at, and the least number of different pictures among them.
@pytest.mark.parametrize(
    ("env_id", "kwargs", "looked_at", "least"),
    [
        ("Shapes-v0", {}, (800, 200), (780, 195)),
        ("GridWalk-v0", {}, (300, 100), (250, 80)),
        ("NLVR2-v0", {}, (250, 250), (480, 480)),
        ("Caption-v0", {}, (250, 250), (230, 230)),
        ("Zoom-v0", {}, (400, 200), (390, 195)),
        ("Geo3k-v0", {"angle_step": 20, "image_size": 64}, (250, 100), (240, 95)),
        ("GeoSpot-v0", {"countries": 12, "cities": 1}, (400, 400), (150, 50)),
        ("Control-v0", {"env": "MiniGrid-Empty-Random-5x5-v0", "tile_size": 8}, (60, 60), (5, 2)),
    ],
)
def test_no_picture_is_in_both_splits(
    env_id: str, kwargs: dict[str, Any], looked_at: tuple[int, int], least: tuple[int, int]
) -> None:
    env = make(env_id, **kwargs)
    train, test = (
        {one.sha256 for index in range(count) for one in shown(env, index=index, split=split)[-1].images}
        for split, count in zip(("train", "test"), looked_at, strict=True)
    )
    assert len(train) >= least[0] and len(test) >= least[1] and not train & test


@pytest.mark.parametrize(("env_id", "kwargs"), [(env_id, one) for env_id, cases in WRONG.items() for one in cases])
def test_a_wrong_argument_is_refused_by_name(env_id: str, kwargs: dict[str, Any]) -> None:
    name = [*kwargs][-1]
    with pytest.raises(UserInputError, match=name if name != "data" else "no file or folder|env.data"):
        make(env_id, **kwargs).num_items("train")


def test_gymnasium_finds_nothing_wrong(env: VisionEnv) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the checker wishes for a spec and array spaces; its errors count
        check_env(env, skip_render_check=True)


# --- whatever a configuration holds for an argument, there is an environment or one sentence that names the key


NEEDED: dict[str, dict[str, Any]] = {"Control-v0": {"env": "CartPole-v1"}, "QA-v0": {"data": GEO3K}}
# Made only: playing starts a browser. It is one of Debian's packages, and its pages come in a package without dependencies.
BROWSER = "MiniWoB-v0"
# What these say is compared with the data when the data are first asked for.
OF_DATA = ("data", "columns", "split_column", "test_share")
# What YAML can hold, and a set, an object and bytes from Python.
ODD: tuple[Any, ...] = (
    "{}", "", "3 4", [], ["x"], [[1]], ["left", 3], {}, {"a": 1}, {"train": 3}, {"up": "x"}, math.nan, -math.inf, -1, 0, 1.5, 10**400,
    3, 17, 10**6, True, None, datetime.date(2026, 1, 1), b"x", {1, 2}, object(),
)  # fmt: skip
ARGUMENTS = [
    (env_id, name)
    for env_id in sorted(
        name for name, point in provided(ENTRY_POINT_GROUP).items() if point.value.startswith("rl_vlm.")
    )
    for name, parameter in inspect.signature(resolve(env_id)).parameters.items()
    if parameter.kind is not parameter.VAR_KEYWORD and (env_id != BROWSER or importlib.util.find_spec("miniwob"))
]


def play(env: VisionEnv) -> None:
    env.num_items("test")
    env.reset(seed=0, options={"index": 0, "split": "train"})
    env.step("none")
    env.close()


@pytest.mark.parametrize(("env_id", "name"), ARGUMENTS)
def test_any_value_of_an_argument_is_taken_or_refused_by_name(env_id: str, name: str) -> None:
    for value in ODD:
        try:
            env = make(env_id, **{**NEEDED.get(env_id, {}), name: value})
        except UserInputError as error:
            assert name in str(error) and len(str(error).splitlines()) == 1
            assert name == "data" or re.match(rf"({env_id}: )?env\.kwargs\.\w", str(error))
            continue
        if env_id == BROWSER:
            continue
        try:
            play(env)
        except UserInputError:
            assert name in OF_DATA
