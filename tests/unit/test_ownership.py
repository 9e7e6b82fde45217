"""`--overwrite` and `--resume` of a run folder: what is not a run is refused, and what is not ours stays."""

import os
from pathlib import Path

import pytest

from rl_vlm.models.weights import AdapterPayload
from rl_vlm.ownership import RUN_MARKER, files_in, run_files
from rl_vlm.runs.run_folder import prepare_run_dir
from rl_vlm.types import UserInputError

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


def test_a_new_run_marks_its_folder_and_an_existing_one_needs_a_word(tmp_path):
    prepare_run_dir(tmp_path / "a" / "run", resume=False, overwrite=False)
    assert files_in(tmp_path / "a" / "run") == [RUN_MARKER]
    with pytest.raises(UserInputError, match="--overwrite"):
        prepare_run_dir(tmp_path / "a" / "run", resume=False, overwrite=False)
    prepare_run_dir(tmp_path / "a" / "run", resume=True, overwrite=False)


def test_what_is_not_a_run_is_not_resumed_either(tmp_path):
    fill(tmp_path, ("config.yaml", "thesis.tex"))
    with pytest.raises(UserInputError, match="no run"):
        prepare_run_dir(tmp_path, resume=True, overwrite=False)
    (tmp_path / "checkpoints").mkdir()  # of a version that did not mark its runs
    prepare_run_dir(tmp_path, resume=True, overwrite=False)
    assert (tmp_path / "config.yaml").read_text() == "config.yaml"


def test_a_new_adapter_leaves_other_files_of_its_folder(tmp_path):
    payload = AdapterPayload(1, b"weights", "{}", "")
    folder = payload.write(tmp_path / "adapter")
    (folder / "README.md").write_text("a model card")
    payload.write(folder)
    assert sorted(path.name for path in tmp_path.glob("**/*")) == [
        "README.md", "adapter", "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip
