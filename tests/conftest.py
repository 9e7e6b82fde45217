"""What tests of all kinds share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

import rl_vlm  # noqa: F401  # first: with its thresholds of garbage collection the tests' imports take less

# Examples have no deadline of their own: the tests also run at a low priority on a busy machine, and each has pytest's.
settings.register_profile("rl_vlm", deadline=None)
settings.load_profile("rl_vlm")
# Nor does Ray's store of tables, in clusters that tests start by its own command.
os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "60")
# A test that failed may leave a handle behind; its collection would start a second Ray here, and the tests that follow would fail by that.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")


# Folders whose tests start Ray, servers, browsers or commands. What `make test` runs of them is marked `real`.
REAL_THINGS = {"e2e", "integration", "drills"}


def pytest_itemcollected(item: pytest.Item) -> None:
    """Of real things all tests are slow but those marked `real`."""
    if item.path.parent.name in REAL_THINGS and not {"real", "acceptance"} & {
        mark.name for mark in item.iter_markers()
    }:
        item.add_marker("slow")


@pytest.fixture(scope="session", autouse=True)
def own_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests stand in an empty folder: where they stood in the repository, they would meet the runs that are there."""
    os.chdir(tmp_path_factory.mktemp("here"))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model after five warm-start steps: it answers noise, but every part is real."""
    from rl_vlm.zoo.tiny import model as tiny

    return tiny.make_tiny(tmp_path_factory.mktemp("tiny") / "model", steps=5)


@pytest.fixture(scope="session")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in a shape that vLLM's CPU build can run."""
    from rl_vlm.zoo.tiny import model as tiny

    return tiny.make_tiny(tmp_path_factory.mktemp("tiny") / "wide", variant="wide", steps=5)


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> Iterator[Any]:
    """An engine of the tiny model, where a module makes none of its own."""
    from http_support import tiny_engine

    with tiny_engine(tiny_folder) as engine:
        yield engine
