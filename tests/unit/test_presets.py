"""Presets: what they set, that the quickstart takes each of them, and that constants of another choice are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tables import table

from rl_vlm.algorithms.base import RunAlgorithm
from rl_vlm.algorithms.grpo import GRPO
from rl_vlm.algorithms.preference_sac import PreferenceSAC
from rl_vlm.config import PolicyConfig, load_config, parse_config, save_config
from rl_vlm.config.learner import PRESETS, AlgorithmSection
from rl_vlm.config.overrides import apply_overrides
from rl_vlm.control_envs.metaworld_cameras import ORIGINAL_VIEWS, choose_view
from rl_vlm.types import UserInputError

TABLES = table("settings")

QUICKSTART = Path(__file__).parents[2] / "configs/quickstart.yaml"


def test_a_key_that_is_given_wins_over_its_preset() -> None:
    assert AlgorithmSection(preset="gspo", clip_low=0.1).clip_low == 0.1
    assert AlgorithmSection(preset="gspo").clip_low == PRESETS["gspo"]["clip_low"]


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo"])
def test_a_preset_as_a_loss_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"algorithm.preset={name}"):
        AlgorithmSection(loss=name)
    assert AlgorithmSection(loss="gspo").loss == "gspo"  # a loss and a preset


@pytest.mark.parametrize("preset", PRESETS)
def test_the_quickstart_takes_every_preset_from_the_command_line(preset: str, tmp_path: Path) -> None:
    run = load_config(QUICKSTART, [f"algorithm.preset={preset}"])
    # The file's own advantage_scale, clipping and normalisation are replaced.
    assert {key: getattr(run.algorithm, key) for key in PRESETS[preset]} == PRESETS[preset]
    assert run.algorithm.minibatches == 4
    save_config(run, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == run


@pytest.mark.parametrize(("algorithm", "message"), TABLES["settings_without_an_effect_are_refused"])
def test_settings_without_an_effect_are_refused(algorithm: dict[str, Any], message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        parse_config({"algorithm": algorithm})


def test_settings_that_have_an_effect_are_accepted() -> None:
    for algorithm in (
        {"dual_clip": 3.0},
        {"loss": "gspo", "dual_clip": 3.0},
        {"loss": "of_a_plugin", "dual_clip": 3.0, "cispo_cap": 2.0},
        {"estimator": "gigpo", "gigpo_gamma": 0.9},
        {"mismatch": "mask", "tis_cap": None, "mismatch_low": 0.9},
        {"mismatch": "sequence_mask", "tis_cap": 3.0, "mismatch_high": 1.1},
    ):
        parse_config({"algorithm": algorithm})
    budget = {"max_new_tokens": 60, "max_turns": 2, "max_new_tokens_per_turn": 30}
    assert parse_config({"algorithm": {"overlong_buffer": 12}, "rollout": budget}).algorithm.overlong_buffer == 12


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_preset_replaces_the_one_of_a_resolved_configuration(preset: str) -> None:
    before = load_config(QUICKSTART, ["algorithm.preset=dapo"]).model_dump(exclude_unset=True)
    found = parse_config(apply_overrides(before, {"algorithm.preset": preset})).algorithm
    expected = load_config(QUICKSTART, [f"algorithm.preset={preset}"]).algorithm
    # What the file itself said of a key that the first preset set is in no resolved configuration any more.
    forgotten = {key for key in PRESETS["dapo"] if key not in PRESETS[preset]}
    assert found.model_dump(exclude=forgotten) == expected.model_dump(exclude=forgotten)
    assert (found.max_refill > 0) is (preset == "dapo")


# --- RLlib's configurations that follow from a run's


@pytest.mark.parametrize("algorithm", [GRPO, PreferenceSAC])
def test_keys_of_a_tune_space_change_the_run(algorithm: type[RunAlgorithm]) -> None:
    config = algorithm.get_default_config
    given = {"run_config": config().run_config.model_dump(), "learner.num_threads": 3, "seed": 7}
    made = config().update_from_dict(given)
    assert (made.run_config.learner.num_threads, made.run_config.seed, made.seed) == (3, 7, 7)
    assert config().update_from_dict({"seed": 5}).run_config.seed == 5
    assert config().update_from_dict({"seed": None}).run_config.seed == 0


# --- The shipped recipes hold the numbers that were published: slime's geometry example, and RL-VLM-F's table of settings


CONFIGS = Path(__file__).parents[2] / "configs"


METAWORLD: dict[str, Any] = {
    "session_pairs": 40, "num_interact": 4000, "max_feedback": 20_000, "random_steps": 1000, "exploration_steps": 9000,
    "total_steps": 1_000_000, "sac": (3e-4, 512, 256, 3), "image_size": 300, "reward_model": ("cnn", 3e-4, 10),
    "horizon": 500,
}  # fmt: skip
SOFTGYM: dict[str, Any] = {
    **METAWORLD, "session_pairs": 100, "num_interact": 5000, "total_steps": 600_000, "reward_model": ("resnet18", 1e-4, 30),
}  # fmt: skip
CLOTH: dict[str, Any] = {
    "session_pairs": 50, "num_interact": 1000, "max_feedback": 500, "random_steps": 250, "exploration_steps": 250,
    "total_steps": 15_000, "sac": (5e-4, 1024, 1024, 2), "image_size": 360, "reward_model": ("resnet18", 3e-4, 25),
}  # fmt: skip
CARTPOLE: dict[str, Any] = {
    "session_pairs": 50, "num_interact": 5000, "max_feedback": 10_000, "random_steps": 1000, "exploration_steps": 1000,
    "total_steps": 500_000, "sac": (5e-4, 1024, 1024, 2), "image_size": 200, "reward_model": ("cnn", 3e-4, 50),
}  # fmt: skip
# The fork's tasks, with the reward model that its job trains.
LATER = METAWORLD | {"horizon": 100, "camera": "corner2", "reward_model": ("cnn", 1e-4, 5)}
RECIPES = {
    "cartpole": ("ContinuousCartPole-v0", CARTPOLE),
    "drawer_open": ("metaworld/drawer-open-v3", METAWORLD),
    "sweep_into": ("metaworld/sweep-into-v3", METAWORLD),
    "door_open": ("metaworld/door-open-v3", METAWORLD),
    "soccer": ("metaworld/soccer-v3", METAWORLD | {"reward_model": ("cnn", 1e-4, 5)}),
    "rope_flatten": ("softgym/RopeFlattenEasy", SOFTGYM | {"image_size": 240}),
    "pass_water": ("softgym/PassWater", SOFTGYM | {"image_size": 360}),
    "cloth_fold": ("softgym/ClothFoldDiagonal", CLOTH),
    "assembly": ("metaworld/assembly-v3", LATER),
    "box_close": ("metaworld/box-close-v3", LATER),
    "coffee_push": ("metaworld/coffee-push-v3", LATER),
    "stick_pull": ("metaworld/stick-pull-v3", LATER),
}


def figures(run: PolicyConfig, horizon: bool) -> dict[str, Any]:
    settings = run.preference
    sac, model = settings.sac, settings.reward_model
    found = {name: getattr(settings, name) for name in CARTPOLE if name not in ("sac", "reward_model")}
    found |= {"sac": (sac.lr, sac.batch_size, sac.hidden, sac.depth)}
    found |= {"reward_model": (model.architecture, model.lr, model.epochs)}
    if horizon:
        found |= {"horizon": run.env.kwargs.get("horizon", 500)}
    return found | ({"camera": run.env.kwargs["camera"]} if "camera" in run.env.kwargs else {})


@pytest.mark.parametrize("name", RECIPES)
def test_a_preference_recipe_is_the_published_one(name: str) -> None:
    run = load_config(CONFIGS / "rl_vlm_f" / f"{name}.yaml")
    env_id, expected = RECIPES[name]
    assert (run.env.id, figures(run, "horizon" in expected)) == (env_id, expected)
    assert run.preference.reward == "learn_from_preference"
    assert (run.preference.labels.source, run.preference.labels.steps) == ("vlm", 2)


def test_a_task_has_its_camera() -> None:
    for task, view in ORIGINAL_VIEWS.items():
        assert choose_view(task, None) == choose_view(task, "original") == view
    assert (choose_view("assembly", None).name, choose_view("assembly", None).turned) == ("corner2", True)


def test_every_full_recipe_is_in_the_table() -> None:
    own = {"cartpole_tiny", "drawer_close_cpu"}  # made for machines without a GPU
    assert {path.stem for path in (CONFIGS / "rl_vlm_f").glob("*.yaml")} - own == set(RECIPES)
