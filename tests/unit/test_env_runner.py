"""An env runner with a policy lag answers several calls at once; every call returns its own group when it is complete."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
from test_open_ahead import Direct, tasks

from rl_vlm.config import PolicyConfig, parse_config
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.envs.base import ObservationSpace, StepResult, TextSpace
from rl_vlm.models.reference import ModelReference
from rl_vlm.rollout.base_env_runner import RunnerConfig
from rl_vlm.rollout.env_runner import VLMEnvRunner
from rl_vlm.zoo.shapes.environment import ShapesEnv


class OneIsSlow(ShapesEnv):
    """A step of item 0 takes until the file `gate` is there, and a second more. Beside it each call's seconds are noted."""

    def __init__(self, gate: str = "", **more: Any) -> None:
        super().__init__(**more)
        self.gate = Path(gate)

    def reset(self, **more: Any) -> Any:
        self.index = more["options"]["index"]
        return super().reset(**more)

    def step(self, action: str) -> StepResult:
        started = time.monotonic()
        while self.index == 0 and not self.gate.exists() and time.monotonic() - started < 300:
            time.sleep(0.02)
        return super().step(action)


def run_of(lag: int, gate: Path = Path(), **rollout: Any) -> PolicyConfig:
    env = {"id": f"{__file__}:OneIsSlow", "kwargs": {"gate": str(gate)}}
    return parse_config(
        {"env": env, "rollout": {"group_size": 2, "max_policy_lag": lag, "require_end_of_turn": False, **rollout}}
    )


@pytest.fixture
def runner(tiny_folder: Path, tmp_path: Path) -> Iterator[VLMEnvRunner]:
    config = RunnerConfig(
        run_of(lag=2, gate=tmp_path / "gate"),
        "run",
        ModelReference.of(str(tiny_folder)),
        ObservationSpace(),
        TextSpace(),
    )
    runner, engine = VLMEnvRunner(config=config), TransformersEngine(tiny_folder, max_context=512)
    runner._worker._client = Direct(engine)  # type: ignore[assignment]
    yield runner
    runner.stop()
    asyncio.run_coroutine_threadsafe(engine.close(), runner._loop).result(30)


def test_a_slow_group_does_not_hold_up_the_others(runner: VLMEnvRunner, tmp_path: Path) -> None:
    runner.sample(tasks=tasks(1, 1))  # environments and model are warm
    with ThreadPoolExecutor(4) as calls:  # as Ray's threads of the actor
        slow, *others = [calls.submit(runner.sample, tasks=[task]) for task in tasks(0, 4)]
        assert not wait(others, timeout=240).not_done and not slow.done()
        (tmp_path / "gate").touch()
        results = [future.result(120) for future in (slow, *others)]
    assert [[g.group_id for g in result.groups] for result in results] == [[f"{k:06d}"] for k in range(4)]
    assert all(not result.lost and len(result.groups[0]) == 2 for result in results)


def test_a_runner_has_room_for_its_share_of_the_groups_and_an_evaluation() -> None:
    assert VLMEnvRunner.concurrent_calls(run_of(0)) == 1
    assert VLMEnvRunner.concurrent_calls(run_of(2, prompts_per_iteration=16, num_env_runners=3)) == 11 + 1
    assert VLMEnvRunner.concurrent_calls(run_of(2, groups_per_runner=5)) == 5 + 1
