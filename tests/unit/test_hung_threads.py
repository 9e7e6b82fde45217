"""A command ends though an environment hangs in one of its threads, with its code and after its output."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
import asyncio, sys, time
from rl_vlm.envs.errors import EnvTimeoutError
from rl_vlm.waiting import leave
from rl_vlm.rollout.env_pool import EnvPool

class Env:
    def reset(self, *, seed=None, options=None):
        time.sleep(float(sys.argv[1]))
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
    except Exception:
        print("answered")
    pool.close()

asyncio.run(play())
if sys.argv[1] == "1.0":
    time.sleep(3)
print("results are written")
leave(3)
"""


def _run(seconds: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(seconds)], capture_output=True, text=True, timeout=300, check=False
    )


def test_a_command_does_not_wait_for_an_environment_that_hangs() -> None:
    done = _run(3600)
    assert done.returncode == 3
    assert "did not answer within 0.2 s" in done.stdout and done.stdout.endswith("results are written\n")
    assert done.stderr == "rl-vlm: an environment still hangs; it is left behind.\n"


def test_a_call_without_an_end_is_left_behind_with_the_process() -> None:
    script = """
import threading
from rl_vlm.waiting import leave, within
try:
    within(0.2, "waiting for ever", threading.Event().wait)
except TimeoutError as error:
    print(error)
leave(4)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (4, "waiting for ever did not end within 0.2 s\n")
    assert done.stderr == "rl-vlm: waiting for ever still hangs; it is left behind.\n"
