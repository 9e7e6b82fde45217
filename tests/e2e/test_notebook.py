"""The notebook runs from its first cell to its last, and what it trains is better than what it began with."""

from __future__ import annotations

import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from runs import ROOT, environment

NOTEBOOK = ROOT / "notebooks" / "train_lora.ipynb"


def executed(folder: Path, timeout: int) -> nbformat.NotebookNode:
    """The notebook after a run in a copy of its place, in a kernel of its own that knows nothing of this process."""
    (folder / "notebooks").mkdir()
    (folder / "configs").symlink_to(ROOT / "configs")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
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
    notebook = executed(tmp_path, timeout=900)
    before, after = printed(notebook, r"before: (\d\.\d+), after: (\d\.\d+)")
    assert before <= 0.45
    assert after >= before + 0.25
    assert printed(notebook, r"merged: (\d\.\d+)") == (after,)
    kinds = [kind for cell in notebook.cells for output in cell.get("outputs", []) for kind in output.get("data", {})]
    assert kinds.count("image/png") == 2  # a picture of the environment, and the curve
