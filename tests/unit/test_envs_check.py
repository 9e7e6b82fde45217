"""rl-vlm envs: the check names what is wrong with an environment; a person plays; what is listed."""

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from test_cli import output, run

import rl_vlm
from rl_vlm.cli.play import play_episode
from rl_vlm.envs.checking import check_environment

FAULTY = str(Path(__file__).parents[1] / "fixtures" / "envs" / "faulty_env.py")
FINE = f"{FAULTY}:Fine"


def failures(env, episodes=4, call_s=60.0, **kwargs):
    report = check_environment(env, kwargs, episodes=episodes, budget_s=20.0, call_s=call_s)
    return {finding.name: finding.detail for finding in report.findings if finding.status != "ok"}


@pytest.mark.slow
def test_a_sound_environment_passes():
    assert set(failures(f"{FAULTY}:Forgetful")) == {"splits"}  # its items have no end
    report = check_environment(FINE, episodes=6)
    assert report.ok and [finding.name for finding in report.findings] == [
        "make", "prompt", "splits", "ends", "cost", "reward", "determinism", "answers", "close",
    ]  # fmt: skip
    assert report.prompt == "[user] [image 12x10] Item 0: say its number."
    assert report.image is not None and (report.image.width, report.image.height) == (12, 10)
    assert report.numbers["num_items"] == {"train": 12, "test": 6} and report.numbers["turns"] == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "name", "detail"),
    [
        ("overlap", "splits", "6 of 6 test prompts are also in train: test item 0 is train item 0"),
        ("random", "determinism", "item 0 with seed 0 differs in the same instance, from turn 0 on"),
        ("hang", "splits", "train item 3"),
        ("exit", "make", "SystemExit: no data"),
        ("blind", "prompt", "0 images: there is nothing to see"),
        ("nan", "play", "reward nan; it must be finite"),
        ("reset", "make", "KeyError: 'row'"),
        ("mute", "make", "Mute: (its message cannot be made) (faulty_env.py, line"),
        ("pair", "make", "open() must return an Observation, or an Observation and a dict"),
        ("words", "make", "num_items() must return a whole number, or None"),
        ("fragile", "play", "ValueError"),
        ("text", "correct", "info['correct'] is text"),
        ("close", "close", "OSError: still open"),
        ("endless", "ends", "episodes did not end in 200 turns"),
    ],
)
def test_a_fault_is_named(fault, name, detail):
    found = failures(FINE, fault=fault, episodes=2, call_s=0.5 if fault == "hang" else 60.0)
    assert list(found) == [name] and detail in found[name]


@pytest.mark.slow
def test_state_that_leaks_between_episodes_is_found():
    assert "differs in the same instance" in failures(f"{FAULTY}:Shared")["determinism"]


@pytest.mark.slow
def test_an_empty_split_and_wrong_arguments_are_found():
    assert failures(FINE, num_test=0) == failures(FINE, num_test=-1) == {"make": "the split test is empty"}
    assert failures(FINE, num_train=0) == {"make": "the split train is empty"}
    assert "does not take these arguments" in failures(FINE, colour=1)["make"]
    assert "Unknown environment" in failures("Nowhere-v0")["make"]


@pytest.mark.slow
def test_a_slow_reset_is_a_warning_and_no_failure(monkeypatch):
    monkeypatch.setattr("rl_vlm.envs.checking.SLOW_S", 0.01)
    report = check_environment(FINE, {"fault": "slow"}, episodes=1, budget_s=0.1)
    assert report.ok and [one.name for one in report.findings if one.status == "warn"] == ["cost", "reward"]


@pytest.mark.slow
@pytest.mark.parametrize("env", ["Shapes-v0", "GridWalk-v0", "GeoSpot-v0"])
def test_our_own_environments_pass(env):
    report = check_environment(env, episodes=5, budget_s=2.0)
    assert report.ok, report.findings


@pytest.mark.slow
def test_the_environment_of_the_docs_passes_in_25_lines_and_so_does_its_test(tmp_path, monkeypatch):
    page = Path(__file__).parents[2] / "docs" / "own_environments.md"
    block, its_test = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    written = [line for line in block.splitlines() if line.strip() and not line.startswith(("import", "from"))]
    assert len(written) <= 25
    (tmp_path / "brighter.py").write_text(block)
    report = check_environment(str(tmp_path / "brighter.py"), {"size": 28}, episodes=5, budget_s=2.0)
    assert report.ok, report.findings
    env = rl_vlm.make(str(tmp_path / "brighter.py"))
    for index in range(10):
        pixels = np.asarray(env.reset(options={"index": index})[0].messages[0].images[0].to_pil()).mean(axis=(0, 2))
        brighter = "left" if pixels[:28].mean() > pixels[28:].mean() else "right"
        assert env.step(f"{brighter}.")[1:4] == (1.0, True, False)
    monkeypatch.chdir(tmp_path)
    exec(its_test, names := {})
    names["test_left_or_right_is_rewarded"]()


@pytest.mark.slow
def test_the_command_prints_the_prompt_saves_the_image_and_ends_with_1_where_something_is_wrong(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run("envs", "check", FINE, "--episodes", 2) == 0
    said = output(capsys)
    (picture,) = tmp_path.glob("rl-vlm-*.png")
    assert "[user] [image 12x10] Item 0: say its number." in said and "ok   determinism" in said
    assert Image.open(picture).size == (12, 10)
    assert run("envs", "check", FINE, "--env-arg", "fault=overlap", "--json", "--episodes", 2) == 1
    found = json.loads(output(capsys))
    assert found["ok"] is False and found["image"] == str(picture) and found["num_items"] == {"train": 12, "test": 6}
    assert run("envs", "check", FINE, "--env-arg", "fault") == 2
    assert run("envs", "check", FINE, "--env-arg", "fault=talks", "--json", "--episodes", 2) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True  # what the environment prints goes elsewhere


def played(answers, monkeypatch, **console):
    lines = iter(answers)

    def answer(_):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", answer)
    out = io.StringIO()
    screen = Console(file=out, width=60, height=30, **console)
    total = play_episode(FINE, {}, split="train", index=3, seed=0, console=screen)
    return total, out.getvalue()


def test_a_person_plays_an_episode(monkeypatch):
    total, said = played(["4", "nothing"], monkeypatch)
    assert total == 1.0
    assert re.search(r"\(image of 12x10 pixels in \S+\)\nItem 3: say its number\.", said)
    assert "reward 1 " in said and "Once more." in said and "The end: 1 in all." in said
    assert played([], monkeypatch)[0] == 0.0  # Ctrl-D leaves
