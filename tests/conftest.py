"""What tests of all kinds share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model after five warm-start steps: it answers noise, but every part is real."""
    from rl_vlm.models.tiny import model as tiny

    return tiny.make_tiny(tmp_path_factory.mktemp("tiny") / "model", steps=5)


@pytest.fixture(scope="session")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in a shape that vLLM's CPU build can run."""
    from rl_vlm.models.tiny import model as tiny

    return tiny.make_tiny(tmp_path_factory.mktemp("tiny") / "wide", variant="wide", steps=5)
