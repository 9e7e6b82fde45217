"""`rl-vlm serve` before it starts anything: where settings come from, and what is refused in one sentence."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
from core_support import adapted_policy

from rl_vlm.cli import app as cli
from rl_vlm.config import load_config, save_config
from rl_vlm.http.server import bind
from rl_vlm.runs.serve import banner, plan
from rl_vlm.types import UserInputError


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SERVER_HOST", "SERVER_PORT", "LOCAL_MODEL_PATH", "RL_VLM_API_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The sentence with which the command ends; its code is 2."""
    assert cli.run(["serve", *map(str, arguments)]) == 2
    sentence = capsys.readouterr().err.strip()
    assert sentence.startswith("error: ") and len(sentence.splitlines()) == 1
    return sentence


def test_defaults_are_one_replica_on_loopback(tiny_folder: Path) -> None:
    planned = plan(str(tiny_folder))
    run = planned.config
    assert (run.http.host, run.http.port, run.serving.num_replicas) == ("127.0.0.1", 8000, 1)
    assert (run.serving.engine, run.needed_cpus, planned.token) == ("transformers", run.serving.cpus_per_replica, None)
    assert (planned.model, planned.name) == (tiny_folder, tiny_folder.name)


def test_options_win_over_overrides_and_these_over_the_environment(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_PORT", "9001")
    monkeypatch.setenv("SERVER_HOST", "localhost")
    assert plan(str(tiny_folder)).config.http.port == 9001
    assert plan(str(tiny_folder)).config.http.host == "localhost"
    assert plan(str(tiny_folder), ["http.port=9002"]).config.http.port == 9002
    assert plan(str(tiny_folder), ["http.port=9002"], port=9003).config.http.port == 9003


def test_the_model_may_come_from_the_environment(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_MODEL_PATH", str(tiny_folder))
    assert plan(None).model == tiny_folder


def test_a_run_folder_brings_its_model_and_adapter(tiny_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    adapted_policy(tiny_folder).payload(5).write(run / "adapter")
    save_config(load_config(None, [f"model.path={tiny_folder}", "learner.num_learners=2"]), run / "config.yaml")
    planned = plan(str(run), ["http.model_name=mine"])
    assert planned.adapter is not None and planned.adapter.version == 1
    assert (planned.name, planned.config.learner.num_learners) == ("mine", 0)
    text = banner(planned, 1234)
    assert "http://127.0.0.1:1234" in text and "policy, policy-v1, mine" in text and "token   none" in text
    served = planned.config.serving.model_copy(update={"engine": "vllm"})
    full = planned.config.model_copy(
        update={"serving": served, "model": planned.config.model.model_copy(update={"train": "full"})}
    )
    assert "policy, policy-v1\n" in banner(dataclasses.replace(planned, config=full), 1234)
    shutil.rmtree(run / "adapter")
    assert plan(str(run)).adapter is None
    assert plan(str(run / "config.yaml")).model == tiny_folder


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1"])
def test_beyond_loopback_a_token_is_needed(
    host: str, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "RL_VLM_API_TOKEN" in refusal(capsys, tiny_folder, "--host", host)
    monkeypatch.setenv("RL_VLM_API_TOKEN", "")
    assert "RL_VLM_API_TOKEN" in refusal(capsys, tiny_folder, "--host", host)
    monkeypatch.setenv("RL_VLM_API_TOKEN", "s3cret")
    assert plan(str(tiny_folder), host=host).token == "s3cret"


def test_bad_arguments_are_named(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Which model?" in refusal(capsys)
    assert "no-such-model" in refusal(capsys, "no-such-model")
    assert "config.json" in refusal(capsys, tmp_path)
    assert "http.port" in refusal(capsys, tiny_folder, "--port", "70000")
    assert "not a peft adapter folder" in refusal(capsys, tiny_folder, "--adapter", tmp_path)
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        assert "--port" in refusal(capsys, tiny_folder, "--port", taken.getsockname()[1])


@pytest.mark.parametrize("name", ["policy", "policy-v17"])
def test_a_model_does_not_take_the_name_of_the_trained_versions(name: str, tiny_folder: Path) -> None:
    with pytest.raises(UserInputError, match="http.model_name"):
        plan(str(tiny_folder), [f"http.model_name={name}"])
    assert plan(str(tiny_folder), ["http.model_name=policy-vision"]).name == "policy-vision"


def test_an_engine_that_is_not_installed_is_named(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserInputError, match="vllm"):
        plan(str(tiny_folder), ["serving.engine=vllm"])
