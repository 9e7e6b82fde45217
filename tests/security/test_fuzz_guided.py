"""libFuzzer finds nothing in any reader: RL_VLM_FUZZ_SECONDS for each, by default fifteen."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz_targets import TARGETS
from fuzzing import SECONDS

pytest.importorskip("atheris", reason="it is for Linux on x86-64")
pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(max(600, 3 * SECONDS))]
GUIDED = Path(__file__).with_name("guided.py")


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_breaks(target: str, tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(GUIDED),
        target,
        "--seconds",
        str(int(SECONDS) or 15),
        "--corpus",
        str(tmp_path / target),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300 + 2 * SECONDS, errors="replace")
    assert done.returncode == 0, done.stderr[-3000:]
    runs, coverage = re.search(r"Done (\d+) runs", done.stderr), re.findall(r"cov: (\d+)", done.stderr)
    assert runs and int(runs[1]) > 1000
    assert int(coverage[-1]) > 10  # lines of ours are seen
    print(f"{target}: {runs[1]} inputs, {coverage[-1]} branches")
