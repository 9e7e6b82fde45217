"""The run configuration: unknown keys name the nearest, values are checked, files and overrides come together."""

from __future__ import annotations

import math
import re
import runpy
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tables import table

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
from rl_vlm.config.complaints import unknown_key
from rl_vlm.config.learner import PRESETS
from rl_vlm.config.section import keys_of
from rl_vlm.types import UserInputError

TABLES = table("settings")


def complaint(data: dict[str, Any]) -> str:
    with pytest.raises(UserInputError) as error:
        parse_config(data)
    return str(error.value)


# --- keys


@pytest.mark.parametrize(("data", "key", "nearest"), TABLES["an_unknown_key_names_the_nearest_known_one"])
def test_an_unknown_key_names_the_nearest_known_one(data: dict[str, Any], key: str, nearest: str) -> None:
    said = re.sub(r' \("[^"]*"\)', "", complaint(data))  # what a key deeper or in another section means
    assert said.startswith(f"Unknown config key {key}. Did you mean {nearest}?")


@pytest.mark.parametrize("kind", [PolicyConfig, PreferenceConfig, SFTConfig])
def test_the_name_of_every_key_in_another_section_gets_a_sentence(kind: type[Section]) -> None:
    for name in {key.rpartition(".")[2] for key in keys_of(kind)}:
        for section in ("logging", "resources", "serving.vllm"):
            assert f"{section}.{name}" in unknown_key(f"{section}.{name}", kind)


@pytest.mark.parametrize(("key", "ours"), TABLES["a_key_of_another_system_leads_to_ours"])
def test_a_key_of_another_system_leads_to_ours(key: str, ours: str) -> None:
    assert ours in complaint(apply_overrides({}, {key: 1}))


def test_a_name_of_another_system_comes_before_a_like_one_of_ours() -> None:
    assert "algorithm.kl_coef" in complaint({"learner": {"beta": 0.1}})  # not Adam's betas


@pytest.mark.parametrize(
    ("name", "words"), [("empty.yaml", "is empty"), ("rl.toml", "is TOML"), ("rows.jsonl", "env.data=FILE")]
)
def test_a_file_that_is_no_configuration_is_named(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("")
    with pytest.raises(UserInputError, match=words):
        load_config(tmp_path / name)


@pytest.mark.parametrize(
    ("recipe", "words", "hint"),
    [
        ("qa_tiny", [], "a configuration of `rl-vlm train`"),
        ("sft_tiny", ["algorithm.iterations=3"], "algorithm has no effect in `rl-vlm sft`"),
        ("sft_tiny", ["sft.max_steps=3"], "Did you mean sft.steps?"),
        ("sft_tiny", ["trainer.epochs=3"], 'Did you mean sft.epochs ("Passes over'),
    ],
)
def test_what_fine_tuning_does_not_take_is_named(recipe: str, words: list[str], hint: str) -> None:
    with pytest.raises(UserInputError) as error:
        load_sft_config(recipe, words)
    assert hint in str(error.value) and "\n" not in str(error.value)


def test_an_override_without_a_value_is_an_error() -> None:
    with pytest.raises(UserInputError, match="has no value"):
        load_config(None, ["learner.lr="])


def test_other_systems_names_are_those_of_their_pages() -> None:
    root = Path(__file__).parents[2]
    written = runpy.run_path(str(root / "docs/key_names.py"))["table"]()
    assert (root / "rl_vlm/config/elsewhere.csv").read_text() == written  # python docs/key_names.py writes it


# --- values


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"learner": {"lr": math.inf}}, ["learner.lr", "finite"]),
        ({"rollout": {"temperature": math.nan}}, ["rollout.temperature"]),
        ({"name": "a" * 200}, ["name", "..."]),
        *TABLES["a_wrong_value_is_named_with_its_key"],
    ],
)
def test_a_wrong_value_is_named_with_its_key(data: dict[str, Any], words: list[str]) -> None:
    message = complaint(data)
    assert all(word in message for word in words), message
    assert "\n" not in message


@pytest.mark.parametrize(("data", "words"), TABLES["values_that_contradict_each_other_are_refused"])
def test_values_that_contradict_each_other_are_refused(data: dict[str, Any], words: str) -> None:
    assert words in complaint(data)


def test_all_errors_are_shown_a_line_each() -> None:
    data = {"learner": {"lr": 0, "lrr": 1}, "rollout": {"group_size": 0}, "sight": {"zzz": 1}}
    lines = complaint(data).splitlines()
    assert [line.split()[2].strip(":.") for line in lines if line.startswith("Config key")] == [
        "learner.lr", "rollout.group_size",
    ]  # fmt: skip
    assert "Unknown config key learner.lrr. Did you mean learner.lr?" in lines and len(lines) == 4
    contradictions = {"rollout": {"group_size": 1}, "algorithm": {"minibatches": 99}}
    assert len(complaint(contradictions).splitlines()) == 2


def test_ppo_alone_has_a_critic(tmp_path: Path) -> None:
    for data in ({}, {"algorithm": {"name": "ppo"}}):
        config = parse_config(data)
        assert (config.critic is not None) == bool(data)
        save_config(config, tmp_path / "config.yaml")
        assert load_config(tmp_path / "config.yaml") == config
    changed = load_config(tmp_path / "config.yaml", ["critic.hidden=8"])
    assert changed.critic is not None and changed.critic.hidden == 8
    save_config(PolicyConfig(), tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml", ["algorithm.preset=ppo", "critic.hidden=8"]).critic.hidden == 8


# --- files


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"learner: [1, 2", "not valid YAML in line 1"),
        (b"a: 1\nb: : 2", "not valid YAML in line 2"),
        (b"model: {path: tiny}\nseed: 1\nmodel: {dtype: float32}", "not valid YAML in line 3: 'model' is given twice."),
        (b"algorithm:\n  name: grpo\n  'name': ppo", "not valid YAML in line 3: 'name' is given twice."),
        (b"- 1\n- 2", "must hold sections such as `model:`, not a list"),
        (b"just text", "not a str"),
        (b"\xff\xfe\x00", "not a text file"),
    ],
)
def test_a_file_that_is_no_config_is_explained(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    with pytest.raises(UserInputError) as error:
        load_config(path)
    assert words in str(error.value)
    assert "broken.yaml" in str(error.value)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match=r"Cannot read the config .*nowhere.yaml: No such file"):
        load_config(tmp_path / "nowhere.yaml")
    (tmp_path / "quickstart.yaml").write_text("")
    with pytest.raises(UserInputError, match=r"Did you mean .*/quickstart.yaml\?"):
        load_config(tmp_path / "quickstrat.yaml")
    with pytest.raises(UserInputError, match="is no run folder"):
        load_config(tmp_path)


def test_aliases_and_merges_stand_for_what_they_name(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("env:\n  kwargs:\n    a: &a {b: 1, c: 2}\n    d: *a\n    e: {<<: *a, c: 3}\n")
    kwargs = load_config(tmp_path / "run.yaml").env.kwargs
    assert kwargs == {"a": {"b": 1, "c": 2}, "d": {"b": 1, "c": 2}, "e": {"b": 1, "c": 3}}


def test_a_saved_config_holds_plain_values(tmp_path: Path) -> None:
    kwargs = {"a": math.inf, "b": date(2026, 1, 1), "c": "1e3", "d": "off", "p": Path("/x"), "n": np.float64(1.5)}
    save_config(parse_config({"env": {"kwargs": kwargs}}), tmp_path / "config.yaml")
    found = load_config(tmp_path / "config.yaml").env.kwargs
    assert found == kwargs | {"b": "2026-01-01", "p": "/x"} and type(found["n"]) is float


# --- overrides


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("learner.betas=[0.8, 0.95]", (0.8, 0.95)),
        ("name=007", "007"),
        ("name=2026-11-25", "2026-11-25"),
        ("name=on", "on"),
        ("name=1e3", "1e3"),
        ("name=1.10", "1.10"),
        ("name=7", "7"),
        ("seed=010", 10),
        ("sight.gate=off", "off"),
        ("env.kwargs.day=2026-11-25", "2026-11-25"),
        ("env.kwargs.id=007", "007"),
        ("env.kwargs.answer=no", "no"),
        ("deterministic=off", False),
        *TABLES["overrides_set_what_they_say"],
    ],
)
def test_overrides_set_what_they_say(override: str, expected: Any) -> None:
    value: Any = load_config(None, [override]).model_dump()
    for part in override.split("=")[0].split("."):
        value = value[part]
    assert value == expected
    assert type(value) is type(expected)


def test_later_overrides_win_and_files_lose(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("learner: {lr: 1.0, num_learners: 2}\nseed: 4\n")
    config = load_config(tmp_path / "a.yaml", ["learner.lr=2", "learner.lr=3"])
    assert (config.learner.lr, config.learner.num_learners, config.seed) == (3.0, 2, 4)


@pytest.mark.parametrize(("override", "words"), TABLES["a_wrong_override_is_explained"])
def test_a_wrong_override_is_explained(override: str, words: str) -> None:
    with pytest.raises(UserInputError) as error:
        load_config(None, [override])
    assert words in str(error.value)


# --- what follows from a config


def test_resources_are_the_sum_over_all_actors() -> None:
    config = parse_config({
        "serving": {"num_replicas": 3, "cpus_per_replica": 0.5, "gpus_per_replica": 1},
        "rollout": {"num_env_runners": 4, "cpus_per_env_runner": 0.25},
        "learner": {"num_learners": 2, "cpus_per_learner": 1, "gpus_per_learner": 1},
    })  # fmt: skip
    assert (config.needed_cpus, config.needed_gpus) == (1.5 + 1 + 2, 5)
    assert parse_config({"learner": {"gpus_per_learner": 1}}).needed_gpus == 1  # a learner inside the driver


# Per turn, then of a whole trajectory: 8 turns, and 3,072 tokens where nothing is said.
@pytest.mark.parametrize(("tokens", "budget"), [(64, 3072), (3072, 3072), (4000, 32_000)])
def test_a_budget_grows_with_the_length_of_turns_that_is_asked_for(tokens: int, budget: int) -> None:
    rollout = PolicyConfig().rollout.with_turns_of(tokens)
    assert (rollout.max_turns, rollout.max_new_tokens_per_turn, rollout.max_new_tokens) == (8, tokens, budget)


def test_arguments_of_the_environment_come_in_layers() -> None:
    env = parse_config({"env": {"data": "folder", "kwargs": {"turns": 1, "tool": True}}}).env
    assert env.make_kwargs() == {"data": "folder", "turns": 1, "tool": True}
    assert env.make_kwargs({"turns": 2}) == {"data": "folder", "turns": 2, "tool": True}
    assert parse_config({}).env.make_kwargs() == {}


# --- Every key of the configuration is read by some code, and a key that a run ignores cannot be set


CODE = "\n".join(path.read_text() for path in Path(rl_vlm.__file__).parent.rglob("*.py"))
HANDED_ON = "serving.autoscaling."  # to Serve, as one mapping


@pytest.mark.parametrize("kind", [PolicyConfig, PreferenceConfig, SFTConfig])
def test_every_key_is_read_by_some_code(kind: type[Section]) -> None:
    """By its last name alone: an unread key that has the name of another one is not found."""
    unread = {key for key in keys_of(kind) if not re.search(rf"\.{key.rsplit('.', 1)[-1]}\b", CODE)}
    assert not {key for key in unread if not key.startswith(HANDED_ON)}


@pytest.mark.parametrize(("dotted", "message"), TABLES["a_key_that_supervised_fine_tuning_ignores_is_refused"])
def test_a_key_that_supervised_fine_tuning_ignores_is_refused(dotted: dict[str, Any], message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        load_sft_config(None, [f"{key}={value}" for key, value in dotted.items()])


# --- what a run ignores


PREFERENCE = {"algorithm": {"name": "preference_sac"}}


@pytest.mark.parametrize(("dotted", "message"), TABLES["a_key_that_the_preference_loop_ignores_is_refused"])
def test_a_key_that_the_preference_loop_ignores_is_refused(dotted: dict[str, Any], message: str) -> None:
    with pytest.raises(UserInputError, match=f"^Config key {message}"):
        parse_config(apply_overrides(PREFERENCE, dotted))


def test_a_key_that_grpo_ignores_is_refused() -> None:
    assert complaint({"preference": {"total_steps": 5}}).startswith("Config key preference has no effect")


@pytest.mark.parametrize(("serving", "message"), TABLES["a_key_of_the_other_engine_is_refused"])
def test_a_key_of_the_other_engine_is_refused(serving: dict[str, Any], message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        parse_config({"serving": serving})


@pytest.mark.parametrize(
    "data",
    [
        {}, {"serving": {"engine": "vllm", "vllm": {"max_num_seqs": 8}}}, PREFERENCE,
        {"serving": {"gpus_per_replica": 0.5, "vllm": {"max_num_seqs": 8}}},
        {"learner": {"lr": 3e-4}, "env": {"data": "größe", "kwargs": {"turns": 2}}, "algorithm": {"tis_cap": None}},
        {"deterministic": True, "serving": {"engine": "transformers", "gpus_per_replica": 1}},
    ],
)  # fmt: skip
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


# --- overrides


def test_overrides_are_set_in_their_order() -> None:
    given = [
        "env.kwargs.task=pairs",
        "env.kwargs={}",
        "env.kwargs.size=2",
        "algorithm.clip_low=0.3",
        "algorithm.preset=dapo",
    ]
    config = load_config(None, given)
    assert config.env.kwargs == {"size": 2} and config.algorithm.clip_low == PRESETS["dapo"]["clip_low"]


def test_null_removes_a_key_that_cannot_be_null(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("learner: {betas: [0.5, 0.5], ema_decay: 0.9}")
    config = load_config(file, ["learner.betas=null", "learner.ema_decay=null"])
    assert config.learner.betas == load_config(None).learner.betas and config.learner.ema_decay is None


@pytest.mark.parametrize(
    ("override", "betas", "share"),
    [
        ("learner.optimizer=adafactor", False, True), ("serving.engine=transformers", True, False),
        ("serving.engine=auto", True, True),  # vLLM, where replicas get a GPU
    ],
)  # fmt: skip
def test_a_key_that_an_override_makes_idle_is_left_out_with_a_word(
    override: str, betas: bool, share: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "learner: {betas: [0.5, 0.5]}\n"
        "serving: {engine: vllm, gpus_per_replica: 1, vllm: {gpu_memory_utilization: 0.4}}"
    )
    config = load_config(file, [override])
    assert (tuple(config.learner.betas) == (0.5, 0.5)) is betas
    assert (config.serving.vllm.gpu_memory_utilization == 0.4) is share
    assert caplog.text.count("is left out") == 2 - betas - share
