"""Presets: what they set, that the quickstart takes each of them, and that constants of another choice are refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from tables import table

from rl_vlm.algorithms.grpo import GRPOConfig
from rl_vlm.algorithms.preference_sac import PreferenceSACConfig
from rl_vlm.config import load_config, parse_config, save_config
from rl_vlm.config.learner import PRESETS, AlgorithmSection
from rl_vlm.config.loading import apply_overrides
from rl_vlm.learning.learner import VLMLearner
from rl_vlm.preference.sac import SACLearner
from rl_vlm.types import UserInputError

TABLES = table("settings")

QUICKSTART = Path(__file__).parents[2] / "configs/quickstart.yaml"

# loss, aggregation, estimator, normalisation, and the constants of the papers
PUBLISHED: dict[str, tuple[str, str, str, str, dict[str, float]]] = {
    "grpo": ("clipped", "sequence_mean", "group", "std", {"clip_low": 0.2, "clip_high": 0.2}),
    "dapo": ("clipped", "token_mean", "group", "std", {"clip_low": 0.2, "clip_high": 0.28}),
    "dr_grpo": ("clipped", "constant", "group", "none", {"clip_low": 0.2, "clip_high": 0.2}),
    "gspo": ("gspo", "sequence_mean", "group", "std", {"clip_low": 3e-4, "clip_high": 4e-4}),
    "cispo": ("cispo", "token_mean", "group", "std", {"cispo_cap": 5.0}),
    "sapo": ("sapo", "sequence_mean", "group", "std", {"sapo_tau_pos": 1.0, "sapo_tau_neg": 1.05}),
    "rloo": ("clipped", "constant", "rloo", "none", {"clip_low": 0.2, "clip_high": 0.2}),
    "reinforce_pp": ("clipped", "sequence_mean", "reinforce_pp", "std", {"clip_low": 0.2, "clip_high": 0.2}),
}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_preset_sets_loss_aggregation_estimator_and_constants(preset: str) -> None:
    found = AlgorithmSection(preset=preset)
    loss, aggregation, estimator, normalization, constants = PUBLISHED[preset]
    assert (found.loss, found.aggregation, found.estimator, found.advantage_normalization, found.advantage_scale) == (
        loss, aggregation, estimator, normalization, 1.0,
    )  # fmt: skip
    assert {key: getattr(found, key) for key in constants} == constants
    key = next(iter(constants))
    assert getattr(AlgorithmSection(preset=preset, **{key: 2 * constants[key]}), key) == 2 * constants[key]
    description = AlgorithmSection.model_fields["preset"].description
    assert description is not None and preset in description


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


@pytest.mark.parametrize(("config", "learner"), [(GRPOConfig, VLMLearner), (PreferenceSACConfig, SACLearner)])
def test_nothing_that_rllib_calls_deprecated_is_set(
    config: type, learner: type, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Ray's loggers do not propagate, and the deprecation note is a log record.
    loggers = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if name.startswith("ray")]
    for logger in loggers:
        logger.addHandler(caplog.handler)
    try:
        made = config.from_run_config(config().run_config, tmp_path)
    finally:
        for logger in loggers:
            logger.removeHandler(caplog.handler)
    assert made.learner_class is learner
    assert [record.message for record in caplog.records if "deprecat" in record.message.lower()] == []


@pytest.mark.parametrize("config", [GRPOConfig, PreferenceSACConfig])
def test_keys_of_a_tune_space_change_the_run(config: type) -> None:
    given = {"run_config": config().run_config.model_dump(), "learner.num_threads": 3, "seed": 7}
    made = config().update_from_dict(given)
    assert (made.run_config.learner.num_threads, made.run_config.seed, made.seed) == (3, 7, 7)
    assert config().update_from_dict({"seed": 5}).run_config.seed == 5
    assert config().update_from_dict({"seed": None}).run_config.seed == 0
