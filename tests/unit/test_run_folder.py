"""A run folder belongs to one process at a time, and a resume that is refused leaves it as it was."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from rl_vlm.config import PolicyConfig
from rl_vlm.ownership import RUN_MARKER, files_in, mark_run, run_files
from rl_vlm.runs import remote_folder, run_folder
from rl_vlm.runs.lifecycle import BaseRun
from rl_vlm.runs.remote_folder import RemoteFolder, RemoteStorageError, remote_run_folder
from rl_vlm.runs.run_folder import opened_run_folder, prepare_run_dir
from rl_vlm.types import UserInputError


@pytest.mark.parametrize("how", [{"resume": True, "overwrite": False}, {"resume": False, "overwrite": True}])
def test_a_run_that_is_under_way_is_not_opened_again(
    how: dict[str, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "_PATIENCE_S", 0.3)
    with opened_run_folder(tmp_path / "run", resume=False, overwrite=False) as folder:
        (folder / "progress.csv").write_text("1\n")
        with pytest.raises(UserInputError, match="Another process is writing to the run folder"):
            opened_run_folder(folder, **how).__enter__()
        assert (folder / "progress.csv").exists()
    with opened_run_folder(folder, **how):
        assert (folder / "progress.csv").exists() is how["resume"]


class Refused(BaseRun):
    """A run whose start fails, or is interrupted."""

    error: BaseException = UserInputError("resume with the configuration that the run began with.")

    def __init__(self, config: PolicyConfig, folder: Path, resume: bool) -> None:
        super().__init__(config, folder, resume, total=1)

    def _train(self) -> None:
        raise self.error

    def _outcome(self) -> dict[str, Any]:
        return {}

    def _position(self) -> int:
        return 0

    def _write_checkpoint(self, folder: Path) -> None:
        raise AssertionError("nothing is saved")


@pytest.mark.parametrize(("resume", "kept"), [(True, True), (False, False)])
def test_a_refused_resume_leaves_the_configuration(resume: bool, kept: bool, tmp_path: Path) -> None:
    for name in ("config.yaml", "result.json"):
        (tmp_path / name).write_text("as it was")
    with pytest.raises(UserInputError):
        Refused(PolicyConfig(), tmp_path, resume).execute()
    assert {(tmp_path / name).read_text() == "as it was" for name in ("config.yaml", "result.json")} == {kept}


@pytest.mark.parametrize(
    ("rewards", "before", "after"),
    [
        ([], None, None),
        ([0.5], None, 0.5),
        ([0.1, 0.5, 0.9], 0.1, 0.9),
        ([0.0, 0.2, 0.4, 0.6, 0.8], 0.1, 0.7),
        ([0.0] * 5 + [1.0] * 6, 0.0, 1.0),
    ],
)
def test_rewards_before_and_after_are_of_different_rows(
    rewards: list[float], before: float | None, after: float | None, tmp_path: Path
) -> None:
    run = Refused(PolicyConfig(), tmp_path, False)
    for iteration, reward in enumerate(rewards, 1):
        run.recorder.log_iteration(iteration, {"reward/mean": reward})
    result = run._result("done")
    approximate = [value if value is None else pytest.approx(value) for value in (before, after)]
    assert [result["reward_before"], result["reward_after"]] == approximate


# --- `--overwrite` and `--resume` of a run folder: what is not a run is refused, and what is not ours stays


HASH = "0123456789abcdef" * 4
OURS = (
    RUN_MARKER, ".progress.csv-01ab23cd.tmp", "adapter/adapter_config.json", "adapter/adapter_model.safetensors",
    "checkpoints/.replaced-iteration-000024/weights/model.safetensors", "checkpoints/.writing-a_1b/state.json",
    "checkpoints/iteration-000025/weights/full_weights.json", "weights/full_weights.json", "weights/model.safetensors",
    "weights-ema/model.safetensors", "checkpoints/iteration-000025/adapter/adapter_model.safetensors",
    "checkpoints/iteration-000025/optimizer.safetensors", "checkpoints/step-00001000/agent.safetensors",
    f"checkpoints/step-00001000/labels/images/{HASH}.png", "config.yaml", "curve.png", "error.log", "eval.csv", "eval.jsonl",
    "events.out.tfevents.1731.2.host.77.ab", f"labels/images/{HASH}.png", "labels/session-000001.parquet",
    "labels/superseded/session-000002-1.parquet", "progress.csv", "result.json",
    ".writing-adapter-a_1b/adapter_model.safetensors", ".replaced-adapter/adapter_config.json", "startup.log", "train.csv", f"trajectories/images/{HASH}.png",
    "trajectories/iteration-000001.parquet", "videos/step0001000_episode00_-12.5.gif", "vlm_query_log.csv", "wandb_id.txt",
)  # fmt: skip
THEIRS = (
    ".git/HEAD", "adapter/README.md", "checkpoints/iteration-000025/notes.txt", "notes/config.yaml", "photo.png",
    "thesis.tex", "trajectories/images/holiday.png", "weights/README.md",
)  # fmt: skip


def fill(folder: Path, names) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def overwrite(folder: Path) -> None:
    prepare_run_dir(folder, resume=False, overwrite=True)


def test_overwriting_a_run_deletes_its_files_and_no_others(tmp_path):
    fill(tmp_path, (*OURS, *THEIRS))
    (tmp_path / "empty").mkdir()
    assert run_files(tmp_path) == sorted(OURS)
    overwrite(tmp_path)
    assert files_in(tmp_path) == sorted((RUN_MARKER, *THEIRS))
    assert (tmp_path / "empty").is_dir() and not (tmp_path / "labels").exists()
    assert all((tmp_path / name).read_text() == name for name in THEIRS)


@pytest.mark.parametrize("names", [("config.yaml", "thesis.tex", ".git/HEAD"), ("config.yaml", "result.json")])
def test_a_folder_without_our_marker_is_not_overwritten(tmp_path, names):
    fill(tmp_path, names)
    with pytest.raises(UserInputError, match="--run-dir"):
        overwrite(tmp_path)
    assert files_in(tmp_path) == sorted(names)


def test_links_are_not_followed(tmp_path):
    elsewhere = fill(tmp_path / "elsewhere", ("iteration-000025/state.json", "plan.txt"))
    run = fill(tmp_path / "run", (RUN_MARKER, "config.yaml"))
    os.symlink(elsewhere, run / "documents")
    overwrite(run)
    assert files_in(run) == [RUN_MARKER, "documents"]
    os.symlink(elsewhere, run / "checkpoints")
    with pytest.raises(UserInputError, match="link"):
        overwrite(run)
    assert files_in(elsewhere) == ["iteration-000025/state.json", "plan.txt"]


def test_an_existing_folder_needs_a_word_and_a_run(tmp_path):
    prepare_run_dir(tmp_path / "a" / "run", resume=False, overwrite=False)
    assert files_in(tmp_path / "a" / "run") == [RUN_MARKER]
    with pytest.raises(UserInputError, match="--overwrite"):
        prepare_run_dir(tmp_path / "a" / "run", resume=False, overwrite=False)
    prepare_run_dir(tmp_path / "a" / "run", resume=True, overwrite=False)
    fill(tmp_path / "b", ("config.yaml", "thesis.tex"))
    with pytest.raises(UserInputError, match="no run"):
        prepare_run_dir(tmp_path / "b", resume=True, overwrite=False)


# --- A run folder on remote storage: copied while the run goes on, whole after each copy, fetched by --resume


URL = "memory://bucket/run"


@pytest.fixture(autouse=True)
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("RL_VLM_CACHE", str(tmp_path / "cache"))
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    yield memory
    memory.store.clear()


def contents(storage: Any) -> dict[str, bytes]:
    return {name.removeprefix("/bucket/run/"): storage.cat_file(name) for name in storage.find("/bucket/run")}


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def new_run(folder: Path, *names: str) -> Path:
    """A run folder with files of these names."""
    folder.mkdir()
    mark_run(folder)
    for name in names:
        write(folder, name, "1\n")
    return folder


def copies(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "cache" / "runs").glob("run-*"))


def test_a_run_is_copied_and_resumed_elsewhere(storage: Any, tmp_path: Path) -> None:
    with opened_run_folder(URL, resume=False, overwrite=False) as folder:
        write(folder, "progress.csv", "1\n")
        write(folder, "checkpoints/iteration-000001/state.json", "{}")
        write(folder, "checkpoints/.writing-abc/state.json", "half")
        write(folder, "notes.txt", "not a run's")
    assert copies(tmp_path) == []
    assert set(contents(storage)) == {
        "index.json", ".rl_vlm_run", "progress.csv", "checkpoints/iteration-000001/state.json",
    }  # fmt: skip
    with opened_run_folder(URL, resume=True, overwrite=False) as folder:
        assert (folder / "progress.csv").read_text() == "1\n"
        write(folder, "progress.csv", "1\n2\n")
        write(folder, "checkpoints/iteration-000002/state.json", "{}")
        shutil.rmtree(folder / "checkpoints/iteration-000001")
    found = contents(storage)
    assert found["progress.csv"] == b"1\n2\n" and "checkpoints/iteration-000001/state.json" not in found
    assert set(json.loads(found.pop("index.json"))["files"]) == set(found)


def test_an_existing_run_is_refused_or_emptied(storage: Any) -> None:
    with opened_run_folder(URL, resume=False, overwrite=False) as folder:
        write(folder, "progress.csv", "old")
    storage.pipe_file("/bucket/run/thesis.tex", b"mine")
    with pytest.raises(UserInputError, match="--run-dir"), opened_run_folder(URL, resume=False, overwrite=False):
        pass
    assert contents(storage)["progress.csv"] == b"old"
    with opened_run_folder(URL, resume=False, overwrite=True):
        pass
    assert set(contents(storage)) == {"index.json", ".rl_vlm_run", "thesis.tex"}


@pytest.mark.parametrize("overwrite", [False, True])
def test_files_that_are_no_run_are_left_alone(storage: Any, overwrite: bool) -> None:
    storage.pipe_file("/bucket/run/thesis.tex", b"mine")
    with pytest.raises(UserInputError, match="deleted"):
        opened_run_folder(URL, resume=False, overwrite=overwrite).__enter__()
    assert contents(storage) == {"thesis.tex": b"mine"}


def test_where_nothing_is_yet_a_resumed_run_begins(storage: Any) -> None:
    with opened_run_folder(URL, resume=True, overwrite=False) as folder:
        assert [path.name for path in folder.iterdir()] == [".rl_vlm_run"]
    assert set(contents(storage)) == {"index.json", ".rl_vlm_run"}


@pytest.mark.parametrize(
    "index", [b"no json", b"[]", b'{"files": ["../../etc/passwd", ".rl_vlm_run"]}', b'{"files": ["/etc/passwd"]}', b'{"files": []}']
)  # fmt: skip
def test_an_index_that_is_not_ours_is_refused(storage: Any, index: bytes) -> None:
    storage.pipe_file("/bucket/run/index.json", index)
    for overwrite in (False, True):
        with pytest.raises(UserInputError, match="is not a run's"):
            opened_run_folder(URL, resume=not overwrite, overwrite=overwrite).__enter__()


def test_what_the_index_names_is_whole_when_a_checkpoint_goes_during_a_copy(
    storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = new_run(tmp_path / "run", "checkpoints/iteration-000001/a.json", "checkpoints/iteration-000001/b.json")
    remote = RemoteFolder(URL, folder)
    upload, calls = remote._upload, []

    def replaced_meanwhile(name: str) -> None:
        upload(name)
        if name.endswith("a.json") and not calls:
            calls.append(name)
            for part in ("a", "b"):
                write(folder, f"checkpoints/iteration-000002/{part}.json", "2")
            shutil.rmtree(folder / "checkpoints/iteration-000001")

    monkeypatch.setattr(remote, "_upload", replaced_meanwhile)
    remote.push()
    assert calls and sorted(json.loads(contents(storage)["index.json"])["files"]) == [
        ".rl_vlm_run", "checkpoints/iteration-000002/a.json", "checkpoints/iteration-000002/b.json",
    ]  # fmt: skip


def test_only_what_changed_is_uploaded(storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = new_run(tmp_path / "run", "progress.csv")
    remote, sent = RemoteFolder(URL, folder), []
    put = type(storage).put_file
    monkeypatch.setattr(
        type(storage), "put_file", lambda self, *paths: (sent.append(Path(paths[0]).name), put(self, *paths))
    )
    remote.push()
    remote.push()
    write(folder, "progress.csv", "1\n2\n")
    remote.push()
    assert sorted(sent) == [".rl_vlm_run", "progress.csv", "progress.csv"]


def test_a_storage_that_fails_for_a_while_costs_nothing(storage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = iter([OSError("503 slow down")] * 2)

    def put(self: Any, source: str, target: str, **more: Any) -> None:
        if (failure := next(failures, None)) is not None:
            raise failure
        real(self, source, target, **more)

    real = type(storage).put_file
    monkeypatch.setattr(type(storage), "put_file", put)
    with opened_run_folder(URL, resume=False, overwrite=False) as folder:
        write(folder, "progress.csv", "1\n")
    assert contents(storage)["progress.csv"] == b"1\n"


def test_a_storage_that_stays_away_keeps_the_folder_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def push(self: RemoteFolder) -> None:
        raise RemoteStorageError("memory://bucket/run could not be written: 403.")

    monkeypatch.setattr(remote_folder, "_LAST_COPY_S", 0.2)
    monkeypatch.setattr(RemoteFolder, "push", push)
    with pytest.raises(RemoteStorageError), remote_run_folder(URL, resume=False, overwrite=False) as folder:
        write(folder, "progress.csv", "1\n")
    assert (folder / "progress.csv").read_text() == "1\n" and copies(tmp_path) == [folder]


def test_a_bucket_that_is_not_there_is_an_error_at_the_start(
    storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients of object stores raise FileNotFoundError for it."""

    def missing(self: Any, path: str, *_: Any, **__: Any) -> None:
        raise FileNotFoundError("The specified bucket does not exist")

    monkeypatch.setattr(type(storage), "pipe_file", missing)
    with pytest.raises(RemoteStorageError):
        opened_run_folder(URL, resume=False, overwrite=False).__enter__()
    assert copies(tmp_path) == []


def test_a_folder_that_is_gone_deletes_nothing_there(storage: Any, tmp_path: Path) -> None:
    folder = new_run(tmp_path / "run", "progress.csv")
    remote = RemoteFolder(URL, folder)
    remote.push()
    before = contents(storage)
    shutil.rmtree(folder)
    with pytest.raises(RemoteStorageError):
        remote.push()
    assert contents(storage) == before


def test_a_first_copy_that_was_cut_short_does_not_keep_the_run_from_beginning(
    storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that is killed in its first minute leaves files without an index; its job is started again with --resume."""
    put, calls = type(storage).put_file, []

    def killed(self: Any, source: str, target: str, **settings: Any) -> None:
        calls.append(target)
        if len(calls) > 2:
            raise KeyboardInterrupt
        put(self, source, target, **settings)

    folder = new_run(tmp_path / "killed", "config.yaml", "progress.csv", "startup.log")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(storage), "put_file", killed)
        RemoteFolder(URL, folder).push()
    assert "index.json" not in contents(storage) and ".rl_vlm_run" in contents(storage)
    with pytest.raises(UserInputError, match="no run"):
        opened_run_folder(URL, resume=False, overwrite=False).__enter__()
    with opened_run_folder(URL, resume=True, overwrite=False) as again:
        assert [path.name for path in again.iterdir()] == [".rl_vlm_run"]
        write(again, "config.yaml", "new")
    assert contents(storage)["config.yaml"] == b"new" and "index.json" in contents(storage)
