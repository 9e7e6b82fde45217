"""libFuzzer finds nothing in any reader: RL_VLM_FUZZ_SECONDS for each, by default fifteen; and it finds what is broken."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz_targets import TARGETS
from fuzzing import SECONDS

pytest.importorskip("atheris", reason="it is for Linux on x86-64")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(max(600, 3 * SECONDS))]
GUIDED = Path(__file__).with_name("guided.py")


def guided(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(GUIDED), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300 + 2 * SECONDS, errors="replace")


@pytest.mark.acceptance
@pytest.mark.parametrize("target", TARGETS)
def test_nothing_breaks(target: str, tmp_path: Path) -> None:
    done = guided(target, "--seconds", int(SECONDS) or 15, "--corpus", tmp_path / target)
    assert done.returncode == 0, done.stderr[-3000:]
    runs, coverage = re.search(r"Done (\d+) runs", done.stderr), re.findall(r"cov: (\d+)", done.stderr)
    assert runs and int(runs[1]) > 1000
    assert int(coverage[-1]) > 10  # lines of ours are seen
    print(f"{target}: {runs[1]} inputs, {coverage[-1]} branches")


def test_what_is_broken_is_found_and_can_be_shown_again(tmp_path: Path) -> None:
    """A reader that fails where three nested conditions hold, which no random bytes reach."""
    broken = tmp_path / "broken.py"
    broken.write_text(
        "import sys, atheris\n"
        f"sys.path.insert(0, {str(GUIDED.parent)!r})\n"
        "import guided\n"
        "@atheris.instrument_func\n"
        "def check(data):\n"
        "    if data[:1] == b'R':\n"
        "        if data[1:2] == b'L':\n"
        "            if data[2:3] == b'!':\n"
        "                raise ValueError('found')\n"
        "guided.TARGETS['broken'] = guided.Target(check, [b'seed'])\n"
        "guided.main()\n"
    )
    command = [sys.executable, str(broken), "broken", "--corpus", str(tmp_path / "corpus" / "broken")]
    done = subprocess.run([*command, "--seconds", "100"], capture_output=True, text=True, timeout=300, errors="replace")
    assert done.returncode == 77 and "found" in done.stdout + done.stderr, done.stderr[-2000:]
    (kept,) = (tmp_path / "corpus").glob("broken-broken-crash-*")
    assert kept.read_bytes().startswith(b"RL!")
    again = subprocess.run([*command, "--input", str(kept)], capture_output=True, text=True, timeout=300)
    assert again.returncode == 1 and "ValueError: found" in again.stderr
