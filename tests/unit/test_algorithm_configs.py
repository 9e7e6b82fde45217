"""RLlib's configurations that follow from a run's."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from rl_vlm.algorithms.grpo import GRPOConfig
from rl_vlm.algorithms.preference_sac import PreferenceSACConfig
from rl_vlm.learning.learner import VLMLearner
from rl_vlm.preference.sac import SACLearner


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
