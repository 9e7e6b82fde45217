"""The curriculum as a task source: when stages change, what tasks carry, and that a restored one goes on exactly."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tables import table
from task_support import solved_group

from rl_vlm.config import parse_config
from rl_vlm.rollout.curriculum import Curriculum, Stages, blend, make_task_source
from rl_vlm.rollout.mixture import TaskItem
from rl_vlm.rollout.task_stream import TaskStream
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.types import UserInputError

TABLES = table("curriculum")
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


# --- What stages set: blending by hand values, every set of arguments, configurations that are refused


# vlm-gym's stages for GeoSpot: weights of country, region and city, and kernels that tighten.
GEOSPOT = [
    {"start": 0, "env": {"weights": [1.0, 0.0, 0.0], "tau": 2000}},
    {"start": 100, "env": {"weights": [0.5, 0.0, 0.0], "tau": 1500}},
    {"start": 300, "env": {"weights": [0.3, 0.4, 0.0], "tau": 500}},
]


def stages(given: list[dict[str, Any]], kwargs: dict[str, Any] | None = None, **settings: Any) -> Stages:
    run = parse_config({"env": {"kwargs": kwargs or {}}, "curriculum": {"stages": given, **settings}})
    return Stages(run.curriculum, run.env)


@pytest.mark.parametrize(("here", "there", "share", "value"), TABLES["blended_values_are_those_computed_by_hand"])
def test_blended_values_are_those_computed_by_hand(here: Any, there: Any, share: float, value: Any) -> None:
    """Whole numbers stay whole, and halves go up."""
    found = blend(here, there, share)
    assert found == value and type(found) is type(value)


def test_a_share_moves_in_levels_from_one_start_to_the_next() -> None:
    moving = stages(GEOSPOT, blend=True, blend_levels=4)
    found = [moving.share(1, done) for done in (100, 149, 150, 199, 200, 250, 299, 300)]
    assert found == [0.0, 0.0, 0.25, 0.25, 0.5, 0.75, 0.75, 0.75]  # 300 begins the next stage
    assert moving.share(2, 5000) == 0.0 and stages(GEOSPOT).share(1, 299) == 0.0


def test_what_one_stage_leaves_out_moves_from_the_environments_own_argument() -> None:
    moving = stages(
        [{"start": 0, "env": {"size": 3}}, {"start": 10, "env": {"walls": 6}}], {"size": 5, "walls": 2}, blend=True
    )
    assert moving.arguments(0) == {"": {"size": 3}}
    assert moving.arguments(0, 0.5) == {"": {"size": 4, "walls": 4}}
    without = stages([{"start": 0}, {"start": 10, "env": {"walls": 6}}], blend=True)
    assert without.arguments(0, 0.5) == {"": {}}  # nothing to move from


def test_every_set_of_arguments_is_known_ahead_and_their_number_is_bounded() -> None:
    moving = stages([{"start": 0, "env": {"size": 3}}, {"start": 10, "env": {"size": 5}}], blend=True, blend_levels=64)
    assert [arguments["size"] for _, _, arguments in moving.all_arguments()] == [3, 4, 5]
    many = list(stages(GEOSPOT, blend=True, blend_levels=4).all_arguments())
    assert len(many) == 2 * 4 + 1
    assert [where for where, _, _ in many][:2] == ["curriculum.stages, stage 0", "curriculum.stages, stage 0, 1/4 of the way to the next"]  # fmt: skip
    found = {str(moving.arguments(0, moving.share(0, done))[""]) for done in range(10)}
    assert found <= {str(arguments) for _, _, arguments in moving.all_arguments()}


def test_a_stage_of_a_mixture_sets_arguments_and_weights_by_name() -> None:
    given = [{"start": 0, "env": {"walk": {"size": 3}}, "mixture": {"count": 3.0, "walk": 0.0}}, {"start": 8}]
    run = parse_config({"env": {"mixture": MIXTURE}, "curriculum": {"stages": given, "blend": True}})
    found = Stages(run.curriculum, run.env)
    assert found.arguments(0) == {"count": {}, "walk": {"size": 3}}
    assert found.weights(0) == {"count": 3.0, "walk": 0.0} and found.weights(1) == {"count": 1.0, "walk": 2.0}
    assert found.weights(0, 0.5) == {"count": 2.0, "walk": 1.0}


@pytest.mark.parametrize(("config", "sentence"), TABLES["a_curriculum_that_makes_no_sense_is_refused_in_one_sentence"])
def test_a_curriculum_that_makes_no_sense_is_refused_in_one_sentence(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserInputError, match=sentence):
        parse_config({"curriculum": config})


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"env": {"mixture": MIXTURE, "id": "Shapes-v0"}}, "env.id has no effect with env.mixture"),
        ({"env": {"mixture": MIXTURE, "reward": {"length_budget": 9}}}, "env.reward has no effect with env.mixture"),
        ({"env": {"mixture": [*MIXTURE, MIXTURE[0]]}}, "the names count, walk, count must differ"),
        ({"env": {"mixture": [{**MIXTURE[0], "weight": 0}]}}, "all weights are 0"),
        ({"env": {"mixture": [{**MIXTURE[0], "name": "mean"}]}}, "the name mean belongs to another metric"),
        ({"env": {"mixture": [{**MIXTURE[0], "name": "default"}]}}, "the name default belongs to another metric"),
        (
            {"env": {"mixture": MIXTURE}, "evaluation": {"variants": {"hard": {"size": 5}}}},
            r"evaluation.variants.hard: with env.mixture it maps names \(count, walk\) to arguments",
        ),
        (
            {"env": {"mixture": MIXTURE}, "curriculum": {"stages": [{"start": 0, "env": {"walk": 3}}]}},
            "curriculum.stages.0.env: with env.mixture it maps names",
        ),
        (
            {
                "env": {"mixture": MIXTURE},
                "curriculum": {"stages": [{"start": 0, "mixture": {"count": 0, "walk": 0}}]},
            },
            "curriculum.stages.0.mixture: all weights are 0",
        ),
        ({"env": {"mixture": MIXTURE}, "algorithm": {"name": "preference_sac"}}, "env.mixture has no effect"),
    ],
)
def test_a_mixture_that_makes_no_sense_is_refused_in_one_sentence(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserInputError, match=sentence):
        parse_config(config)


def test_a_saved_mixture_is_read_again_without_the_keys_of_a_single_environment() -> None:
    run = parse_config(
        {
            "env": {"mixture": MIXTURE},
            "curriculum": {"stages": [{"start": 0}, {"start": 10}], "blend": True},
            "evaluation": {"variants": {"default": {}, "hard": {"walk": {"size": 5}}}},
        }
    )
    saved = run.model_dump(mode="json")
    assert parse_config(saved) == run and "id" not in saved["env"]
    assert run.variant_arguments("hard", "walk") == {"size": 5} and run.variant_arguments("hard", "count") == {}
