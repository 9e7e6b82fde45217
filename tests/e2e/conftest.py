"""End-to-end tests import their helpers by name, and find the tiny model built, outside of the deadlines of their runs."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def tiny_model() -> None:
    from rl_vlm.models.loading import resolve_model

    resolve_model("tiny")
