"""Signals while a command starts: a sentence, the exit code, and the handlers of before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from rl_vlm.runs.lifecycle import leaving_on_signals

SERVE_THAT_IMPORTS_FOR_LONG = """
import sys, time

class Slow:
    def find_spec(self, name, *_):
        if name == "rl_vlm.runs.serve":
            print("importing", flush=True)
            time.sleep(600)

sys.meta_path.insert(0, Slow())
from rl_vlm.cli.app import main
main(["serve", "tiny"])
"""


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


def test_serve_ends_at_once_while_it_imports() -> None:
    command = [sys.executable, "-c", SERVE_THAT_IMPORTS_FOR_LONG]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=300)
    assert (process.returncode, said) == (143, "Interrupted by SIGTERM: ending what was started.\n")
