"""Every key of the configuration is read by some code, and a key that a run ignores cannot be set."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import rl_vlm
from rl_vlm.config import (
    PolicyConfig,
    PreferenceConfig,
    Section,
    SFTConfig,
    apply_overrides,
    load_config,
    load_sft_config,
    parse_config,
    save_config,
)
from rl_vlm.config.loading import _COUNTERPARTS, _KINDS
from rl_vlm.config.section import keys_of
from rl_vlm.types import UserInputError

CODE = "\n".join(path.read_text() for path in Path(rl_vlm.__file__).parent.rglob("*.py"))
HANDED_ON = "serving.autoscaling."  # to Serve, as one mapping


@pytest.mark.parametrize("kind", [PolicyConfig, PreferenceConfig, SFTConfig])
def test_every_key_is_read_by_some_code(kind: type[Section]) -> None:
    """By its last name alone: an unread key that has the name of another one is not found."""
    unread = {key for key in keys_of(kind) if not re.search(rf"\.{key.rsplit('.', 1)[-1]}\b", CODE)}
    assert not {key for key in unread if not key.startswith(HANDED_ON)}


@pytest.mark.parametrize(
    ("dotted", "message"),
    [
        ({"learner.num_learners": 2}, "learner.num_learners has no effect in `rl-vlm sft`: remove it"),
        ({"learner.gpus_per_learner": 1}, "use sft.device"),
        ({"logging.trajectories_every": 1}, "logging.trajectories_every has no effect"),
        ({"model.train": "full"}, "model.train: full is for reinforcement learning"),
        ({"sft.epoch": 2}, "Did you mean sft.epochs"),
        ({"env.id": "Shapes-v0"}, "env.id has no effect in `rl-vlm sft`"),
    ],
)
def test_a_key_that_supervised_fine_tuning_ignores_is_refused(dotted: dict[str, Any], message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        load_sft_config(None, [f"{key}={value}" for key, value in dotted.items()])


def test_a_saved_configuration_of_supervised_fine_tuning_is_read_again(tmp_path: Path) -> None:
    job = load_sft_config(None, ["learner.lr=1e-3", "sft.steps=3", "model.lora.rank=4"])
    save_config(job, tmp_path / "config.yaml")
    assert load_sft_config(tmp_path / "config.yaml") == job


# --- what a run ignores


PREFERENCE = {"algorithm": {"name": "preference_sac"}}


@pytest.mark.parametrize(
    ("dotted", "message"),
    [
        ({"learner.lr": 1e-3}, "learner.lr has no effect with algorithm.name preference_sac: use preference.sac.lr"),
        ({"learner.lr": 1e-5}, "learner.lr has no effect"),  # the default says as little
        ({"algorithm.iterations": 3}, "algorithm.iterations has no effect .* use preference.total_steps"),
        ({"rollout.num_env_runners": 3}, "rollout.num_env_runners .* use preference.collection.num_env_runners"),
        ({"rollout.group_size": 8}, "rollout.group_size has no effect .* remove it"),
        ({"evaluation.every": 5}, "evaluation.every has no effect .* use preference.evaluation.every"),
        ({"model.lora.rank": 4}, "model.lora.rank has no effect"),
        ({"env.isolation": "process"}, "env.isolation has no effect .* use preference.collection.num_env_runners"),
        ({"logging.trajectories_every": 1}, "logging.trajectories_every has no effect"),
    ],
)
def test_a_key_that_the_preference_loop_ignores_is_refused(dotted: dict[str, Any], message: str) -> None:
    with pytest.raises(UserInputError, match=f"^Config key {message}"):
        parse_config(apply_overrides(PREFERENCE, dotted))


def test_a_key_that_grpo_ignores_is_refused() -> None:
    with pytest.raises(UserInputError, match="preference.total_steps"):
        parse_config({"preference": {"total_steps": 5}})
    assert parse_config({"http": {"port": 9000}}).http.port == 9000  # serving is for every run


@pytest.mark.parametrize(
    ("serving", "message"),
    [
        (
            {"engine": "transformers", "vllm": {"max_num_seqs": 8}},
            "serving.vllm has no effect with serving.engine transformers",
        ),
        ({"vllm": {"enforce_eager": True}}, "serving.vllm has no effect with serving.engine auto"),
        ({"engine": "vllm", "max_rows": 8}, "serving.max_rows has no effect with serving.engine vllm"),
        ({"gpus_per_replica": 1, "num_threads": 2}, "serving.num_threads has no effect with serving.engine auto"),
    ],
)
def test_a_key_of_the_other_engine_is_refused(serving: dict[str, Any], message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        parse_config({"serving": serving})


def test_keys_of_the_engine_that_runs_are_accepted() -> None:
    parse_config({"serving": {"max_rows": 8, "num_threads": 2}})
    parse_config({"serving": {"engine": "vllm", "vllm": {"max_num_seqs": 8}}})
    parse_config({"serving": {"gpus_per_replica": 0.5, "vllm": {"max_num_seqs": 8}}})


@pytest.mark.parametrize("data", [{}, {"serving": {"engine": "vllm", "vllm": {"max_num_seqs": 8}}}, PREFERENCE])
def test_a_saved_configuration_holds_what_its_run_reads(data: dict[str, Any], tmp_path: Path) -> None:
    run = parse_config(data)
    save_config(run, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == run == parse_config(run.model_dump())
    kept = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert set(kept["learner"]) >= {"num_learners", "gpus_per_learner"}
    assert ("lr" in kept["learner"], "rollout" in kept, "preference" in kept) == (
        (False, False, True) if data is PREFERENCE else (True, True, False)
    )


def test_a_saved_run_may_be_served_by_the_other_engine(tmp_path: Path) -> None:
    save_config(PolicyConfig(), tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml", ["serving.engine=vllm"]).serving.max_rows == 512


# --- the tables name keys that exist


def test_counterparts_are_keys_of_different_kinds_of_runs() -> None:
    known = [set(keys_of(kind)) for kind in _KINDS]
    for pair in _COUNTERPARTS:
        assert all(any(key in keys for keys in known) for key in pair)
        assert any((pair[0] in keys) != (pair[1] in keys) or "env" in pair[0] for keys in known)
