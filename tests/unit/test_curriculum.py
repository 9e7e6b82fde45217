"""The curriculum as a task source: when stages change, what tasks carry, and that a restored one goes on exactly."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from task_support import solved_group

from rl_vlm.config import parse_config
from rl_vlm.rollout.curriculum import Curriculum, make_task_source
from rl_vlm.rollout.tasks import RolloutTask, TaskItem, TaskStream
from rl_vlm.types import UserInputError

SIZES = [{"start": 0, "env": {"size": 3}}, {"start": 8, "env": {"size": 4}}, {"start": 20, "env": {"size": 5}}]
MIXTURE = [{"name": "count", "id": "Shapes-v0"}, {"name": "walk", "id": "GridWalk-v0", "weight": 2.0}]


def source(items: int | None = 50, **settings: Any) -> Curriculum:
    found = make_task_source(parse_config({"curriculum": settings}), {"": items})
    assert isinstance(found, Curriculum)
    return found


def sizes(curriculum: Curriculum, count: int = 1) -> list[Any]:
    return [item.arguments.get("size") for item in curriculum.take(count)]


# --- by episodes and by iterations


def test_stages_change_when_their_episodes_have_been_sampled() -> None:
    curriculum = source(stages=SIZES)
    seen = []
    for _ in range(6):
        seen.append(sizes(curriculum, 2))
        curriculum.observe([solved_group([1, 0, 0, 0], stage=curriculum.stage)])
    # Episodes before each take: 0, 4, 8, 12, 16, 20.
    assert seen == [[3, 3], [3, 3], [4, 4], [4, 4], [4, 4], [5, 5]]
    assert curriculum.metrics()["curriculum/taken/1"] == 6.0


def test_episodes_of_an_earlier_stage_count_but_not_as_this_stages_solve_rate() -> None:
    curriculum = source(stages=SIZES)
    curriculum.observe([solved_group([1] * 8)])
    assert curriculum.stage == 1
    curriculum.observe([solved_group([1] * 4, stage=0)])  # was under way with a lag
    assert "curriculum/solve_rate" not in curriculum.metrics()
    curriculum.observe([solved_group([1, 0, 0, 0], stage=1)])
    assert curriculum.metrics()["curriculum/solve_rate"] == 0.25
    assert curriculum.metrics()["curriculum/episodes"] == 16.0


def test_stages_change_with_the_learners_steps() -> None:
    curriculum = source(stages=SIZES, by="iterations")
    seen = []
    for iteration in (0, 7, 8, 19, 20, 8):  # back after a learner was replaced
        curriculum.begin(iteration)
        curriculum.observe([solved_group([1] * 100, stage=curriculum.stage)])
        seen += sizes(curriculum)
    assert seen == [3, 3, 4, 4, 5, 4]


def test_blended_arguments_reach_the_tasks() -> None:
    stages = [{"start": 0, "env": {"tau": 100.0}}, {"start": 8, "env": {"tau": 20.0}}]
    curriculum = source(stages=stages, blend=True, blend_levels=4)
    seen = []
    for _ in range(5):
        (item,) = curriculum.take(1)
        seen.append(item.arguments["tau"])
        curriculum.observe([solved_group([1, 0], stage=curriculum.stage)])
    assert seen == [100.0, 80.0, 60.0, 40.0, 20.0]


# --- state


def lost(item: TaskItem) -> RolloutTask:
    """The task of an item, whose group was lost."""
    return RolloutTask("lost", item.index, "train", 0, 0, 4, 1.0, 0, env=item.env, stage=item.stage)


def drive(curriculum: Any, rounds: int, rng: np.random.Generator) -> list[Any]:
    """Take, lose and observe like a run whose results depend on the task alone."""
    taken = []
    for _ in range(rounds):
        items = curriculum.take(5)
        taken += items
        curriculum.lose([lost(item) for item in items if item.index % 11 == 5])
        curriculum.observe(
            [
                solved_group([(item.index + k) % 3 == 0 for k in range(4)], item.env, item.index, item.stage)
                for item in items
                if item.index % 11 != 5
            ]
        )
    return taken


CASES: dict[str, dict[str, Any]] = {
    "blended": {
        "stages": [{"start": 0, "env": {"walk": {"size": 3}}}, {"start": 70, "env": {"walk": {"size": 5}}}],
        "blend": True,
    },
    "solve_rate": {"sampling": "solve_rate", "stages": [{"start": 0}, {"start": 70}]},
    "without stages": {"sampling": "solve_rate"},
}


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
@pytest.mark.parametrize("before", [1, 3])
def test_a_restored_source_goes_on_where_it_stopped(settings: dict[str, Any], before: int) -> None:
    run = parse_config({"env": {"mixture": MIXTURE}, "curriculum": settings, "seed": 7})
    whole, first, second = (make_task_source(run, {"count": 12, "walk": 30}) for _ in range(3))
    rng = np.random.default_rng(0)
    expected = drive(whole, before + 4, rng)
    found = drive(first, before, rng)
    second.restore(json.loads(json.dumps(first.state())))
    found += drive(second, 4, rng)
    assert found == expected
    assert second.state() == whole.state() and second.metrics() == whole.metrics()
    assert len({item.stage for item in expected}) == (2 if "stages" in settings else 1)


def test_tasks_that_were_under_way_are_sampled_as_the_resumed_run_says() -> None:
    """They keep stage and arguments; but its learner divides logits by the new temperature, and would take the old one's
    answers for another policy's."""
    run, changed = (
        parse_config({"curriculum": {"stages": SIZES}, "rollout": {"prompts_per_iteration": 2, **changes}})
        for changes in ({}, {"group_size": 4, "temperature": 0.5})
    )
    stream, resumed = (TaskStream(make_task_source(one, {"": 50}), one) for one in (run, changed))
    before = stream.take(2)
    stream.done_with([solved_group([1] * 8)])
    resumed.restore(json.loads(json.dumps(stream.state())))
    after = resumed.take(3)
    assert after[:2] == [replace(task, size=4, temperature=0.5) for task in before]
    assert before[0].arguments == {"size": 3} and (after[2].stage, after[2].temperature) == (1, 0.5)


def test_a_checkpoint_of_another_curriculum_is_rejected() -> None:
    plain = make_task_source(parse_config({}), {"": 50})
    staged, fewer = source(stages=SIZES), source(stages=SIZES[:2])
    with pytest.raises(UserInputError, match="stages 0, 1, 2"):
        fewer.restore(staged.state())
    with pytest.raises(UserInputError, match="has no stages"):
        staged.restore(plain.state())
    with pytest.raises(UserInputError, match="curriculum.stages"):
        plain.restore(staged.state())
