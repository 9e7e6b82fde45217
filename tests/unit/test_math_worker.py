"""The child process of the math grader: its time limit in any thread, its death and restart, and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from test_isolation import gone

from rl_vlm.rewards.math import is_equal
from rl_vlm.rewards.symbolic import WORKER, GraderError, Reason, SymbolicWorker

pytestmark = pytest.mark.slow

TOWER = "9^{9^{9^{9}}}"  # `why_not_evaluated` stops it; handed straight to the child, it runs for ever


def fake(function: str = "obedient_child:prepare", startup_s: float = 60.0, **settings: float) -> SymbolicWorker:
    """A grader whose child needs no imports and obeys its question."""
    return SymbolicWorker(function, startup_s, **settings)


@pytest.fixture
def worker() -> SymbolicWorker:
    """An obedient child, already started."""
    own = fake()
    assert own.compare("", "")[0] is Reason.CORRECT
    return own


# --- the time limit -------------------------------------------------------------------------------------------------


def test_a_power_tower_is_stopped_off_the_main_thread() -> None:
    assert is_equal("x+3", "3+x")  # the child is up, so that its start is not measured
    start = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        verdict, seconds = pool.submit(WORKER.compare, TOWER, "5", 0.5).result()
    assert verdict is Reason.TIMED_OUT
    assert 0.5 <= seconds <= time.monotonic() - start < 60
    assert WORKER.compare("x+y", "y+x", 1.5)[0] is Reason.CORRECT  # its imports take longer, and are not charged


def test_the_limit_of_cpu_time_holds_on_the_main_thread_too(worker: SymbolicWorker) -> None:
    assert worker.compare("work", "", 0.3) == (Reason.TIMED_OUT, 0.3)


def test_waiting_costs_no_cpu_time_and_the_clock_gives_no_verdict() -> None:
    assert fake().compare("be late", "", 0.2)[0] is Reason.CORRECT
    with pytest.raises(GraderError):
        fake(timeout_s=0.2).compare("hang", "", 0.2)


def test_a_verdict_that_the_clock_prevented_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = fake(timeout_s=0.2)
    monkeypatch.setattr("rl_vlm.rewards.math.WORKER", stopped)
    monkeypatch.setattr(stopped, "_function", "obedient_child:hanging")
    with pytest.raises(GraderError):
        is_equal("x+31", "31+x")
    monkeypatch.setattr("rl_vlm.rewards.math.WORKER", WORKER)
    assert is_equal("x+31", "31+x")


def test_the_childs_memory_is_limited() -> None:
    WORKER.compare("x", "y")
    limits = Path(f"/proc/{WORKER.pid}/limits").read_text()
    (limit,) = (line.split()[3] for line in limits.splitlines() if line.startswith("Max address space"))
    assert 2 << 30 < int(limit) < 3 << 30


# --- threads and processes ------------------------------------------------------------------------------------------


def test_eight_threads_get_their_own_answers() -> None:
    pairs = [(f"(x+{n})^2", f"x^2+{2 * n}x+{n * n + n % 2}") for n in range(1, 25)]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda pair: is_equal(*pair), pairs))
    assert results == [n % 2 == 0 for n in range(1, 25)]


def test_a_forked_process_forgets_the_child_of_its_parent() -> None:
    assert is_equal("x+4", "4+x")
    before = WORKER.pid
    pid = os.fork()
    if pid == 0:
        os._exit(0 if WORKER.pid is None else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert is_equal("x+6", "6+x")
    assert WORKER.pid == before


@pytest.mark.parametrize(
    "function", ["rl_vlm.rewards.sympy_child:prepare", "obedient_child:prepare"], ids=["busy", "idle"]
)
def test_the_child_dies_with_its_parent(function: str) -> None:
    question = f"w.compare({TOWER!r}, '5', 0.6)" if "sympy" in function else "time.sleep(60)"
    script = (
        f"import sys, time; sys.path.append({str(Path(__file__).parent)!r});"
        f"from rl_vlm.rewards.symbolic import SymbolicWorker; w = SymbolicWorker({function!r});"
        f"w.compare('x', 'y'); print(w.pid, flush=True); {question}"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        time.sleep(0.2)
        assert not gone(child, 0.0)
        parent.kill()
    assert gone(child, 15.0)


# --- children that misbehave ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("function", "startup_s"), [("obedient_child:missing", 60.0), ("obedient_child:slow", 0.5)])
def test_a_child_that_does_not_start_is_an_error_with_advice(function: str, startup_s: float) -> None:
    with pytest.raises(GraderError):
        fake(function, startup_s).compare("x", "y")


def test_an_input_that_kills_the_child_twice_is_unparsable(worker: SymbolicWorker) -> None:
    assert worker.compare("die", "")[0] is Reason.UNPARSABLE
    assert worker.compare("", "")[0] is Reason.CORRECT


def test_a_late_answer_is_not_taken_for_the_next_one() -> None:
    worker = fake(timeout_s=2.0)
    with pytest.raises(GraderError):
        worker.compare("be late", "")
    time.sleep(0.5)
    assert worker.compare("work", "", 0.1)[0] is Reason.TIMED_OUT


def test_a_child_killed_in_the_middle_is_asked_again(worker: SymbolicWorker) -> None:
    victim = worker.pid
    assert victim is not None
    threading.Timer(0.2, os.kill, (victim, signal.SIGKILL)).start()
    assert worker.compare("work", "", 0.5) == (Reason.TIMED_OUT, 0.5)
    assert gone(victim, 0.0)
