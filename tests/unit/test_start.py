"""What the processes of a run import and start, and how Serve is started once per cluster."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from ray.exceptions import ActorAlreadyExistsError
from ray.rllib.algorithms import algorithm
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.env import INPUT_ENV_SPACES
from ray.rllib.utils.actor_manager import FaultAwareApply

from rl_vlm.algorithms.learners import RunnerGroup, light_env_runners
from rl_vlm.imports import import_meanwhile, imports_done
from rl_vlm.rollout.base_env_runner import ENV_SPACES, MODULE_ID, RunEnvRunner
from rl_vlm.serving import deploy
from rl_vlm.serving.deploy import ServingError, start_serve


@pytest.mark.parametrize("module", ["rl_vlm.rollout.env_runner", "rl_vlm.preference.env_runner"])
def test_env_runner_processes_import_neither_torch_nor_rllib(module: str) -> None:
    code = f"import sys, {module}; print({{'torch', 'ray.rllib', 'ray.tune'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900, check=True)
    assert done.stdout.strip() == "set()"


def test_env_runners_speak_of_spaces_as_rllib_does() -> None:
    assert (ENV_SPACES, MODULE_ID) == (INPUT_ENV_SPACES, DEFAULT_MODULE_ID)


def test_env_runners_take_functions_as_rllib_sends_them() -> None:
    names = list(inspect.signature(FaultAwareApply.apply).parameters)
    assert list(inspect.signature(RunEnvRunner.apply).parameters) == names


def test_the_group_of_env_runners_is_ours_while_an_algorithm_is_set_up() -> None:
    before = algorithm.EnvRunnerGroup
    with light_env_runners():
        assert algorithm.EnvRunnerGroup is RunnerGroup
    assert algorithm.EnvRunnerGroup is before


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
    with pytest.raises(ServingError, match=r"did not come up in 0\.2 s"):
        start_serve(timeout_s=0.2)


def test_modules_are_imported_meanwhile_and_missing_ones_are_left_to_who_needs_them() -> None:
    sys.modules.pop("colorsys", None)
    import_meanwhile("no_such_module_anywhere", "colorsys")
    imports_done()
    assert "colorsys" in sys.modules


def test_whoever_imports_the_same_package_can_wait_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("slow_to_import", "imported_after_it"):
        (tmp_path / f"{name}.py").write_text(
            "import time\nSTARTED = time.monotonic()\ntime.sleep(0.3)\nWHOLE = time.monotonic()\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    import_meanwhile("slow_to_import")
    import_meanwhile("imported_after_it")
    imports_done()
    first, second = (sys.modules[name] for name in ("slow_to_import", "imported_after_it"))
    assert first.WHOLE <= second.STARTED < second.WHOLE  # one after the other, and both complete
