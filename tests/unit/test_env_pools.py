"""One pool of environments per set of arguments, and never many."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rl_vlm.config import PolicyConfig, parse_config
from rl_vlm.envs.base import VisionEnv
from rl_vlm.envs.isolation import ProcessEnv
from rl_vlm.rollout.env_pool import EnvPool, EnvPools
from rl_vlm.rollout.tasks import RolloutTask

MIXTURE = [
    {"name": "count", "id": "Shapes-v0", "kwargs": {"num_train": 40}},
    {"name": "walk", "id": "GridWalk-v0", "kwargs": {"size": 4}, "num_items": 9},
]


def run_of(**changes: Any) -> PolicyConfig:
    variants = {"default": {}, "small": {"walk": {"size": 3}}}
    return parse_config({"env": {"mixture": MIXTURE, **changes}, "evaluation": {"variants": variants}})


def task(env: str = "walk", variant: str = "", **arguments: Any) -> RolloutTask:
    return RolloutTask("g", 0, "train", 0, 0, 2, 1.0, 0, variant, env=env, arguments=arguments)


def take(pool: EnvPool, count: int = 2) -> list[VisionEnv]:
    return asyncio.run(pool.borrow(count))


def test_environment_variant_and_arguments_make_the_environments() -> None:
    pools = EnvPools(run_of())
    cases = [(task(), 4), (task(variant="small"), 3), (task(size=5), 5), (task(variant="small", size=6), 6)]
    for one, size in cases:
        (env,) = take(pools.of(one), 1)
        assert env.difficulty.size == size  # type: ignore[attr-defined]
    assert type(take(pools.of(task("count")), 1)[0]).__name__ == "ShapesEnv"
    assert len(pools) == 5
    assert pools.of(task(size=5, walls=1)) is pools.of(task(walls=1, size=5))
    pools.close()


def test_environments_come_back_to_the_tasks_with_equal_arguments() -> None:
    pools = EnvPools(run_of())
    envs = take(pools.of(task(size=3)))
    pools.of(task(size=3)).give_back(envs)
    assert set(map(id, take(pools.of(task(size=3))))) == set(map(id, envs))
    pools.close()


def test_what_is_lent_is_counted_whatever_becomes_of_it() -> None:
    made = []

    def make() -> Any:
        made.append(None)
        if len(made) == 4:
            raise RuntimeError("the fourth")
        return EnvPools(run_of()).of(task())._make()

    pool = EnvPool(make, timeout_s=30.0, inline=True)
    envs = take(pool)
    assert pool.lent == 2
    pool.give_back(envs[:1])
    pool.discard(envs[1:])
    assert pool.lent == 0
    with pytest.raises(Exception, match="the fourth"):
        take(pool, 3)  # one is reused, one is built, one fails
    assert pool.lent == 0 and len(take(pool)) == 2 and pool.lent == 2
    pool.close()


def test_isolation_applies_to_every_environment_of_a_mixture() -> None:
    pools = EnvPools(run_of(isolation="process"))
    (env,) = take(pools.of(task("count", turns=2)), 1)
    assert isinstance(env, ProcessEnv)
    pools.close()
