"""What tests of all kinds share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model after five warm-start steps: it answers noise, but every part is real."""
    from rl_vlm.models.tiny import model as tiny
    from rl_vlm.models.tiny import warmstart

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warmstart, "log_accuracy", lambda *_: None)  # a report that costs more than this short build
        return tiny.make_tiny(tmp_path_factory.mktemp("tiny") / "model", steps=5)
