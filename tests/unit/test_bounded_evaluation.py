"""Held-out items whose environments are processes are played a few at a time, and the processes end: a real engine, no Ray."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_support import until
from test_open_ahead import Direct, in_loop

from rl_vlm.config import PolicyConfig, parse_config
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.evaluation.heldout import evaluation_tasks
from rl_vlm.rollout.env_runner import RolloutWorker
from rl_vlm.rollout.sampler import merged
from rl_vlm.rollout.tasks import RolloutResult, RolloutTask
from rl_vlm.runs.policy import held_at_once
from rl_vlm.zoo.shapes.environment import ShapesEnv

ITEMS, AT_ONCE = 5, 2
TRAINING = [RolloutTask("train", 0, "train", 0, 0, 2, 1.0, 0)]


class Counted(ShapesEnv):
    """Leaves a file in `folder` while it lives, and the number of such files when it was made in `folder`/made."""

    def __init__(self, folder: str, **more: Any) -> None:
        super().__init__(**more)
        self.mark = Path(folder) / f"{os.getpid()}-{id(self)}.env"
        self.mark.touch()
        with (Path(folder) / "made").open("a") as made:
            made.write(f"{len(alive(Path(folder)))}\n")

    def close(self) -> None:
        self.mark.unlink(missing_ok=True)


def alive(folder: Path) -> list[Path]:
    return list(folder.glob("*.env"))


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> Iterator[TransformersEngine]:
    engine = TransformersEngine(tiny_folder, max_context=512)
    yield engine
    asyncio.run(engine.close())


def run_of(folder: Path, isolation: str, **evaluation: Any) -> PolicyConfig:
    folder.mkdir()
    env = {"id": f"{__file__}:Counted", "kwargs": {"folder": str(folder)}, "isolation": isolation}
    variants = {"default": {}, "rule": {"task": "rule"}}
    return parse_config(
        {
            "env": env,
            "rollout": {"group_size": 2, "prompts_per_iteration": 1, "group_retries": 0},
            "evaluation": {"num_items": ITEMS, "variants": variants, "at_once": AT_ONCE, **evaluation},
        }
    )


def played(
    run: PolicyConfig, engine: TransformersEngine, model: Path, folder: Path, left: int
) -> tuple[RolloutResult, list[int]]:
    """An evaluation between two rounds of training, and the numbers of environments when each was made; at most `left`
    live on."""
    worker = RolloutWorker(run, "run", model)
    worker._client = Direct(engine)  # type: ignore[assignment]

    async def sample() -> RolloutResult:
        await worker.run(TRAINING)
        tasks, at_once = evaluation_tasks(run, {"": None}, 0), run.held_out_at_once or 2 * ITEMS
        parts = [await worker.run(tasks[start : start + at_once]) for start in range(0, len(tasks), at_once)]
        await worker.run(TRAINING)
        await until(lambda: len(alive(folder)) <= left, 30)
        return merged(parts, sum)

    result = in_loop(sample)
    worker.close_envs()
    return result, [int(line) for line in (folder / "made").read_text().split()]


def test_processes_are_bounded_and_end_and_the_answers_are_those_of_all_items_at_once(
    engine: TransformersEngine, tiny_folder: Path, tmp_path: Path
) -> None:
    few, several = tmp_path / "few", tmp_path / "several"
    bounded, made = played(run_of(few, "process"), engine, tiny_folder, few, left=2 * 2)
    assert max(made) <= 3 * AT_ONCE  # of the two variants, and those that are being closed
    free, made = played(run_of(several, "thread"), engine, tiny_folder, several, left=2 * ITEMS)
    assert max(made) == 2 * ITEMS  # in this process all play at once, as they cost little, and are kept
    assert not bounded.lost and not free.lost and len(bounded.groups) == 2 * ITEMS

    def answers(result: RolloutResult) -> list[tuple[str, list[int], float, str]]:
        return [
            (group.group_id, one.token_ids.tolist(), one.reward, one.images[0].sha256)
            for group in result.groups
            for one in group.trajectories
        ]

    assert answers(bounded) == answers(free)


def test_a_server_of_environments_needs_places_for_the_bounded_evaluation_only(tmp_path: Path) -> None:
    process = run_of(tmp_path / "process", "process", samples=4)
    assert held_at_once(process, "", None) == (2, AT_ONCE * 4)
    thread = run_of(tmp_path / "thread", "thread", samples=4)
    assert held_at_once(thread, "", None) == (2, 2 * ITEMS * 5 + thread.sight.blank_items)
