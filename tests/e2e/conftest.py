"""End-to-end tests import their helpers by name, and find the tiny model built, outside of the deadlines of their runs."""

import fcntl
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def tiny_model() -> None:
    from rl_vlm.models.loading import resolve_model

    resolve_model("tiny")


@pytest.fixture(scope="session")
def quickstart_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished quickstart run: the one that CI has just made as a user does, else one that all workers share."""
    from runs import TrainingProcess

    if given := os.environ.get("RL_VLM_QUICKSTART_RUN"):
        return Path(given)
    base = tmp_path_factory.getbasetemp()
    place = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "quickstart"
    with open(f"{place}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "result.json").exists():
            with TrainingProcess(place) as run:
                assert run.wait(timeout=540) == 0, run.output()[-3000:]
                assert run.survivors() == []
    return place
