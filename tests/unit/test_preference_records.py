"""Episodes and CSV files of the preference loop."""

from __future__ import annotations

import csv
import errno
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from control_support import steps
from label_support import pair
from PIL import Image, ImageSequence
from preference_loop import run_config
from safetensors.numpy import load_file, save_file

from rl_vlm.algorithms.checkpoint import (
    list_checkpoints,
    read_state,
    save_checkpoint,
    write_state,
)
from rl_vlm.files import link_tree
from rl_vlm.labelling.labels import Label
from rl_vlm.labelling.query_log import StepCsv
from rl_vlm.labelling.store import LabelStore
from rl_vlm.preference.collector import EpisodeTracker, StepBatch
from rl_vlm.preference.evaluation import EpisodeResult, evaluation_metrics
from rl_vlm.runs.preference import EVAL_COLUMNS, PreferenceRun, evaluation_row


def test_returns_are_added_per_episode_of_many_environments() -> None:
    tracker = EpisodeTracker()
    first = StepBatch.concatenate([steps(1, 2, episode=0), steps(10, 2, episode=1)])
    assert tracker.add(first, np.full(4, 0.5)) == []
    state = json.loads(json.dumps(tracker.state()))
    tracker = EpisodeTracker()
    tracker.load(state)
    second = StepBatch.concatenate(
        [steps(3, 1, episode=0, done="truncated"), steps(12, 1, episode=1, done="terminated")]
    )
    one, other = tracker.add(second, np.full(2, 2.0))
    assert (one.true_return, one.learned_return, one.success, one.length) == (-6.0, 3.0, 1.0, 3)
    assert (other.true_return, other.learned_return, other.length) == (-33.0, 3.0, 3)
    assert (one.number, other.number) == (1, 2)  # although both ended in the same round
    assert tracker.finished == 2 and tracker.mean_true_return == pytest.approx(-19.5)


def test_only_the_last_ten_returns_count_for_the_margin() -> None:
    tracker = EpisodeTracker()
    assert tracker.mean_true_return == 0.0
    for number in range(15):
        tracker.add(steps(number, 1, episode=number, done="truncated"), np.zeros(1))
    assert tracker.mean_true_return == pytest.approx(-np.mean(range(5, 15)))


def test_a_csv_goes_on_after_the_checkpoint_and_loses_what_came_later(tmp_path: Path) -> None:
    path = tmp_path / "eval.csv"
    log = StepCsv(path, ("episode", "step", "success_rate"))
    for step in (0, 100, 200):
        log.add([1, step, step / 2])
    with open(path, "a") as file:
        file.write("7,30")  # a line that a crash cut short
    log.rewind(100)
    log.add([1, 150, 33.0])
    rows = list(csv.DictReader(path.open()))
    assert [(row["step"], row["success_rate"]) for row in rows] == [("0", "0.0"), ("100", "50.0"), ("150", "33.0")]
    log.rewind(-1)
    assert not path.exists()


def test_success_rates_are_percent_of_episodes_with_a_success() -> None:
    results = [EpisodeResult(k, -10.0 * k, 5, float(k > 0), float(k > 2)) for k in range(4)]
    cells = evaluation_row(evaluation_metrics(results), step=500, episode=9)
    row = dict(zip(EVAL_COLUMNS, cells, strict=True))
    assert (row["success_rate"], row["success_last"], row["true_episode_reward"]) == (75.0, 25.0, -15.0)
    assert row["success_rate_low"] == pytest.approx(30.06, abs=0.01)  # Wilson's interval of 3 in 4
    assert row["success_rate_high"] == pytest.approx(95.44, abs=0.01)


def save(folder: Path, step: int, keep: int = 3, history: Path | None = None) -> Path:
    def write(draft: Path) -> None:
        save_file({"actor": np.full(step, 1.0)}, draft / "agent.safetensors")
        write_state(draft, {"step": step})

    return save_checkpoint(folder, f"step-{step:08d}", write, keep, history)


def store_of(folder: Path, *values: int) -> LabelStore:
    """A label store with a session for each value, one label of it each."""
    store = LabelStore(folder)
    for value in values:
        store.append([pair(1, 2 + value)], [Label(value)], step=0, time=0.0)  # type: ignore[arg-type]
    return store


def values_of(store: LabelStore) -> list[int]:
    return [labels[0].value for _, labels in store.sessions()]


@pytest.mark.parametrize("links", [True, False])
def test_the_labels_of_another_trial_replace_a_trials_own(
    tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not links:
        monkeypatch.setattr("os.link", refuse)
    store = store_of(tmp_path / "mine", 0, 0, 0)
    link_tree(store.folder, tmp_path / "my-checkpoint")
    saved = store_of(tmp_path / "theirs", 0, 1)
    store.restore(saved.folder)
    store.rewind(2)
    assert values_of(store) == [0, 1]
    assert len(list((store.folder / "superseded").iterdir())) >= 2
    assert values_of(LabelStore(tmp_path / "my-checkpoint")) == [0, 0, 0]  # which had links to the files
    store.restore(tmp_path / "my-checkpoint")
    assert values_of(store) == [0, 0, 0]
    store.restore(tmp_path / "nothing")
    assert values_of(store) == [0, 0, 0] and values_of(saved) == [0, 1]


def refuse(source: str, target: str, **_: object) -> None:
    raise OSError(errno.EPERM, "no links here")


def test_a_full_disk_at_an_evaluation_costs_its_row_and_not_the_run(tmp_path: Path) -> None:
    def full(row: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    results = [EpisodeResult(0, -1.0, 5, 1.0, 1.0)]
    algorithm = SimpleNamespace(evaluate_policy=lambda: results, env_steps=50, tracker=SimpleNamespace(finished=1))
    run = PreferenceRun.__new__(PreferenceRun)
    shown: list[str] = []
    logged: list[int] = []
    run.algorithm, run.eval_csv, run.write_errors = algorithm, SimpleNamespace(add=full), 0  # type: ignore[assignment]
    run.display = SimpleNamespace(message=shown.append, evaluation=lambda *_: None)  # type: ignore[assignment]
    run.recorder = SimpleNamespace(log_evaluation=lambda step, _: logged.append(step))  # type: ignore[assignment]
    run.artifacts, run.folder, run.callbacks = None, tmp_path, []
    run._evaluate()
    assert shown == ["Could not write eval.csv (No space left on device); going on without it."]
    assert run.write_errors == 1 and logged == [50]


def test_a_film_shows_what_was_drawn(tmp_path: Path) -> None:
    frames = np.zeros((6, 33, 47, 3), np.uint8)
    for number, frame in enumerate(frames):
        frame[:, : 7 * number + 5] = (200, 60, 30)
    run = PreferenceRun.__new__(PreferenceRun)
    run.algorithm, run.artifacts, run.folder = SimpleNamespace(env_steps=50), None, tmp_path
    run._save_videos([EpisodeResult(0, -1.25, 6, 1.0, 1.0, frames), EpisodeResult(1, -2.0, 6, 1.0, 1.0)])
    (path,) = (tmp_path / "videos").iterdir()
    assert path.name == "step0000050_episode00_-1.25.gif"
    read = [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(Image.open(path))]
    reds = [(frame[..., 0] > 120).mean() for frame in read]
    assert reds == pytest.approx([(7 * number + 5) / 47 for number in range(6)], abs=0.05)


def test_scratch_keeps_all_checkpoints_and_the_run_folder_the_latest(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path / "run", step, keep=5, history=tmp_path / "scratch")
    assert [read_state(path)["step"] for path in list_checkpoints(tmp_path / "scratch")] == [10, 20, 30]
    (only,) = list_checkpoints(tmp_path / "run")
    assert only.name == "step-00000030" and load_file(only / "agent.safetensors")["actor"].shape == (30,)


def test_a_writer_that_was_killed_leaves_nothing_in_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config()
    left = tmp_path / "scratch" / config.name / "checkpoints" / ".writing-abc"
    left.mkdir(parents=True)
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("ARTIFACT_ROOT", str(tmp_path / "scratch"))
    run = PreferenceRun(config, tmp_path / "run", resume=False)
    assert not left.exists() and run.artifacts == tmp_path / "scratch" / config.name
