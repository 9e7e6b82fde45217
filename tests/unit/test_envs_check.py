"""rl-vlm envs: the check names what is wrong with an environment; a person plays; what is listed."""

import io
import json
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from test_cli import output, run

import rl_vlm
from rl_vlm.cli.play import half_blocks, play_episode
from rl_vlm.envs.checking import DeadlineError, check_environment, deadline

FAULTY = str(Path(__file__).parents[1] / "fixtures" / "envs" / "faulty_env.py")
FINE = f"{FAULTY}:Fine"


def failures(env, episodes=4, call_s=60.0, **kwargs):
    report = check_environment(env, kwargs, episodes=episodes, budget_s=1.0, call_s=call_s)
    return {finding.name: finding.detail for finding in report.findings if finding.status != "ok"}


def test_a_sound_environment_passes():
    report = check_environment(FINE, episodes=6)
    assert report.ok and [finding.name for finding in report.findings] == [
        "make", "prompt", "spaces", "splits", "ends", "cost", "reward", "determinism", "answers", "memory",
    ]  # fmt: skip
    assert report.prompt == "[user] [image 12x10] Item 0: say its number."
    assert report.image is not None and (report.image.width, report.image.height) == (12, 10)
    assert report.figures["num_items"] == {"train": 12, "test": 6} and report.figures["turns"] == [2, 2]


@pytest.mark.parametrize(
    ("fault", "name", "detail"),
    [
        ("overlap", "splits", "6 of 6 test prompts are also in train: test item 0 is train item 0"),
        ("random", "determinism", "item 0 with seed 0 differs in the same instance, from turn 0 on"),
        ("memory", "memory", "it grows by"),
        ("leak", "memory", "steadily"),
        ("hang", "reset", "reset() of train item 3 hangs: it did not return in 0.2 s"),
        ("exit", "reset", "reset() of train item 0: SystemExit: no data"),
        ("blind", "prompt", "0 images: there is nothing to see"),
        ("close", "close", "close(): OSError: still open"),
        ("spaceless", "spaces", "'NoneType' object has no attribute 'contains'"),
        ("nan", "step", "reward nan; it must be finite"),
        ("reset", "reset", "reset() of train item 0: KeyError: 'row'"),
        ("fragile", "step", "ValueError"),
        ("endless", "ends", "episodes did not end in 200 turns"),
    ],
)
def test_a_fault_is_named(fault, name, detail):
    found = failures(
        FINE, fault=fault, episodes={"memory": 8, "leak": 20}.get(fault, 2), call_s=0.2 if fault == "hang" else 60.0
    )
    assert list(found) == [name] and detail in found[name]


def test_state_that_leaks_between_episodes_is_found():
    assert "differs in the same instance" in failures(f"{FAULTY}:Shared")["determinism"]


def test_an_empty_split_and_wrong_arguments_are_found():
    assert failures(FINE, num_test=0)["splits"] == failures(FINE, num_test=-1)["splits"] == "the split test is empty"
    assert failures(FINE, num_train=0) == {"splits": "the split train is empty"}
    assert "does not take these arguments" in failures(FINE, colour=1)["make"]
    assert "Unknown environment" in failures("Nowhere-v0")["make"]


def test_a_slow_reset_is_a_warning_and_no_failure(monkeypatch):
    monkeypatch.setattr("rl_vlm.envs.checking.SLOW_S", 0.01)
    report = check_environment(FINE, {"fault": "slow"}, episodes=1, budget_s=0.1)
    assert report.ok and [one.name for one in report.findings if one.status == "warn"] == ["cost"]


def test_a_reset_is_timed_when_its_item_is_opened_for_the_first_time():
    assert check_environment(FINE, {"fault": "first"}, episodes=2, budget_s=1.0).figures["reset_ms"] > 15


def test_a_deadline_leaves_signals_as_they_were():
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(DeadlineError), deadline(0.05):
        time.sleep(10)
    with deadline(10.0):
        pass
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL)[1] == 0
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: deadline(0.01).__enter__()).result()  # no deadline there, and no error


@pytest.mark.parametrize("env", ["Shapes-v0", "GridWalk-v0"])
def test_our_own_environments_pass(env):
    report = check_environment(env, episodes=5, budget_s=2.0)
    assert report.ok, report.findings


def test_the_environment_of_the_docs_passes_in_25_lines(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "own_environments.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    written = [line for line in block.splitlines() if line.strip() and not line.startswith(("import", "from"))]
    assert len(written) <= 25
    (tmp_path / "brighter.py").write_text(block)
    report = check_environment(str(tmp_path / "brighter.py"), {"size": 28}, episodes=5, budget_s=2.0)
    assert report.ok, report.findings
    env = rl_vlm.make(str(tmp_path / "brighter.py"))
    for index in range(10):
        pixels = np.asarray(env.reset(options={"index": index})[0].messages[0].images[0]).mean(axis=(0, 2))
        brighter = "left" if pixels[:28].mean() > pixels[28:].mean() else "right"
        assert env.step(f"{brighter}.")[1:4] == (1.0, True, False)


def test_the_command_prints_the_prompt_saves_the_image_and_ends_with_1_where_something_is_wrong(tmp_path, capsys):
    picture = tmp_path / "first.png"
    assert run("envs", "check", FINE, "--episodes", 2, "--image", picture) == 0
    said = output(capsys)
    assert "[user] [image 12x10] Item 0: say its number." in said and "ok   determinism" in said
    assert Image.open(picture).size == (12, 10)
    assert run("envs", "check", FINE, "--env-arg", "fault=overlap", "--json", "--episodes", 2, "--image", picture) == 1
    found = json.loads(output(capsys))
    assert found["ok"] is False and found["image"] == str(picture) and found["num_items"] == {"train": 12, "test": 6}
    assert {"name": "splits", "status": "fail"}.items() <= next(
        one for one in found["checks"] if one["name"] == "splits"
    ).items()
    assert run("envs", "check", FINE, "--env-arg", "fault") == 2
    assert run("envs", "check", FINE, "--env-arg", "fault=talks", "--json", "--episodes", 2, "--image", picture) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True  # what the environment prints goes elsewhere


def test_what_an_environment_prints_is_not_part_of_the_report(tmp_path, capsys):
    talking = tmp_path / "talking.py"
    talking.write_text("from rl_vlm.zoo.gridwalk.environment import GridWalkEnv as Walk\n\n\nclass Talking(Walk):\n"
                       "    def reset(self, **arguments):\n        print('Opened.')\n        return super().reset(**arguments)\n")  # fmt: skip
    run("envs", "check", talking, "--json", "--episodes", 2)
    out, err = capsys.readouterr()
    assert json.loads(out)["id"] == str(talking) and "Opened." in err


def test_the_list_has_splits_and_turns(capsys):
    assert run("envs", "--json") == 0
    entries = {entry["id"]: entry for entry in json.loads(output(capsys))}
    assert entries["GridWalk-v0"]["max_turns"] == 8 and entries["Control-v0"]["max_turns"] == 32
    assert run("envs") == 0
    assert "(4096 items to train on, 512 to test on; up to 8 turns)" in " ".join(output(capsys).split())


def played(answers, monkeypatch, picture="none", **console):
    lines = iter(answers)

    def answer(_):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", answer)
    out = io.StringIO()
    total = play_episode(
        FINE,
        {},
        split="train",
        index=3,
        seed=0,
        picture=picture,
        console=Console(file=out, width=60, height=30, **console),
    )
    return total, out.getvalue()


def test_a_person_plays_an_episode(monkeypatch):
    total, said = played(["4", "nothing"], monkeypatch)
    assert total == 1.0
    assert "(image of 12x10 pixels)\nItem 3: say its number." in said
    assert "reward 1 " in said and "Once more." in said and "The end: 1 in all." in said
    assert played([], monkeypatch)[0] == 0.0  # Ctrl-D leaves


def test_a_picture_is_drawn_where_there_are_colours_and_saved_where_not(monkeypatch):
    _, drawn = played([], monkeypatch, picture="blocks", force_terminal=True, color_system="truecolor")
    assert "▀" in drawn and "38;2;3;0;0" in drawn  # the shade of item 3
    _, saved = played([], monkeypatch, picture="blocks")
    path = Path(saved.partition(" pixels in ")[2].partition(")")[0].replace("\n", ""))
    assert Image.open(path).size == (12, 10)
    path.unlink()


@pytest.mark.parametrize(
    ("size", "columns", "rows", "shape"),
    [((4, 4), 8, 10, (8, 4)), ((100, 50), 40, 40, (40, 10)), ((10, 300), 40, 15, (1, 15)), ((3, 1), 3, 9, (3, 1))],
)
def test_half_blocks_keep_the_proportions(size, columns, rows, shape):
    text = half_blocks(Image.new("RGB", size), columns, rows).plain.splitlines()
    assert (len(text[0]), len(text)) == shape


def test_half_blocks_hold_the_colours_of_both_rows():
    pixels = np.zeros((2, 1, 3), np.uint8)
    pixels[0], pixels[1] = (255, 0, 0), (0, 0, 255)
    span = half_blocks(Image.fromarray(pixels), 1, 1).spans[0].style
    assert span.color.triplet == (255, 0, 0) and span.bgcolor.triplet == (0, 0, 255)
