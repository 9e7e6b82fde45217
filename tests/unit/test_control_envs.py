"""Control environments: gymnasium's own checker, RL-VLM-F's CartPole, ids and their errors."""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.utils.env_checker import check_env

from rl_vlm.control_envs.base import ControlEnv
from rl_vlm.control_envs.cartpole import draw_cartpole
from rl_vlm.control_envs.metaworld import MetaWorldEnv
from rl_vlm.control_envs.registry import make_control_env
from rl_vlm.control_envs.softgym import SoftGymControlEnv
from rl_vlm.types import UserInputError

CARTPOLE = "ContinuousCartPole-v0"
METAWORLD = pytest.param("metaworld/drawer-open-v3", marks=pytest.mark.slow)
ORIGINALS_NAME = pytest.param("metaworld_drawer-open-v2", marks=pytest.mark.slow)


def play(env: ControlEnv, seed: int, steps: int) -> np.ndarray:
    """Observations and rewards of an episode of random actions, one row per step."""
    rng = np.random.default_rng(seed)
    env.reset(seed=seed)
    rows = []
    for _ in range(steps):
        observation, reward, *_ = env.step(rng.uniform(-1, 1, env.action_space.shape).astype(np.float32))
        rows.append([*observation, reward])
    return np.array(rows)


@pytest.mark.parametrize("env_id", [CARTPOLE, "Pendulum-v1", "MountainCarContinuous-v0", METAWORLD])
def test_gymnasiums_checker_accepts_it(env_id: str) -> None:
    env = make_control_env(env_id)
    check_env(env, skip_render_check=True)
    frame = env.frame()
    assert frame.dtype == np.uint8 and frame.shape == (env.image_size, env.image_size, 3)
    env.close()


@pytest.mark.parametrize("env_id", [CARTPOLE, "Pendulum-v1", ORIGINALS_NAME])
def test_the_same_seed_and_actions_give_the_same_episode_also_after_others(env_id: str) -> None:
    env, other = make_control_env(env_id), make_control_env(env_id)
    play(env, 3, 20)
    assert np.array_equal(play(env, 7, 30), play(other, 7, 30))


def test_cartpole_moves_as_gymnasiums_does_under_full_force() -> None:
    env, reference = make_control_env(CARTPOLE), CartPoleEnv()
    env.reset(seed=0)
    reference.reset(seed=0)
    state = np.array([0.02, -0.04, 0.03, 0.01])
    env._state, reference.state = tuple(state), state.copy()  # type: ignore[attr-defined]
    for push in (1, 1, -1, 1, -1, -1, -1, 1):
        ours, reward, *_ = env.step(np.array([push], np.float32))
        theirs = reference.step(int(push > 0))[0]
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-7)
        assert reward == pytest.approx(-abs(math.degrees(theirs[2])), rel=1e-5)


def test_gymnasium_actions_are_rescaled_to_the_environments_bounds() -> None:
    env, plain = make_control_env("Pendulum-v1"), gymnasium.make("Pendulum-v1")
    assert env.action_space.high == 1.0
    env.reset(seed=4)
    plain.reset(seed=4)
    for share in (0.5, -1.0, 0.25):
        ours = env.step(np.array([share], np.float32))
        theirs = plain.step(np.array([2.0 * share], np.float32))
        assert ours[0] == pytest.approx(theirs[0]) and ours[1] == pytest.approx(theirs[1])
    assert env.horizon == 200


class OldSimulator:
    """The old gym interface, as SoftGym's environments have it."""

    horizon = 3

    def __init__(self) -> None:
        self.action_space = gymnasium.spaces.Box(np.array([-2.0, 0.0]), np.array([2.0, 4.0]))
        self.observation_space = gymnasium.spaces.Box(-1, 1, (2, 2))
        self.actions: list[np.ndarray] = []

    def reset(self) -> np.ndarray:
        return np.random.rand(2, 2)

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, dict[str, Any]]:
        self.actions.append(action)
        count = len(self.actions)
        return np.ones((2, 2)), -1.0, count == 3, {"normalized_performance": 0.5 * count}

    def render(self, mode: str = "rgb_array", hide_picker: bool = False) -> np.ndarray:
        return np.full((720, 720, 3), 9 if hide_picker else 1, np.uint8)


def make_old_simulator(**kwargs: Any) -> SoftGymControlEnv:
    return SoftGymControlEnv(OldSimulator(), render_kwargs={"hide_picker": True}, **kwargs)


def test_simulators_of_the_old_interface_run_through_an_adapter() -> None:
    env = make_control_env(f"{__file__}:make_old_simulator", image_size=90)
    first, _ = env.reset(seed=5)
    again, _ = env.reset(seed=5)
    assert first.shape == (4,) and np.array_equal(first, again)
    results = [env.step(np.array([-0.5, 0.5], np.float32)) for _ in range(3)]
    assert env.simulator.actions[0] == pytest.approx([-1.0, 3.0])  # type: ignore[attr-defined]
    assert [(terminated, truncated) for _, _, terminated, truncated, _ in results] == [(False, False)] * 2 + [
        (False, True)
    ]
    assert [env.success(info) for *_, info in results] == [0.0, 1.0, 1.0]
    assert env.frame().shape == (90, 90, 3) and (env.frame() == 9).all()


class OwnEnv(gymnasium.Env[Any, Any]):
    """A user's environment, which knows nothing of horizons."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, size: int = 1) -> None:
        self.size = size

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32), {}

    def step(self, action: np.ndarray) -> Any:
        return np.zeros(2, np.float32), 0.0, False, False, {"reached": True}


class PassesOn(OwnEnv):
    """Hands what it does not know to its base, as subclasses do."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)


def drawn(env: Any) -> np.ndarray:
    return np.full((40, 40, 3), env.size, np.uint8)


@pytest.mark.parametrize("name", ["OwnEnv", "PassesOn"])
def test_a_users_gymnasium_class_gets_its_own_arguments_and_the_wrapper_the_others(name: str) -> None:
    env = make_control_env(
        f"{__file__}:{name}", size=7, horizon=3, render=f"{__file__}:drawn", success="reached", image_size=32
    )
    env.reset(seed=0)
    *_, info = env.step(np.zeros(1, np.float32))
    assert (env.horizon, env.success(info)) == (3, 1.0)
    assert env.frame().shape == (32, 32, 3) and (env.frame() == 7).all()
    with pytest.raises(UserInputError, match="set env.kwargs.horizon"):
        make_control_env(f"{__file__}:{name}", render=f"{__file__}:drawn")
    with pytest.raises(UserInputError, match="env.kwargs"):
        make_control_env(CARTPOLE, success="reached")


@pytest.mark.parametrize(
    ("env_id", "kwargs", "sentence"),
    [
        ("ContinuousCartPole-v1", {}, "Did you mean ContinuousCartPole-v0"),
        ("Pendulm-v1", {}, "Did you mean Pendulum-v1"),
        ("CartPole-v1", {}, "bounded Box of real-valued actions"),
        ("softgym/RopeFlattenEasy", {}, "entry-point group rl_vlm.control_envs"),
        (CARTPOLE, {"horizont": 3}, "correct env.kwargs"),
        ("Pendulum-v1", {"gravity": 9.8, "colour": 1}, "correct env.kwargs"),
        ("no_such_package.module:Env", {}, "cannot be imported"),
        ("collections:UserDict", {}, "neither a ControlEnv nor a gymnasium.Env"),
    ],
)
def test_what_is_wrong_with_an_environment_is_said_in_one_sentence(
    env_id: str, kwargs: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserInputError, match=sentence):
        make_control_env(env_id, **kwargs)


# --- The drawing of the cart and its pole shows the angle


BROWN = np.array([202, 152, 101])


def pole_pixels(frame: np.ndarray) -> np.ndarray:
    """[P, 2] (x, y) of the brown pixels."""
    rows, columns = np.nonzero(np.abs(frame.astype(int) - BROWN).max(-1) < 8)
    return np.stack([columns, rows], axis=1).astype(float)


@pytest.mark.parametrize("size", [64, 100, 200])
@pytest.mark.parametrize("degrees", [-30, -12, 0, 7, 30])
def test_the_angle_can_be_read_from_the_picture(size: int, degrees: float) -> None:
    frame = draw_cartpole(math.radians(degrees), size)
    assert frame.shape == (size, size, 3) and frame.dtype == np.uint8
    points = pole_pixels(frame)
    # The first principal axis of the brown pixels is the pole's own.
    _, _, axes = np.linalg.svd(points - points.mean(0), full_matrices=False)
    x, y = axes[0] if axes[0][1] < 0 else -axes[0]
    assert math.degrees(math.atan2(x, -y)) == pytest.approx(degrees, abs=1.0)


# --- MetaWorld: starts, goals, views. It is part of the development install


@pytest.mark.slow
def test_starts_differ() -> None:
    env = MetaWorldEnv("drawer-open")
    assert not np.array_equal(env.reset(seed=0)[0][4:7], env.reset(seed=1)[0][4:7])


@pytest.mark.slow
def test_it_truncates_at_the_horizon_and_success_does_not_end_it() -> None:
    env = MetaWorldEnv("drawer-open", horizon=5)
    env.reset(seed=0)
    ends = [env.step(np.zeros(4, np.float32))[2:4] for _ in range(5)]
    assert ends == [(False, False)] * 4 + [(False, True)]
    env.reset(seed=1)
    assert env.step(np.zeros(4, np.float32))[2:4] == (False, False)


@pytest.mark.slow
def test_the_goal_is_hidden_unless_it_is_asked_for() -> None:
    hidden, shown = MetaWorldEnv("reach"), MetaWorldEnv("reach", observe_goal=True)
    for env in (hidden, shown):
        env.reset(seed=0)
    action = np.zeros(4, np.float32)
    assert not hidden.step(action)[0][-3:].any()
    goal = shown.step(action)[0][-3:]
    assert goal == pytest.approx(shown._inner._target_pos, abs=1e-6) and goal.any()


@pytest.mark.slow
def test_the_picture_shows_the_object_and_not_the_robot() -> None:
    drawer, with_arm = (MetaWorldEnv("drawer-open", image_size=100, hide_arm=hidden) for hidden in (True, False))
    frames = {}
    for env in (drawer, with_arm):
        env.reset(seed=0)
        for _ in range(40):
            env.step(np.array([0, 1, 0, -1], np.float32))  # towards the drawer
        frames[env] = env.frame().astype(int)
    red = {env: ((f[..., 0] > 90) & (f[..., 1] < 50) & (f[..., 2] < 60)).sum() for env, f in frames.items()}
    green = (frames[drawer][..., 1] > frames[drawer][..., 0] + 30).sum()
    assert red[drawer] == 0 and red[with_arm] > 50
    assert green > 1000  # the drawer takes a tenth of the picture or more
    drawer.close(), with_arm.close()


@pytest.mark.slow
def test_drawing_a_picture_changes_nothing_of_the_episode() -> None:
    def episode(drawn: tuple[int, ...]) -> np.ndarray:
        env, rng = MetaWorldEnv("coffee-push", image_size=16), np.random.default_rng(0)
        rows = [env.reset(seed=2)[0]]
        for step in range(200):
            if step in drawn:
                env.frame()
            to_mug = np.append(10 * (rows[-1][4:7] - rows[-1][:3]), 1.0) + rng.normal(0, 0.3, 4)
            anywhere = np.append(rng.normal(0, 1, 3) - (0, 0.5, 0), to_mug[3])  # also against the mug
            rows.append(env.step(np.asarray(anywhere if step > 60 else to_mug, np.float32))[0])
        env.close()
        return np.array(rows)

    unseen = episode(())
    assert np.array_equal(episode((40,)), unseen) and np.array_equal(episode((0, 90, 91)), unseen)


@pytest.mark.slow
def test_the_first_picture_of_a_later_episode_shows_its_own_scene() -> None:
    """A reset moves the coffee machine after MetaWorld's last computation of where things are."""
    later, fresh = MetaWorldEnv("coffee-push", image_size=60), MetaWorldEnv("coffee-push", image_size=60)
    later.reset(seed=1)
    later.frame()
    frames = []
    for env in (later, fresh):
        env.reset(seed=2)
        frames.append(env.frame())
        env.close()
    assert np.array_equal(*frames)
