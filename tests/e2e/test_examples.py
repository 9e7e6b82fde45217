"""Notebooks run from the first cell to the last, and what they train is better than what they began with."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from runs import QUICKSTART, ROOT, environment, rl_vlm

from rl_vlm.files import cache_place


def executed(name: str, folder: Path, timeout: int) -> nbformat.NotebookNode:
    """A notebook after a run in a copy of its place, in a kernel of its own that knows nothing of this process."""
    (folder / "notebooks").mkdir()
    (folder / "configs").symlink_to(ROOT / "configs")
    notebook = nbformat.read(ROOT / "notebooks" / name, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        notebook, timeout=timeout, kernel_name="python3", resources={"metadata": {"path": str(folder / "notebooks")}}
    )
    client.execute(env=environment(PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])))
    return notebook


def printed(notebook: nbformat.NotebookNode, pattern: str) -> tuple[float, ...]:
    """The numbers that the pattern finds in what the cells printed."""
    texts = [
        output.text for cell in notebook.cells for output in cell.get("outputs", []) if output.get("name") == "stdout"
    ]
    found = re.search(pattern, "".join(texts))
    assert found, f"{pattern} was not printed: {texts}"
    return tuple(map(float, found.groups()))


@pytest.mark.acceptance
@pytest.mark.timeout(1200)
def test_the_notebook_trains_an_adapter_that_plain_transformers_loads(tmp_path: Path) -> None:
    notebook = executed("train_lora.ipynb", tmp_path, timeout=900)
    before, after = printed(notebook, r"before: (\d\.\d+), after: (\d\.\d+)")
    assert before <= 0.45
    assert after >= before + 0.25
    assert printed(notebook, r"merged: (\d\.\d+)") == (after,)
    kinds = [kind for cell in notebook.cells for output in cell.get("outputs", []) for kind in output.get("data", {})]
    assert kinds.count("image/png") == 2  # a picture of the environment, and the curve


@pytest.mark.acceptance
@pytest.mark.timeout(1200)
def test_the_notebook_of_own_data_learns_to_count_its_dots(tmp_path: Path) -> None:
    notebook = executed("own_data.ipynb", tmp_path, timeout=900)
    before, after = printed(notebook, r"accuracy: (\d\.\d+) -> (\d\.\d+)")
    assert before <= 0.45 and after >= 0.8


@pytest.mark.acceptance
@pytest.mark.timeout(1200)
def test_the_notebook_of_preferences_balances_the_pole(tmp_path: Path) -> None:
    notebook = executed("preferences.ipynb", tmp_path, timeout=900)
    before, after = printed(notebook, r"episode: (-?\d+) -> (-?\d+)")
    assert before < -1000 and after > before + 500
    assert printed(notebook, r"agrees with (\d\.\d+)")[0] >= 0.7


# --- examples/one_process.py: the loop in one process trains as its page says


def outcome(*overrides: str, timeout_s: float) -> tuple[list[float], list[float]]:
    """Held-out accuracy before and after training, and the mean rewards that were printed."""
    command = [sys.executable, str(ROOT / "examples/one_process.py"), *overrides]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=timeout_s, check=True)
    accuracy = re.findall(r"held-out accuracy \w+ training: ([\d.]+)", done.stdout)
    rewards = re.findall(r"iteration \d+: mean reward ([\d.]+)", done.stdout)
    return [float(value) for value in accuracy], [float(value) for value in rewards]


@pytest.mark.timeout(300)
def test_the_example_samples_learns_and_publishes() -> None:
    few = ("algorithm.iterations=10", "rollout.prompts_per_iteration=4", "evaluation.num_items=16")
    accuracy, rewards = outcome(*few, timeout_s=280)
    assert len(accuracy) == 2 and len(rewards) == 1


@pytest.mark.acceptance
@pytest.mark.timeout(900)
def test_the_reward_of_the_example_rises() -> None:
    accuracy, rewards = outcome("algorithm.iterations=100", timeout_s=880)
    assert accuracy[0] <= 0.35 and accuracy[1] >= 0.9
    assert rewards[-1] >= rewards[0] + 0.3


# --- A stranger's folder: their own environment, estimator and loss train the tiny model, and no file of the package changes


MINE = ROOT / "tests" / "fixtures" / "plugins" / "mine.py"
CHOICES = (
    "env.id=Dots-v0", "env.kwargs={}", "algorithm.estimator=centred_ranks", "algorithm.loss=smooth", "name=mine",
)  # fmt: skip
SHORT = ("evaluation.every=0", "evaluation.num_items=64", "serving.num_replicas=1", "rollout.num_env_runners=1")


@pytest.mark.parametrize("iterations", [2, pytest.param(40, marks=pytest.mark.acceptance)])
def test_what_a_plugin_registers_learns_in_every_process(iterations: int, tmp_path: Path) -> None:
    plugin = shutil.copy(MINE, tmp_path / "mine.py")
    arguments = ("train", QUICKSTART, f"plugins=[{plugin}]", *CHOICES, *SHORT, f"algorithm.iterations={iterations}")
    arguments = (*arguments, "--run-dir", tmp_path / "run")
    done = rl_vlm(*arguments, timeout=420, RL_VLM_CACHE=str(cache_place()), HOME="/proc/1")  # where nobody can write
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    # Left or right: one half by chance once the form of an answer is right.
    assert result["reward_before"] <= 0.6 and result["iterations"] == iterations
    if iterations == 40:
        assert result["reward_after"] >= 0.8 and result["accuracy_after"] >= 0.95


def test_a_name_that_nobody_registered_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    for key, known in (("algorithm.loss=smoth", ("clipped", "gspo")), ("algorithm.estimator=rank", ("group", "rloo"))):
        done = rl_vlm("train", QUICKSTART, key, "--run-dir", tmp_path / "run")
        assert done.returncode == 2 and all(name in done.stderr for name in (*known, "plugins")), done.stderr
        assert not (tmp_path / "run").exists()


def test_a_plugin_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import a_module_that_is_not_there\n")
    done = rl_vlm("train", QUICKSTART, f"plugins=[{broken}]", "--dry-run")
    assert done.returncode == 2 and str(broken) in done.stderr and "a_module_that_is_not_there" in done.stderr
