"""What the processes of a run import and start, and how Serve is started once per cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from ray.exceptions import ActorAlreadyExistsError

from rl_vlm.runs.signals import leaving_on_signals
from rl_vlm.serving import deploy
from rl_vlm.serving.deploy import ServingError, start_serve


@pytest.mark.slow
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


def test_a_serve_that_another_run_is_starting_is_waited_for_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = Starts(lost=2)
    monkeypatch.setattr(deploy.serve, "start", starts)
    start_serve(timeout_s=30)
    assert starts.calls == 3
    monkeypatch.setattr(deploy.serve, "start", Starts(lost=10**6))
    with pytest.raises(ServingError, match=r"0\.2 s"):
        start_serve(timeout_s=0.2)


# --- Signals while a command starts: a sentence, the exit code, and the handlers of before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_told_and_ends_with_its_code_and_not_outside(number: signal.Signals, capsys) -> None:
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended, leaving_on_signals():
        os.kill(os.getpid(), number)
        time.sleep(10)
    assert ended.value.code == 128 + number
    assert capsys.readouterr().err == f"Interrupted by {number.name}: ending what was started.\n"
    assert signal.getsignal(number) is before


def test_the_code_is_the_signals_whatever_comes_of_its_exception() -> None:
    """In a call of Ray's it comes out as another one."""
    with pytest.raises(SystemExit) as ended, leaving_on_signals():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        except SystemExit:
            raise ValueError("half started") from None
    assert ended.value.code == 143
    with pytest.raises(ValueError, match="no signal"), leaving_on_signals():
        raise ValueError("no signal")


# --- A command ends though an environment hangs in one of its threads, with its code and after its output


_SCRIPT = """
import asyncio, threading, time
from rl_vlm.envs.errors import EnvTimeoutError
from rl_vlm.deadlines import call_with_deadline, exit_process
from rl_vlm.rollout.env_pool import EnvPool

class Env:
    def reset(self, *, seed=None, options=None):
        time.sleep(3600)
        return None, {}
    def close(self):
        pass

async def play():
    pool = EnvPool(Env, 0.2)
    envs = await pool.borrow(1)
    try:
        await pool.reset(envs, 0, {})
    except EnvTimeoutError as error:
        print(error)
    pool.close()

asyncio.run(play())
try:
    call_with_deadline(0.2, "waiting for ever", threading.Event().wait)
except TimeoutError as error:
    print(error)
print("results are written")
exit_process(3)
"""


@pytest.mark.slow
def test_a_command_waits_neither_for_an_environment_nor_for_a_call_that_hangs() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 3
    assert "did not answer within 0.2 s" in done.stdout and "waiting for ever did not end within 0.2 s" in done.stdout
    assert done.stdout.endswith("results are written\n")
    assert done.stderr == "rl-vlm: an environment still hangs; it is left behind.\n"
