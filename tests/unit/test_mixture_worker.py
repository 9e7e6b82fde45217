"""A worker plays the tasks of a mixture with the arguments of their stage, and pays by parts: a real engine, no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_open_ahead import Direct, in_loop

from rl_vlm.config import PolicyConfig, parse_config
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.rollout.curriculum import make_task_source
from rl_vlm.rollout.env_runner import RolloutWorker
from rl_vlm.rollout.tasks import RolloutResult, TaskStream
from rl_vlm.zoo.drawing import IMAGE_SIZE

MIXTURE: list[dict[str, Any]] = [
    {"name": "count", "id": "Shapes-v0", "reward": {"weights": {"env": 1.0, "format": 0.5}}},
    {"name": "rule", "id": "Shapes-v0", "kwargs": {"task": "rule"}},
]
STAGES = [{"start": 0, "env": {"count": {"image_size": 96}}}, {"start": 8}]


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> Iterator[TransformersEngine]:
    engine = TransformersEngine(tiny_folder, max_context=512)
    yield engine
    asyncio.run(engine.close())


def run_of(mixture: list[dict[str, Any]] = MIXTURE) -> PolicyConfig:
    rollout = {"group_size": 2, "prompts_per_iteration": 4, "group_retries": 0, "require_end_of_turn": False}
    return parse_config({"env": {"mixture": mixture}, "curriculum": {"stages": STAGES}, "rollout": rollout})


def play(run: PolicyConfig, stream: TaskStream, engine: TransformersEngine, folder: Path) -> RolloutResult:
    worker = RolloutWorker(run, "run", folder)
    worker._client = Direct(engine)  # type: ignore[assignment]

    async def sample() -> RolloutResult:
        return await worker.run(stream.take(4))

    result = in_loop(sample)
    worker.close_envs()
    return result  # type: ignore[no-any-return]


def test_tasks_are_played_as_their_stage_says_and_paid_as_their_environment_says(
    engine: TransformersEngine, tiny_folder: Path
) -> None:
    run = run_of()
    stream = TaskStream(make_task_source(run, {"count": 50, "rule": 50}), run)
    first = play(run, stream, engine, tiny_folder)
    stream.done_with(first.groups)
    second = play(run, stream, engine, tiny_folder)
    assert not first.lost and not second.lost
    assert [(group.env, group.stage) for group in first.groups] == [("count", 0), ("rule", 0)] * 2
    assert {group.stage for group in second.groups} == {1}
    widths = [
        {t.images[0].width for g in r.groups if g.env == "count" for t in g.trajectories} for r in (first, second)
    ]
    assert widths == [{96}, {IMAGE_SIZE}]
    for group in (*first.groups, *second.groups):
        for one in group.trajectories:
            (turn,) = one.turns
            if group.env == "rule":
                assert turn.parts == () and turn.reward in (0.0, 1.0)
            else:
                assert turn.reward == dict(turn.parts)["env"] + 0.5 * turn.well_formed
                assert turn.well_formed == bool(one.info.get("well_formed", False))


def test_a_reward_that_names_an_unknown_part_loses_the_group_with_the_reason(
    engine: TransformersEngine, tiny_folder: Path
) -> None:
    run = run_of([{**MIXTURE[0], "reward": {"weights": {"env": 1.0, "anwser": 1.0}}}, MIXTURE[1]])
    stream = TaskStream(make_task_source(run, {"count": 50, "rule": 50}), run)
    result = play(run, stream, engine, tiny_folder)
    assert result.dropped["reward_part"] == len(result.lost) == 2
    assert all("env.reward.weights names anwser" in reason for reason in result.lost.values())
