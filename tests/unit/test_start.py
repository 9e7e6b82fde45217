"""What the processes of a run import and start, and how Serve is started once per cluster."""

from __future__ import annotations

import subprocess
import sys

import pytest
from ray.exceptions import ActorAlreadyExistsError

from rl_vlm.serving import deploy
from rl_vlm.serving.deploy import ServingError, start_serve


@pytest.mark.parametrize("module", ["rl_vlm.rollout.env_runner", "rl_vlm.preference.env_runner"])
def test_env_runner_processes_import_neither_torch_nor_rllib(module: str) -> None:
    code = f"import sys, {module}; print({{'torch', 'ray.rllib', 'ray.tune'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900, check=True)
    assert done.stdout.strip() == "set()"


class Starts:
    """Stands in for `serve.start`: another run's start has won the first `lost` times."""

    def __init__(self, lost: int) -> None:
        self.lost, self.calls = lost, 0

    def __call__(self, **_: object) -> None:
        self.calls += 1
        if self.calls <= self.lost:
            raise ActorAlreadyExistsError("SERVE_CONTROLLER_ACTOR exists")


def test_a_serve_that_another_run_is_starting_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = Starts(lost=2)
    monkeypatch.setattr(deploy.serve, "start", starts)
    start_serve(timeout_s=30)
    assert starts.calls == 3


def test_a_serve_that_never_comes_up_is_an_error_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy.serve, "start", Starts(lost=10**6))
    with pytest.raises(ServingError, match=r"0\.2 s"):
        start_serve(timeout_s=0.2)
