"""What a curriculum's stages set: blending by hand values, every set of arguments, configurations that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from rl_vlm.config import parse_config
from rl_vlm.rollout.curriculum import Stages, blend
from rl_vlm.types import UserInputError

# vlm-gym's stages for GeoSpot: weights of country, region and city, and kernels that tighten.
GEOSPOT = [
    {"start": 0, "env": {"weights": [1.0, 0.0, 0.0], "tau": 2000}},
    {"start": 100, "env": {"weights": [0.5, 0.0, 0.0], "tau": 1500}},
    {"start": 300, "env": {"weights": [0.3, 0.4, 0.0], "tau": 500}},
]
MIXTURE = [{"name": "count", "id": "Shapes-v0"}, {"name": "walk", "id": "GridWalk-v0", "weight": 3.0}]


def stages(given: list[dict[str, Any]], kwargs: dict[str, Any] | None = None, **settings: Any) -> Stages:
    run = parse_config({"env": {"kwargs": kwargs or {}}, "curriculum": {"stages": given, **settings}})
    return Stages(run.curriculum, run.env)


@pytest.mark.parametrize(
    ("here", "there", "share", "value"),
    [
        (2000, 500, 0.5, 1250),
        (3, 4, 0.5, 4),  # whole numbers stay whole, halves go up
        (3, 4, 0.49, 3),
        (4, 3, 0.25, 4),
        (1.0, 0.5, 0.25, 0.875),
        (1, 0.5, 0.25, 0.875),
        ([1.0, 0.0], [0.5, 0.4], 0.5, [0.75, 0.2]),
        ([1.0, 0.0], [0.5], 0.5, [1.0, 0.0]),
        ({"city": 25, "name": "a"}, {"city": 75, "name": "b"}, 0.5, {"city": 50, "name": "a"}),
        ({"city": 25}, {}, 0.5, {"city": 25}),
        ("full", "brief", 0.9, "full"),
        (False, True, 0.9, False),
        (None, 3, 0.9, None),
    ],
)
def test_blended_values_are_those_computed_by_hand(here: Any, there: Any, share: float, value: Any) -> None:
    found = blend(here, there, share)
    assert found == value and type(found) is type(value)


def test_a_share_moves_in_levels_from_one_start_to_the_next() -> None:
    moving = stages(GEOSPOT, blend=True, blend_levels=4)
    found = [moving.share(1, done) for done in (100, 149, 150, 199, 200, 250, 299, 300)]
    assert found == [0.0, 0.0, 0.25, 0.25, 0.5, 0.75, 0.75, 0.75]  # 300 begins the next stage
    assert moving.share(2, 5000) == 0.0 and stages(GEOSPOT).share(1, 299) == 0.0


def test_arguments_are_blended_towards_the_next_stage() -> None:
    moving = stages(GEOSPOT, blend=True)
    assert moving.arguments(1, 0.5) == {"": {"weights": pytest.approx([0.4, 0.2, 0.0]), "tau": 1000}}
    assert moving.arguments(1) == {"": {"weights": [0.5, 0.0, 0.0], "tau": 1500}}


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
    assert found.weights(0) == {"count": 3.0, "walk": 0.0} and found.weights(1) == {"count": 1.0, "walk": 3.0}
    assert found.weights(0, 0.5) == {"count": 2.0, "walk": 1.5}


TWO = [{"start": 0}, {"start": 10}]


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            {"stages": [{"start": 5}, {"start": 10}]},
            "the first starts at 0 and each later than the one before; these are 5, 10",
        ),
        ({"stages": [{"start": 0}, {}]}, "curriculum.stages.1.start"),
        ({"stages": [{"start": 0}, {"start": 10}, {"start": 10}]}, "each later than the one before"),
        ({"stages": [{"start": 0, "name": "a"}, {"start": 1, "name": "a"}]}, "the names a, a must differ"),
        ({"blend": True}, "curriculum.blend has no effect without curriculum.stages"),
        ({"stages": TWO, "blend_levels": 4}, "curriculum.blend_levels has no effect without curriculum.blend"),
        ({"stages": [{"start": 0, "mixture": {"a": 1.0}}]}, "mixture names a, and env.mixture has none"),
        ({"stages": [{"start": 0, "strat": 1}]}, "Did you mean curriculum.stages.0.start"),
    ],
)
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
        ({"env": {"mixture": [{"id": "Shapes-v0"}]}}, "env.mixture.0.name: field required"),
        ({"env": {"mixture": [{"name": "a"}]}}, "env.mixture.0.id: field required"),
        ({"env": {"mixture": [{**MIXTURE[0], "wieght": 2}]}}, "Did you mean env.mixture.0.weight"),
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
            "curriculum": {"stages": TWO, "blend": True},
            "evaluation": {"variants": {"default": {}, "hard": {"walk": {"size": 5}}}},
        }
    )
    saved = run.model_dump(mode="json")
    assert parse_config(saved) == run and "id" not in saved["env"]
    assert run.variant_arguments("hard", "walk") == {"size": 5} and run.variant_arguments("hard", "count") == {}
