"""A dry run: quick, and right about the model's size."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tables import table

from rl_vlm.cli import run as rl_vlm
from rl_vlm.config import load_config, load_sft_config
from rl_vlm.models.loading import load_model
from rl_vlm.runs.memory import count_parameters
from rl_vlm.runs.serve import plan
from rl_vlm.runs.train import inspect_run
from rl_vlm.types import UserInputError

ROOT = Path(__file__).resolve().parents[2]


def test_a_dry_run_needs_neither_torch_nor_ray(tiny_folder: Path) -> None:
    arguments = ["train", str(ROOT / "configs/quickstart.yaml"), f"model.path={tiny_folder}", "--dry-run"]
    code = f"import sys; from rl_vlm import cli; assert cli.run({arguments}) == 0; print({{'torch', 'ray'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_parameters_are_counted_without_loading_them(tiny_folder: Path, tmp_path: Path) -> None:
    expected = sum(parameter.numel() for parameter in load_model(tiny_folder).parameters())
    assert count_parameters(tiny_folder) == expected
    # Two files, as large models have them.
    sharded = shutil.copytree(tiny_folder, tmp_path / "sharded")
    tensors = load_file(sharded / "model.safetensors")
    (sharded / "model.safetensors").unlink()
    for number, names in enumerate((list(tensors)[::2], list(tensors)[1::2])):
        save_file({name: tensors[name] for name in names}, sharded / f"model-{number}.safetensors")
    assert count_parameters(sharded) == expected
    for file in sharded.glob("*.safetensors"):
        file.unlink()
    assert count_parameters(sharded) == expected


def test_damaged_weights_are_bad_input(tiny_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserInputError, match=r"model\.safetensors"):
        count_parameters(folder)


def test_training_in_float16_is_refused_and_serving_in_it_is_not(tiny_folder: Path) -> None:
    """The gradient of one of a million tokens would be 0 in every weight."""
    overrides = [f"model.path={tiny_folder}", "model.dtype=float16"]
    with pytest.raises(UserInputError, match="model.dtype"):
        inspect_run(load_config(ROOT / "configs/quickstart.yaml", overrides))
    with pytest.raises(UserInputError, match="model.dtype"):
        load_sft_config(None, overrides)
    assert plan(str(ROOT / "configs/quickstart.yaml"), overrides).config.model.dtype == "float16"


@pytest.mark.parametrize(("env", "weights", "sentence"), table("refused_settings")["preflight"])
def test_a_misspelt_reward_part_is_refused_before_a_model_loads(
    env: str, weights: str, sentence: str | None, tiny_folder: Path, tmp_path: Path
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(f"model: {{path: {tiny_folder}}}\nenv: {{{env}, reward: {{weights: {weights}}}}}\n")
    if sentence is None:
        inspect_run(load_config(config, []))
    else:
        with pytest.raises(UserInputError, match=sentence):
            inspect_run(load_config(config, []))


LOOSE = """
from rl_vlm.zoo.shapes.environment import ShapesEnv

class Loose(ShapesEnv):
    def __init__(self, since=None, task="count"):
        super().__init__(task)
"""


@pytest.mark.parametrize("value", ["!!timestamp 2026-01-01", ".nan", "[1, .inf]", "!!set {a, b}", "!!binary AAEC"])
def test_arguments_that_no_process_can_be_told_are_refused_before_it_starts(
    value: str, tiny_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "loose.py").write_text(LOOSE)
    config = tmp_path / "run.yaml"

    def inspect(isolation: str, kwargs: str, variant: str) -> None:
        config.write_text(
            f"model: {{path: {tiny_folder}}}\nenv: {{id: '{tmp_path}/loose.py', isolation: {isolation}, kwargs: {kwargs}}}\n"
            f"evaluation: {{variants: {{old: {variant}}}}}\n"
        )
        inspect_run(load_config(config, []))

    given = f"{{since: {value}}}"
    with pytest.raises(UserInputError, match=r"env\.kwargs\.since"):
        inspect("process", given, "{}")
    with pytest.raises(UserInputError, match=r"evaluation\.variants\.old"):
        inspect("process", "{}", given)
    inspect("thread", given, given)
    inspect("process", "{since: '2026-01-01'}", "{since: [1, {a: null}]}")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["--run-dir={folder}"], "--overwrite"),
        (["--run-dir={folder}", "--resume"], "holds no run"),
        (["--run-dir=nowhere://bucket/run"], "nowhere"),
        (["model.path={folder}"], "safetensors"),
        (["serving.gpus_per_replica=1"], "GPU"),
        (["resources.num_cpus=1", "rollout.num_env_runners=8"], "CPUs"),
        (["serving.engine=vllm"], "vllm"),
    ],
    ids=str,
)
def test_a_dry_run_refuses_what_the_start_would_refuse(
    changes: list[str],
    words: str,
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And leaves everything as it is."""
    own = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "vllm" else own(name, *more))
    for name in ("RAY_ADDRESS", "RAY_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "config.json").write_text("{}")
    arguments = [
        "train",
        str(ROOT / "configs/quickstart.yaml"),
        f"model.path={tiny_folder}",
        f"--run-dir={tmp_path}/new",
    ]
    arguments += [change.format(folder=tmp_path) for change in changes]
    assert rl_vlm([*arguments, "--dry-run"]) == 2
    assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
