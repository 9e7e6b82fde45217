"""The command line: what the commands hand on, exit codes, and errors that are one sentence."""

import json
import os
import subprocess
import sys
import types
from dataclasses import asdict, is_dataclass
from pathlib import Path

import pytest

from rl_vlm.cli import app as cli
from rl_vlm.types import RLVLMError, UserInputError

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
    module.calls, module.outcome = (
        [],
        {"status": "done", "iterations": 3, "accuracy_before": 0.25, "accuracy_after": 0.9},
    )
    module.train = train
    module.default_run_dir = lambda run: Path("runs") / run.name
    module.inspect_run = lambda run: {"model": run.model.path}
    return install(monkeypatch, module)


@pytest.fixture
def harness(monkeypatch):
    """Stand-ins for rl_vlm.runs.evaluate and rl_vlm.runs.play that return what they were given."""
    module = types.ModuleType("rl_vlm.runs.evaluate")
    module.evaluate_policy_run = lambda run, **options: {"name": run.name, **plain(options)}
    episodes = types.ModuleType("rl_vlm.runs.play")
    episodes.rollout = lambda run, **options: {"name": run.name, "run": run.model_dump(mode="json"), **plain(options)}
    install(monkeypatch, episodes)
    return install(monkeypatch, module)


def install(monkeypatch, module):
    parent, _, name = module.__name__.rpartition(".")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(__import__(parent, fromlist=["x"]), name, module, raising=False)
    return module


def plain(options):
    return {
        name: str(value) if isinstance(value, Path) else asdict(value) if is_dataclass(value) else value
        for name, value in options.items()
    }


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
    (folder / "adapter_config.json").write_text("{}")
    return folder


# Help


def test_help_is_there_at_once():
    before = os.times()
    done = subprocess.run([sys.executable, "-m", "rl_vlm.cli", "--help"], capture_output=True, text=True)
    after = os.times()
    assert done.returncode == 0 and "train" in done.stdout
    # Processor time, which a busy machine stretches less: a third of a second on an idle one.
    assert after.children_user + after.children_system - before.children_user - before.children_system < 1.0


def test_help_imports_nothing_heavy():
    heavy = "{'torch', 'ray', 'transformers', 'gymnasium', 'numpy', 'pydantic', 'pyarrow'}"
    code = (
        f"import sys, rl_vlm.cli.app as c; c.run(['-h']); found = {heavy} & set(sys.modules); assert not found, found"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


COMMANDS = ("train", "eval", "rollout", "export", "fetch", "doctor", "envs", "model")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command, capsys):
    assert run("--help") == 0
    assert command in output(capsys)
    assert run(command, "--help") == 0
    assert "Usage: rl-vlm " + command in output(capsys)


# train


def test_train_hands_on_configuration_and_options(config, training, tmp_path, capsys):
    assert run("train", config, "learner.lr=1e-3", "name=other", "--run-dir", tmp_path / "here", "--resume") == 0
    ((seen, run_dir, resume, overwrite),) = training.calls
    assert (seen.name, seen.learner.lr, run_dir, resume, overwrite) == (
        "other",
        1e-3,
        str(tmp_path / "here"),
        True,
        False,
    )
    said = output(capsys)
    assert "done after 3 iterations" in said and "accuracy 0.250 → 0.900" in said and "curve.png" in said


def test_a_run_goes_into_the_folder_of_its_name_by_default(config, training):
    assert run("train", config, "--overwrite") == 0
    assert training.calls[0][1:] == ("runs/test-run", False, True)


def test_a_run_folder_stands_for_its_configuration(config, training, tmp_path):
    assert run("train", tmp_path) == 0
    assert training.calls[0][0].name == "test-run"


def test_a_dry_run_trains_nothing(config, training, capsys):
    assert run("train", config, "--dry-run") == 0
    assert training.calls == [] and "model: tiny" in output(capsys)


def test_resume_and_overwrite_contradict(config, training, capsys):
    assert run("train", config, "--resume", "--overwrite") == 2
    assert "contradict" in failure(capsys) and training.calls == []


# Errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing.yaml"], "Cannot read the config missing.yaml"),
        (["CONFIG", "learner.lrr=1"], "Did you mean learner.lr?"),
        (["CONFIG", "learner.lr"], "must have the form"),
        (["CONFIG", "learner.lr=fast"], "learner.lr"),
        (["CONFIG", "rollout.top_p=0.5"], "Unknown config key rollout.top_p: the learner cannot"),
    ],
)
def test_a_wrong_configuration_is_one_sentence_and_exit_code_2(arguments, words, config, training, capsys):
    assert run("train", *[str(config) if word == "CONFIG" else word for word in arguments]) == 2
    assert words in failure(capsys)


@pytest.mark.parametrize(
    "argv",
    [["nonsense"], ["train"], ["train", "a", "--nonsense"], ["rollout", "a", "--episodes", "0"], ["doctor", "--jsn"]],
)
def test_wrong_usage_is_exit_code_2(argv, capsys):
    assert run(*argv) == 2
    captured = capsys.readouterr()
    assert "Error" in captured.err and "Traceback" not in captured.err


class Interrupted(RLVLMError):
    exit_code = 143


@pytest.mark.parametrize(
    ("outcome", "code"),
    [(UserInputError("wrong"), 2), (RLVLMError("broke"), 1), (Interrupted("stopped"), 143)],
)
def test_errors_of_the_package_have_their_exit_codes(config, training, capsys, outcome, code):
    training.outcome = outcome
    assert run("train", config) == code
    assert failure(capsys) == f"error: {outcome}"


def test_ctrl_c_is_exit_code_130(config, training, capsys):
    training.outcome = KeyboardInterrupt()
    assert run("train", config) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_run_that_did_not_end_well_is_exit_code_1(config, training):
    training.outcome = {"status": "failed", "iterations": 0}
    assert run("train", config) == 1


def test_a_surprise_is_a_sentence_and_its_traceback_a_file_of_the_run(config, training, tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    training.outcome = ZeroDivisionError("first line\nsecond line")
    assert run("train", config, "--run-dir", folder) == 1
    line = failure(capsys)
    assert "ZeroDivisionError: first line (unexpected" in line and str(folder / "error.log") in line
    assert "Traceback" in (folder / "error.log").read_text() and "second line" in (folder / "error.log").read_text()


def test_the_installed_program_exits_with_the_code(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "rl_vlm.cli", "train", "missing.yaml"], capture_output=True, text=True, cwd=tmp_path
    )
    assert (
        done.returncode == 2
        and done.stderr == "error: Cannot read the config missing.yaml: No such file or directory.\n"
    )


# eval and rollout


def test_eval_hands_on_what_else_is_asked_for(config, harness, tmp_path, capsys):
    words = ["--against=base", "--split=test", "--split=train", "--benchmark-runs=3", "--compare-hf", "--resume"]
    assert run("eval", config, *words, "--out", tmp_path / "o.json") == 0
    seen = json.loads(output(capsys))["options"]
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
    assert "0 < top_p <= 1" in failure(capsys)


def test_a_run_folder_plays_what_it_trained(config, harness, tmp_path, capsys):
    adapter = adapter_folder(tmp_path / "adapter")  # config.yaml is beside it
    assert run("rollout", tmp_path) == 0
    assert json.loads(output(capsys))["summary"]["adapter"] == str(adapter)
    other = adapter_folder(tmp_path / "other")
    assert run("rollout", tmp_path, "--adapter", other) == 0
    assert json.loads(output(capsys))["summary"]["adapter"] == str(other)
    assert run("eval", tmp_path) == 0
    assert json.loads(output(capsys))["run_dir"] == str(tmp_path)


# Per turn, then of a whole trajectory: 8 turns, and 3,072 tokens where nothing is said.
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
