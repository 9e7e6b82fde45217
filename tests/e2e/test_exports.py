"""`rl-vlm report` to Weights & Biases, whose package is in an environment of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from runs import environment


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With its package, and those of this environment behind them."""
    folder = tmp_path_factory.mktemp("wandb")
    subprocess.run([sys.executable, "-m", "uv", "venv", "--quiet", "--python", sys.executable, folder], check=True)
    found = folder / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", found, "wandb"], check=True, timeout=600
    )
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "ours.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")) + "\n")
    return found


def run(python: Path, folder: Path, *command: str) -> str:
    there = environment(WANDB_MODE="offline", HOME=str(folder), PYTHONPATH=str(Path(__file__).parents[2]))
    done = subprocess.run([python, *command], cwd=folder, env=there, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.acceptance
def test_weights_and_biases_takes_the_episodes_with_their_pictures(
    quickstart_run: Path, python: Path, tmp_path: Path
) -> None:
    report = ("-m", "rl_vlm.cli", "report", str(quickstart_run), "--episodes", "20")
    assert "20 episodes" in run(python, tmp_path, *report, "--to", "wandb:shapes")
    # What is uploaded with the table waits in W&B's own folder.
    staged = [path.read_bytes() for path in (tmp_path / ".local/share/wandb/artifacts/staging").iterdir()]
    assert sum(content.startswith(b"\x89PNG") for content in staged) >= 10
    tables = [json.loads(content) for content in staged if content.startswith(b'{"_type": "table"')]
    assert tables
    for table in tables:
        pictures = [row[table["columns"].index("picture 1")] for row in table["data"]]
        assert len(pictures) == 20 and {one["_type"] for one in pictures} == {"image-file"}
