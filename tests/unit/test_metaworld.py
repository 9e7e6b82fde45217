"""MetaWorld behind ControlEnv: starts, goals, views. It is part of the development install."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from rl_vlm.control_envs.metaworld import MetaWorldEnv
from rl_vlm.control_envs.registry import make_control_env


@pytest.fixture
def drawer() -> Iterator[MetaWorldEnv]:
    env = make_control_env("metaworld/drawer-open-v3", image_size=100)
    assert isinstance(env, MetaWorldEnv)
    yield env
    env.close()


def rollout(env: MetaWorldEnv, seed: int, steps: int = 10) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rows = [np.append(env.reset(seed=seed)[0], 0.0)]
    for _ in range(steps):
        observation, reward, *_ = env.step(rng.uniform(-1, 1, 4).astype(np.float32))
        rows.append(np.append(observation, reward))
    return np.array(rows)


def test_an_episode_follows_from_its_seed_also_after_others(drawer: MetaWorldEnv) -> None:
    rollout(drawer, 1)
    other = make_control_env("metaworld_drawer-open-v2")  # the original's name for it
    assert np.array_equal(rollout(drawer, 2), rollout(other, 2))
    other.close()


def test_starts_differ() -> None:
    env = MetaWorldEnv("drawer-open")
    assert not np.array_equal(env.reset(seed=0)[0][4:7], env.reset(seed=1)[0][4:7])


def test_the_goal_is_hidden_unless_it_is_asked_for() -> None:
    hidden, shown = MetaWorldEnv("reach"), MetaWorldEnv("reach", observe_goal=True)
    for env in (hidden, shown):
        env.reset(seed=0)
    action = np.zeros(4, np.float32)
    assert not hidden.step(action)[0][-3:].any()
    goal = shown.step(action)[0][-3:]
    assert goal == pytest.approx(shown._inner._target_pos, abs=1e-6) and goal.any()


def test_it_truncates_at_the_horizon_and_success_does_not_end_it() -> None:
    env = MetaWorldEnv("drawer-open", horizon=5)
    env.reset(seed=0)
    ends = [env.step(np.zeros(4, np.float32))[2:4] for _ in range(5)]
    assert ends == [(False, False)] * 4 + [(False, True)]
    env.reset(seed=1)
    assert env.step(np.zeros(4, np.float32))[2:4] == (False, False)


def test_the_picture_shows_the_object_and_not_the_robot(drawer: MetaWorldEnv) -> None:
    with_arm = MetaWorldEnv("drawer-open", image_size=100, hide_arm=False)
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
    with_arm.close()


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
