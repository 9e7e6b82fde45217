"""A stranger's folder: their own environment, estimator and loss train the tiny model, and no file of the package changes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from runs import QUICKSTART, ROOT, rl_vlm

MINE = ROOT / "tests" / "fixtures" / "plugins" / "mine.py"
CHOICES = (
    "env.id=Dots-v0", "env.kwargs={}", "algorithm.estimator=centred_ranks", "algorithm.loss=smooth", "name=mine",
)  # fmt: skip
SHORT = ("algorithm.iterations=40", "evaluation.every=0", "evaluation.num_items=128")


def test_what_a_plugin_registers_learns_in_every_process(tmp_path: Path) -> None:
    plugin = shutil.copy(MINE, tmp_path / "mine.py")
    done = rl_vlm(
        "train", QUICKSTART, f"plugins=[{plugin}]", *CHOICES, *SHORT, "--run-dir", tmp_path / "run", timeout=420
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    # Left or right: one half by chance once the form of an answer is right.
    assert result["reward_before"] <= 0.6 and result["reward_after"] >= 0.8
    assert result["accuracy_after"] >= 0.95


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
