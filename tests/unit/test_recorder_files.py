"""Writing whole files, appending whole lines, values as JSON."""

import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from recorder_support import leftovers

from rl_vlm import files
from rl_vlm.files import append_whole, to_jsonable, whole_lines, write_atomic
from rl_vlm.monitoring import recorder


def test_an_atomic_write_replaces_the_file_and_is_readable_by_others(tmp_path):
    old_mask = os.umask(0o022)
    try:
        write_atomic(tmp_path / "a.txt", "first")
        write_atomic(tmp_path / "a.txt", b"second")
    finally:
        os.umask(old_mask)
    assert (tmp_path / "a.txt").read_text() == "second"
    assert stat.S_IMODE((tmp_path / "a.txt").stat().st_mode) == 0o644
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failed_atomic_write_keeps_the_old_file_and_leaves_nothing(tmp_path, monkeypatch, step):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    write_atomic(tmp_path / "a.txt", "old")
    monkeypatch.setattr(files.os, step, fail)
    with pytest.raises(OSError, match="No space"):
        write_atomic(tmp_path / "a.txt", "new")
    assert (tmp_path / "a.txt").read_text() == "old"
    assert leftovers(tmp_path) == []


def test_a_failed_append_leaves_the_file_as_it_was(tmp_path):
    (tmp_path / "log").write_bytes(b"one\n")
    code = (
        "import resource, signal, sys\n"
        "from rl_vlm.files import append_whole\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "try:\n    append_whole(sys.argv[1], b'x' * 200)\n"
        "except OSError as error:\n    print(error.errno)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "log")], capture_output=True, text=True)
    assert int(done.stdout) == errno.EFBIG, done.stderr
    assert (tmp_path / "log").read_bytes() == b"one\n"
    append_whole(tmp_path / "log", b"two\n")
    assert whole_lines(tmp_path / "log") == [b"one", b"two"]


def test_a_last_line_that_was_cut_short_does_not_count(tmp_path):
    (tmp_path / "log").write_bytes(b"one\ntw")
    assert whole_lines(tmp_path / "log") == [b"one"]
    assert whole_lines(tmp_path / "missing") == []


def test_json_values_are_plain_and_finite():
    value = {"a": np.float32(0.5), 2: np.arange(2), "c": (float("nan"), np.inf), "d": "\ud800", "e": {3, 1}}
    value |= {"f": np.bool_(True), "g": np.longdouble(1), "h": Path("x"), "i": np.int64(7)}
    plain = to_jsonable(value)
    assert plain == {
        "a": 0.5, "2": [0, 1], "c": [None, None], "d": "?", "e": [1, 3], "f": True, "g": 1.0, "h": "x", "i": 7,
    }  # fmt: skip
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain


def test_event_files_of_a_resumed_run_come_last_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorBoard reads them in the order of their names."""
    for now in (
        1_700_000_000.0,
        1_699_990_000.0,
        1_699_980_000.0,
    ):  # each machine's clock is behind that of the one before
        monkeypatch.setattr(recorder, "time", SimpleNamespace(time=lambda now=now: now))
        known = set(tmp_path.iterdir())
        file = recorder.TensorBoardFile(tmp_path)
        file.add(1, {"reward/mean": 0.5})
        (new,) = set(tmp_path.iterdir()) - known
        assert sorted(tmp_path.iterdir())[-1] == new
