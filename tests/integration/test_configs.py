"""Every configuration that ships passes `--dry-run`; wrong ones end with one sentence and code 2, and harm nothing."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tables import table

from rl_vlm.cli.app import run as rl_vlm
from rl_vlm.config import load_config
from rl_vlm.config.recipes import recipe_names
from rl_vlm.runs import surroundings

TABLES = table("settings")

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "fixtures" / "geo3k"

SHAPES = ROOT / "tests/fixtures"
PUBLISHED = json.loads((SHAPES / "qwen3_vl.json").read_text()) | {
    "qwen/qwen3.5-4b": json.loads((SHAPES / "other_shapes.json").read_text())["Qwen3.5-4B"]["config"]
}
BILLIONS = {"2b": 2.13, "4b": 4.44, "8b": 8.77, "qwen/qwen3.5-4b": 4.54}


@pytest.fixture(scope="module")
def model_folders(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders whose config.json has the real shapes; tokenizer and weights, which a dry run does not load, are the tiny model's."""
    folders = {}
    tiny = json.loads((tiny_folder / "config.json").read_text())
    for size in BILLIONS:
        folder = tmp_path_factory.mktemp("qwen") / "model"
        shutil.copytree(tiny_folder, folder)
        config = PUBLISHED[size] | _token_ids(tiny)
        config["text_config"] = config["text_config"] | _token_ids(tiny["text_config"])
        (folder / "config.json").write_text(json.dumps(config))
        folders[size] = folder
    return folders


def _token_ids(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name.endswith("_token_id")}


@pytest.fixture
def node_of_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a dry run asks of the machine, as a node answers that has eight H100 of 80 GB and 96 cores."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=85_029_158_912))
    monkeypatch.setattr(surroundings, "available_cores", lambda: 96.0)


GPU_RECIPES = [
    name
    for name in recipe_names()
    if not name.startswith("sft") and not name.endswith("_tiny") and load_config(name).needed_gpus
]


@pytest.mark.usefixtures("node_of_eight")
@pytest.mark.parametrize("name", GPU_RECIPES)
def test_every_gpu_recipe_passes_a_dry_run_on_a_node_of_eight_gpus(
    name: str, model_folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = load_config(name)
    size = run.model.path.removeprefix("Qwen/Qwen3-VL-").removesuffix("-Instruct").lower()
    changes = [f"model.path={model_folders[size]}"]
    if getattr(run, "teacher", None) is not None:
        changes.append(f"teacher.path={model_folders['8b']}")
    if run.env.id == "QA-v0":
        assert rl_vlm(["sft-example", str(tmp_path / "data")]) == 0
        changes.append(f"env.data={tmp_path}/data/train.jsonl")
    elif run.env.id == "Geo3k-v0":
        changes.append(f"env.data={FIXTURES}")
    elif run.env.id.startswith("softgym/"):  # its simulator comes from a package of the user's
        changes.append("env.id=ContinuousCartPole-v0")
    assert rl_vlm(["train", name, "--dry-run", *changes, "--run-dir", str(tmp_path / "run")]) == 0
    found = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert found["gpus"] == f"{run.needed_gpus:g} needed, 8 here"
    assert float(found["parameters"].split()[0]) == pytest.approx(BILLIONS[size], rel=0.02)
    left = {key: float(value.split()[0]) for key, value in found.items() if re.match(r"GPU .*, left$", key)}
    last = [re.findall(r"\d+", key)[-1] for key in left]  # of "GPU 0 to 7"
    assert int(last[-1]) + 1 == math.ceil(run.needed_gpus) and min(left.values()) > 0


def test_recipes_for_data_of_ones_own_pass_a_dry_run(
    model_folders: dict[str, Path], tiny_folder: Path, tmp_path: Path
) -> None:
    data = tmp_path / "my-data"
    assert rl_vlm(["sft-example", str(data)]) == 0
    for name, model, more, code in (
        ("qa_tiny", tiny_folder, f"env.data={data}", 0),
        ("qa_qwen3vl_2b", model_folders["2b"], f"env.data={data}/train.jsonl", 2),  # without a GPU
    ):
        assert rl_vlm(["train", str(ROOT / f"configs/{name}.yaml"), "--dry-run", f"model.path={model}", more]) == code


@pytest.mark.parametrize("size", ["2b", "4b", "8b"])
def test_the_full_fine_tune_of_large_recipes_passes_a_dry_run(
    size: str, model_folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    config = ROOT / f"configs/geo3k_qwen3vl_{size}.yaml"
    changes = (f"model.path={model_folders[size]}", f"env.data={FIXTURES}", "model.train=full", "learner.lr=1e-6")
    assert rl_vlm(["train", str(config), "--dry-run", *changes]) == 2
    learner = float(capsys.readouterr().out.split("learner: ")[1].split()[0])
    # Per parameter: 2 bytes to compute with, and 4 each of master, gradient and two moments.
    assert learner * 2**30 > 18e9 * BILLIONS[size]


def test_small_recipes_pass_a_dry_run(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where there is no run yet
    model = f"model.path={tiny_folder}"
    assert rl_vlm(["train", str(ROOT / "configs/quickstart.yaml"), "--dry-run", model]) == 0
    for name in (
        "gridwalk_tiny", "gridwalk_levels_tiny", "mixture_tiny", "geospot_tiny", "geospot_curriculum_tiny", "nlvr2_tiny", "caption_tiny",
        "caption_judge_tiny", "geo3k_offline_tiny", "zoom_tiny", "minigrid_tiny", "full_tiny", "agent_tiny",
    ):  # fmt: skip
        assert rl_vlm(["train", str(ROOT / f"configs/{name}.yaml"), "--dry-run", model]) == 0
    assert rl_vlm(["train", str(ROOT / "configs/geo3k_tiny.yaml"), "--dry-run", model, f"env.data={FIXTURES}"]) == 0
    assert rl_vlm(["sft", str(ROOT / "configs/sft_tiny.yaml"), "--dry-run", model]) == 0


def _broken_data(folder: Path, kind: str) -> Path:
    folder.mkdir()
    for split in ("train", "test"):
        shutil.copy(FIXTURES / f"{split}.parquet", folder)
    path = folder / "train.parquet"
    if kind == "corrupt file":
        data = bytearray(path.read_bytes())
        data[200:4000] = np.random.default_rng(0).bytes(3800)
        path.write_bytes(bytes(data))
    elif kind == "truncated file":
        path.write_bytes(path.read_bytes()[:5000])
    else:
        rows = pq.read_table(path).to_pylist()
        rows[0]["images"] = [{"bytes": b"not a picture", "path": None}]
        pq.write_table(pa.Table.from_pylist(rows), path)
    return folder


@pytest.mark.parametrize("kind", ["corrupt file", "truncated file", "unreadable image"])
def test_bad_data_is_refused_before_anything_starts(
    kind: str, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = _broken_data(tmp_path / "data", kind)
    arguments = [f"model.path={tiny_folder}", f"env.data={data}", "--run-dir", str(tmp_path / "run")]
    assert rl_vlm(["train", str(ROOT / "configs/geo3k_tiny.yaml"), *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert "train.parquet" in error and "Traceback" not in error and len(error.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("override", "sentence"), TABLES["bad_input_gets_one_sentence_and_code_two"])
def test_bad_input_gets_one_sentence_and_code_two(
    override: str, sentence: str, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = [] if override.startswith("model.path") else [f"model.path={tiny_folder}"]
    run_dir = tmp_path / "run"
    arguments = [str(ROOT / "configs/quickstart.yaml"), *model, override, "--run-dir", str(run_dir)]
    assert rl_vlm(["train", *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert sentence in error and "Traceback" not in error and len(error.splitlines()) == 1, error
    assert not run_dir.exists()


def test_overwrite_with_a_bad_config_keeps_the_old_run(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("name: old\n")
    (tmp_path / "result.json").write_text("{}")
    arguments = [f"model.path={tiny_folder}", "serving.gpus_per_replica=1", "--run-dir", str(tmp_path), "--overwrite"]
    assert rl_vlm(["train", str(ROOT / "configs/quickstart.yaml"), *arguments]) == 2
    assert (tmp_path / "result.json").read_text() == "{}"
