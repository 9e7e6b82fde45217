"""What `rl-vlm view` answers: lists, episodes, pairs, and the report as one file, against the files of a run."""

from __future__ import annotations

import base64
import gzip
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pandas as pd
import pytest
from label_support import pair
from recorder_support import WORDS, picture, trajectory

from rl_vlm.algorithms.evaluation import HeldOutItems
from rl_vlm.cli.app import run as rl_vlm
from rl_vlm.config import PolicyConfig, save_config
from rl_vlm.labelling.labels import Label
from rl_vlm.labelling.store import LabelStore
from rl_vlm.learning.plan import TokenRecord
from rl_vlm.monitoring.recorder import RunRecorder
from rl_vlm.rollout.tasks import RolloutResult, RolloutTask
from rl_vlm.types import Message, TrajectoryGroup
from rl_vlm.view.findings import findings
from rl_vlm.view.library import Library
from rl_vlm.view.reader import NotThereError
from rl_vlm.view.report import choose_episodes

RED, BLUE = picture("red"), picture("blue")
CALL = '<tool_call>{"name": "crop", "arguments": {"x": 0}}</tool_call>'


def spoken(name: str, *said: str, reward: float = 1.0, **info: Any) -> Any:
    messages = [Message.of("user", RED, "How many?")]
    for text in said:
        messages += [Message.of("assistant", text), Message.of("tool", BLUE)]
    images = (RED, *[BLUE] * (len(said) - 1))
    return trajectory(name, reward, images, messages=tuple(messages[:-1]), info=info, replica_ids=("a",))


def write_run(folder: Path, **settings: Any) -> RunRecorder:
    folder.mkdir(parents=True)
    config = PolicyConfig.model_validate({"name": folder.name, "logging": {"tensorboard": False}, **settings})
    save_config(config, folder / "config.yaml")
    return RunRecorder(folder, config)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Two runs: one with everything, one that has just begun."""
    recorder = write_run(tmp_path / "counts", algorithm={"iterations": 8})
    for iteration in (1, 2):
        recorder.log_iteration(iteration, {"reward/mean": 0.25 * iteration, "policy/kl": float("nan")})
        said = ("<think>so\nmany</think>Look. " + CALL, f"It is {iteration}")
        first = spoken(
            f"{iteration}/0",
            *said,
            correct=True,
            tool_calls=1,
            crops=[{"picture": 1, "of": 0, "box": [0, 0.5, 0.5, 1]}],
        )
        group = TrajectoryGroup(
            f"g{iteration}", 7, [first, spoken(f"{iteration}/1", "</think>No", reward=0.0)], "count", 1
        )
        tokens = TokenRecord(
            advantages={f"{iteration}/0": np.float32([1, 3]), f"{iteration}/1": np.float32([-2, -2])},
            logprobs={f"{iteration}/0": np.float32([-0.5, -1 / 3])},
        )
        recorder.dump_trajectories(iteration, [group], tokens, WORDS)
    for iteration in (0, 2):
        recorder.log_evaluation(iteration, {"accuracy/default": iteration / 2})
        task = RolloutTask("t", 3, "test", 0, 0, 1, 0.0, 0, view="blank", variant="default")
        item = TrajectoryGroup("t", 3, [spoken("e", "3", correct=bool(iteration), category="hard")])
        recorder.dump_evaluation(iteration, [(task, item)], WORDS)
    recorder.log_failures(2, {"g": "env: boom", "h": "env: boom"})
    recorder.log_message(2, "Answers do not need the images")
    recorder.finish({"status": "done", "train_seconds": 9.5})
    write_run(tmp_path / "deep" / "new", seed=5)
    return tmp_path


def test_the_list_of_runs(place: Path) -> None:
    listed = Library([place]).answer("runs")
    assert listed["schema"] == 1 and listed["live"] is True
    lines = {line["id"]: line for line in listed["runs"]}
    assert set(lines) == {"counts", "deep~new"}
    one = lines["counts"]
    assert (one["status"], one["iterations"], one["total"], one["seconds"]) == ("done", 2, 8, 9.5)
    assert one["reward"] == [0.25, 0.5] and one["accuracy"] == [0, 1]
    assert lines["deep~new"]["status"] == "running" and lines["deep~new"]["reward"] == [None, None]
    assert lines["deep~new"]["settings"]["seed"] == "5" and one["settings"]["algorithm.iterations"] == "8"


def test_a_run_with_its_messages_and_losses(place: Path) -> None:
    told = Library([place / "counts"]).answer("runs/counts")
    assert told["progress"] == {"iteration": [1, 2], "reward/mean": [0.25, 0.5], "policy/kl": [None, None]}
    assert told["evaluations"]["accuracy/default"] == [0, 1]
    assert told["messages"] == [{"iteration": 2, "text": "Answers do not need the images"}]
    assert told["losses"] == [{"iteration": 2, "reason": "env: boom", "count": 2}]
    assert told["has"] == {"episodes": 4, "evaluated": 2, "pairs": 0, "films": 0, "adapter": False}


def test_the_list_of_episodes(place: Path) -> None:
    listed = Library([place]).answer("runs/counts/episodes")
    assert listed["id"] == ["train-1-0", "train-1-1", "train-2-0", "train-2-1", "eval-0-0", "eval-2-0"]
    assert {len(column) for column in listed.values() if isinstance(column, list)} == {6}
    first = {name: column[0] for name, column in listed.items() if isinstance(column, list)}
    assert first == {
        "id": "train-1-0", "kind": "train", "iteration": 1, "env": "count", "stage": 1, "index": 7, "variant": "", "view": "true",
        "category": "", "reward": 1.0, "advantage": 2.0, "correct": True, "status": "completed", "question": "How many?",
        "answer": "It is 1", "group": "g1", "turns": 1, "tools": 1, "tokens": 2, "version": 3, "newest": 3, "sample": "sampled",
        "replicas": "a", "picture": BLUE.sha256, "pictures": 2,
    }  # fmt: skip
    assert [listed[name][-1] for name in ("view", "variant", "category", "correct", "advantage")] == [
        "blank",
        "default",
        "hard",
        True,
        None,
    ]


def test_an_episode_is_listed_with_the_picture_behind_its_last_answer(tmp_path: Path) -> None:
    recorder, unseen = write_run(tmp_path / "tools"), picture("green")
    asked, answer = Message.of("user", RED, "How many?"), Message.of("assistant", "3")
    episodes = [
        ((RED,), (asked, answer)),
        ((RED, BLUE), (asked, answer, Message.of("tool", BLUE), answer)),
        ((RED, BLUE), (asked, answer, Message.of("tool", BLUE), answer, Message.of("tool", unseen))),
        ((BLUE, RED), (Message.of("user", BLUE, RED, "Which?"), answer)),
        ((), (Message.of("user", "Which?"), answer)),
    ]
    group = [trajectory(str(k), images=seen, messages=said) for k, (seen, said) in enumerate(episodes)]
    recorder.dump_trajectories(1, [TrajectoryGroup("g", 0, group)], TokenRecord(), WORDS)
    listed = Library([tmp_path]).answer("runs/tools/episodes")
    shown = ["red", "blue", "blue", "red", None]
    assert listed["picture"] == [picture(color).sha256 if color else "" for color in shown]
    assert listed["pictures"] == [1, 2, 2, 2, 0]


def test_an_episode_in_parts_with_its_tokens(place: Path) -> None:
    told = Library([place]).answer("runs/counts/episodes/train-2-0")
    user, called, shown, said = told["messages"]
    of = {"picture": 0, "box": [0, 0.5, 0.5, 1]}
    assert user["parts"] == [
        {"picture": {"sha": RED.sha256, "width": 8, "height": 8, "of": None}},
        {"text": "How many?"},
    ]
    assert called["parts"] == [
        {"thought": "so\nmany"},
        {"text": "Look. "},
        {"call": {"name": "crop", "arguments": {"x": 0}, "raw": CALL}},
    ]
    assert shown["parts"] == [{"picture": {"sha": BLUE.sha256, "width": 8, "height": 8, "of": of}}]
    assert (said["parts"], said["turn"], called["turn"]) == ([{"text": "It is 2"}], 0, None)
    assert told["tokens"] == [" 5", "", " 7", " 8"] and told["sampled"] == [False, False, True, True]
    assert told["engine"] == [None, None, -0.5, -0.25] and told["learner"] == [None, None, -0.5, -0.333333343]
    assert told["advantages"] == [None, None, 1, 3] and told["values"] is None
    assert told["spans"] == [{"start": 1, "stop": 2, "rows": 1, "columns": 1}]
    skipped = Library([place]).answer("runs/counts/episodes/train-2-1")
    assert skipped["learner"] is None and skipped["messages"][1]["parts"] == [{"thought": ""}, {"text": "No"}]


def test_a_run_that_goes_on_is_followed_and_a_damaged_file_left_out(place: Path) -> None:
    library = Library([place])
    before, listed = library.answer("stamps")["stamps"], library.answer("runs/counts/episodes")
    assert library.answer("stamps")["stamps"] == before
    (place / "counts" / "trajectories" / "iteration-000003.parquet").write_bytes(b"half")
    now = library.answer("stamps")["stamps"]
    assert now["counts"] != before["counts"] and now["deep~new"] == before["deep~new"]
    assert library.answer("runs/counts/episodes")["id"] == listed["id"]
    shutil.copy(
        place / "counts/trajectories/iteration-000002.parquet", place / "counts/trajectories/iteration-000003.parquet"
    )
    assert len(library.answer("runs/counts/episodes")["id"]) == len(listed["id"]) + 2
    write_run(place / "later")
    assert "later" in library.answer("stamps")["stamps"]


@pytest.mark.parametrize(
    "name, content",
    [
        ("config.yaml", "a: [1"), ("config.yaml", ""), ("config.yaml", "[1]"), ("result.json", '{"status"'),
        ("result.json", "[]"), ("progress.csv", 'a,"b\n1'), ("progress.csv", "iteration,a/b\n1,1\n" * 2),
        ("progress.csv", "iteration,a/b\n1,1\n" + "\0" * 9), ("progress.csv", "iteration,a/b\n<<<\n"),
        ("eval.jsonl", "x\n"), ("eval.jsonl", "[1]\n"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_told_and_the_other_runs_are_shown(place: Path, name: str, content: str) -> None:
    (place / "counts" / name).write_text(content)
    library = Library([place])
    lines = {line["id"]: line for line in library.answer("runs")["runs"]}
    assert lines["counts"]["status"] == "damaged" and "cannot be read" in lines["counts"]["error"]
    assert lines["deep~new"]["status"] == "running"
    assert library.answer("runs/counts")["has"]["episodes"] == 4


def test_settings_of_another_form_are_damage_too(place: Path) -> None:
    (place / "counts" / "config.yaml").write_text("algorithm: 5\n")
    lines = {line["id"]: line["status"] for line in Library([place]).lines()}
    assert lines == {"counts": "damaged", "deep~new": "running"}


def test_runs_of_equal_names_are_all_shown_and_a_run_that_is_named_twice_once(tmp_path: Path) -> None:
    for name in ("a/runs/same", "b/runs/same"):
        write_run(tmp_path / name)
    library = Library([tmp_path / "a/runs", tmp_path / "b/runs", tmp_path / "a/runs/same"])
    folders = {line["id"]: line["folder"] for line in library.lines()}
    assert len(folders) == 2 and folders["same"] == str(tmp_path / "a/runs/same")
    assert all(library.answer(f"runs/{name}")["line"]["folder"] == folder for name, folder in folders.items())


def test_search_finds_texts_of_any_case(place: Path) -> None:
    library = Library([place])
    assert len(library.answer("runs/counts/search", "5 6 7")["ids"]) == 6
    assert library.answer("runs/counts/search", ".*")["ids"] == []


@pytest.mark.parametrize(
    "path",
    ["", "x", "runs/none", "runs/counts/x", "runs/counts/episodes/train-9-0", "runs/counts/episodes/train-1-9",
     "runs/counts/episodes/../1", "runs/counts/episodes/train-1-0/x"],
)  # fmt: skip
def test_what_is_not_there(place: Path, path: str) -> None:
    with pytest.raises(NotThereError):
        Library([place]).answer(path)


@pytest.mark.parametrize(
    "kind, name",
    [("images", "../../config.yaml"), ("images", "0" * 64), ("images", "A" * 64), ("films", "../x.gif"),
     ("films", "step1_episode1_1.gif/../../config.yaml"), ("config", "config.yaml")],
)  # fmt: skip
def test_files_beside_pictures_and_films_are_not_read(place: Path, kind: str, name: str) -> None:
    reader = Library([place]).reader("counts")
    assert reader.file("images", RED.sha256) == RED.png
    with pytest.raises(NotThereError):
        reader.file(kind, name)


def test_pairs_with_what_the_reward_model_thought(place: Path) -> None:
    store = LabelStore(place / "counts" / "labels")
    labels = [Label(0, (0.75, 0.25, 0.0), "first", answers=(0, 1)), Label(-1, error="no answer")]
    store.append([pair(1, 2), pair(2, 1)], labels, step=50, time=0.0, learned=[(0.5, 0.25), (1.0, 2.0)])
    store.append([pair(1, 2)], [Label(1)], step=60, time=0.0)  # as earlier versions wrote them
    pairs = Library([place]).answer("runs/counts/pairs")
    assert pairs["id"] == ["pair-1-0", "pair-1-1", "pair-2-0"] and pairs["step"] == [50, 50, 60]
    assert pairs["label"] == [0, -1, 1] and pairs["answers"] == [[0, 1], [], []]
    assert pairs["learned"] == [[0.5, 0.25], [1.0, 2.0], [None, None]]
    assert pairs["probabilities"] == [[0.75, 0.25, 0.0], None, None] and pairs["error"][1] == "no answer"
    assert [len(frames) for frames in pairs["first"]] == [min(len(pair(1, 2).first), 4)] * 3


def test_a_report_holds_what_the_page_asks_for(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.html"
    assert rl_vlm(["report", str(place / "counts"), "--out", str(out)]) == 0
    assert "6 episodes, 2 pictures" in capsys.readouterr().out
    page = out.read_text()
    assert not re.search(r"(src|href)=.?https?:", page.split("<script id=")[0])
    content = json.loads(re.search(r'<script id="report" type="application/json">(.*?)</script>', page)[1])
    answers = {
        path: json.loads(gzip.decompress(base64.b64decode(packed))) for path, packed in content["answers"].items()
    }
    live = Library([place / "counts"], live=False)
    assert len(answers) == 5 + 6
    for path, answer in answers.items():
        assert answer == json.loads(json.dumps(live.answer(path))), path
    assert base64.b64decode(content["files"][f"counts/images/{RED.sha256}"].split(",")[1]) == RED.png
    assert rl_vlm(["report", str(place / "counts"), "--out", str(out), "--episodes", "1"]) == 0
    assert rl_vlm(["report", str(tmp_path / "nothing"), "--out", str(out)]) == 2
    assert rl_vlm(["report", str(place / "counts")]) == 2  # where to?


def test_a_report_prefers_the_last_evaluation_and_the_newest_training() -> None:
    listed = {
        "kind": ["train"] * 6 + ["eval"] * 6,
        "iteration": [1, 1, 2, 2, 3, 3, 0, 0, 2, 2, 3, 3],
        "env": ["a"] * 6 + ["a", "b"] * 3,
        "variant": ["default"] * 12,
        "view": ["true"] * 12,
        "index": [*range(6), *[0] * 6],
    }
    assert choose_episodes(listed, 4) == [4, 5, 6, 10]  # an item of both evaluations
    assert choose_episodes(listed, 8) == [2, 3, 4, 5, 6, 7, 10, 11]
    assert choose_episodes(listed, 100) == [*range(8), 10, 11]


def test_a_sweep_is_its_trials(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    trial = sweep / "tune" / "trial-1"
    trial.mkdir(parents=True)
    (sweep / "config.yaml").write_text("name: s")
    (sweep / "sweep.yaml").write_text("space: {}")
    (trial / "params.json").write_text(json.dumps({"learner.lr": 0.1, "run_config": {"env": {"id": "Shapes-v0"}}}))
    rows = [
        {"training_iteration": 1, "reward": {"mean": 0.5, "part": {"form": 1.0}}, "timers": {"x": 1}, "pid": 3,
         "held_out": {"accuracy": 0.25}, "held_out_before": {"accuracy": 0.25}, "time_total_s": 1.5, "should_checkpoint": False},
        {"training_iteration": 2, "reward": {"mean": 0.75}, "held_out": {"accuracy": 0.5}, "time_total_s": 3.0,
         "should_checkpoint": True, "done": True},
    ]  # fmt: skip
    (trial / "result.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    library = Library([tmp_path])
    (line,) = library.answer("runs")["runs"]
    assert line["id"] == "sweep~tune~trial-1" and line["sweep"] and line["status"] == "done" and line["seconds"] == 3.0
    assert (line["reward"], line["accuracy"], line["environment"]) == ([0.5, 0.75], [0.25, 0.5], "Shapes-v0")
    told = library.answer(f"runs/{line['id']}")
    assert told["config"]["learner.lr"] == "0.1" and set(told["progress"]) == {
        "iteration",
        "reward/mean",
        "reward/part/form",
    }
    assert told["evaluations"] == {"iteration": [0, 2], "accuracy/default": [0.25, 0.5]}


# --- What looks wrong


def table(**columns: list[float]) -> pd.DataFrame:
    return pd.DataFrame({key.replace("__", "/"): values for key, values in columns.items()})


def found(progress: Any = None, evaluations: Any = None, gaps: Any = None, pairs: Any = (), losses: Any = ()) -> Any:
    nothing = pd.DataFrame()
    given = nothing if progress is None else progress, nothing if evaluations is None else evaluations
    return [finding.view for finding in findings(*given, gaps or {}, pairs, losses)]


def test_a_healthy_run_has_no_findings() -> None:
    rows = 20
    progress = table(
        accuracy__a=[0.0] * 5 + [0.5] * 15, accuracy__b=[1.0] * rows, mismatch__kl=[1e-13] * 10 + [1e-12] * 10,
        reward__zero_advantage_groups=[1.0] * 19 + [0.9],
    )  # fmt: skip
    evaluations = table(accuracy__default=[0.2, 0.9], reward__default=[0.2, 0.95])
    progress["rollout/groups"], progress["dropped/group_lost"] = 16.0, [float("nan")] * 5 + [40.0] * 15
    evaluations["lost"], evaluations["items/default"] = [400, 4], 512
    assert found(progress, evaluations, {"a": 2e-2, "b": 1e-2}, [{"answers": [0, 0]}] * 50) == []
    assert found() == []


@pytest.mark.parametrize(
    "view, given",
    [
        ("episodes", {"evaluations": table(accuracy__default=[0.25, 0.0], reward__default=[0.25, 1.0])}),
        ("episodes", {"progress": table(accuracy__a=[0.5] * 10, accuracy__b=[0.0] * 10)}),
        ("curves", {"progress": table(mismatch__kl=[1e-4] * 5 + [0.1] * 5)}),
        ("groups", {"progress": table(reward__zero_advantage_groups=[0.0] * 5 + [1.0] * 5)}),
        ("episodes", {"gaps": {"a": 1e-7, "b": 0.02}}),
        ("system", {"progress": table(rollout__groups=[16.0] * 10, dropped__group_lost=[float("nan")] * 8 + [4.0, 10.0])}),
        ("system", {"evaluations": pd.DataFrame([{"lost": 60, "items/a": 256, "items/b": 256}])}),
        ("sight", {"evaluations": pd.DataFrame([{"sight/accuracy_gap_high": 0.05, "sight/accuracy_blank": 0.9, "sight/accuracy_gap": 0.0}])}),
        ("preferences", {"pairs": [{"answers": [0, 1]}] * 10 + [{"answers": [1, 1]}] * 20}),
    ],
)  # fmt: skip
def test_what_looks_wrong_is_found(view: str, given: dict[str, Any]) -> None:
    assert found(**given) == [view]


@pytest.mark.parametrize(
    "given",
    [
        {"progress": table(accuracy__a=[0.5] * 9, accuracy__b=[0.0] * 9)},  # too early
        {"progress": table(accuracy__a=[0.0] * 30)},  # nothing is known to pay
        {"gaps": {"a": 0.5}},  # no other replica says that it could be otherwise
        {"gaps": {"a": 1e-9, "b": 5e-3}},
        {"pairs": [{"answers": [0, 1]}] * 19},  # too few
        {"pairs": [{"answers": [0]}] * 50},  # one order
    ],
)
def test_what_may_be_chance_is_no_finding(given: dict[str, Any]) -> None:
    assert found(**given) == []


def test_a_replica_that_serves_other_weights_is_named(tmp_path: Path) -> None:
    recorder = write_run(tmp_path / "stale")
    agrees, stale = (replace(spoken(name, "3"), replica_ids=(name,)) for name in "ab")
    tokens = TokenRecord(
        advantages={"a": np.float32([1, 1]), "b": np.float32([-1, -1])},
        logprobs={"a": agrees.logprobs[agrees.loss_mask], "b": stale.logprobs[stale.loss_mask] - np.float32(0.25)},
    )
    recorder.dump_trajectories(1, [TrajectoryGroup("g", 7, [agrees, stale])], tokens, WORDS)
    (line,) = Library([tmp_path]).lines()
    (told,) = line["findings"]
    assert told["text"].startswith("Replica b ") and "0.25 nats per token" in told["text"]


def test_findings_about_replicas_name_the_replica_and_the_cause() -> None:
    rows = {"iteration": range(1, 11), "mismatch/kl": [1e-4] * 5 + [0.2] * 5, "rollout/groups": 16.0}
    progress = pd.DataFrame({**rows, "dropped/group_lost": [2.0 * k for k in range(10)]})
    died, slow = "Replica b is dead: out\nof memory", "KeyError: 'x' (dots.py, line 3)"
    counts = [(5, slow, 99), (7, died, 2), (8, slow, 3), (9, died, 2)]  # the first was long ago
    losses = [{"iteration": at, "reason": reason, "count": count} for at, reason, count in counts]
    evaluations = pd.DataFrame([{"lost": 0}, {"lost": 60, "items/a": 256, "lost_because": {slow: 20, died: 40}}])

    def said(gaps: dict[str, float]) -> dict[str, list[str]]:
        texts: dict[str, list[str]] = {}
        for finding in findings(progress, evaluations, gaps, (), losses):
            texts.setdefault(finding.view, []).append(finding.text)
        return texts

    told = said({"a": 1e-7, "b": 0.2})
    assert len(told["system"]) == 2 and all("Replica b is dead: out of memory" in text for text in told["system"])
    assert "Replica b " in told["episodes"][0] and "replica a 1e-07" in told["episodes"][0]
    assert "cause is replica b," in told["curves"][0]
    assert "No replica alone" in said({"a": 0.1, "b": 0.2})["curves"][0]
    assert "eplica" not in said({"a": 0.2})["curves"][0]  # there is no other one to compare it with


def test_an_evaluation_that_loses_its_answers_says_why(tmp_path: Path) -> None:
    recorder, config = write_run(tmp_path / "silent"), PolicyConfig.model_validate({"evaluation": {"num_items": 4}})

    class Dead:
        def evaluate(self, tasks: Any, timeout_s: float) -> tuple[list[TrajectoryGroup], RolloutResult]:
            return [], RolloutResult(lost={task.group_id: "Replica b is dead" for task in tasks})

    results, _ = HeldOutItems(config, {"": 9}, {}, Dead()).evaluate(3)  # type: ignore[arg-type]
    recorder.log_evaluation(3, results)
    (line,) = Library([tmp_path]).lines()
    assert [one["text"][:9] for one in line["findings"]] == ["4 answers"] and "b is dead" in line["findings"][0]["text"]


def test_a_run_at_a_url_is_read_as_one_here(place: Path) -> None:
    files = fsspec.filesystem("memory")
    for path in (place / "counts").rglob("*"):
        if path.is_file():
            files.pipe_file(f"/bucket/counts/{path.relative_to(place / 'counts')}", path.read_bytes())
    here, there = Library([place / "counts"]), Library(["memory://bucket/counts"])
    (line,) = there.answer("runs")["runs"]
    assert line["id"] == "bucket~counts" and line["status"] == "done"
    assert there.answer("runs/bucket~counts/episodes") == here.answer("runs/counts/episodes")
    before = there.answer("stamps")
    assert there.answer("runs/bucket~counts/episodes/train-2-0") == here.answer("runs/counts/episodes/train-2-0")
    files.pipe_file("/bucket/counts/progress.csv", b"iteration,reward/mean\n1,0.75\n")
    assert there.answer("stamps") != before and there.answer("runs")["runs"][0]["reward"] == [0.75, 0.75]
    files.rm("/bucket", recursive=True)
