"""How much of our code a reader opens to follow one iteration, over all processes.

    python benchmarks/iteration_files.py configs/quickstart.yaml evaluation.every=0
    python benchmarks/iteration_files.py configs/rl_vlm_f/cartpole_tiny.yaml

The measure is the number of lines of all files in which a line ran. Every process of a run measures its lines with
coverage (`pip install coverage`) from its start. Lines count from the end of iteration `--first` until `--iterations`
more have ended, so imports do not count.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import coverage

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "rl_vlm"
# Runs in every process when Python starts. The context changes when this command writes a file with its name.
HOOK = """
import os, threading, time
def _measure(folder):
    import atexit, coverage
    measured = coverage.Coverage(data_file=os.path.join(folder, "data"), data_suffix=True,
        source=[os.environ["MEASURED"]], config_file=False)
    measured.start()
    measured.switch_context("before")
    def follow():
        for context in ("iteration", "after"):
            while not os.path.exists(os.path.join(folder, context)):
                time.sleep(0.02)
            measured.switch_context(context)
        measured.save()
    threading.Thread(target=follow, daemon=True).start()
_measure(os.environ["MEASURE_INTO"])
"""


def rows(progress: Path) -> int:
    return max(len(progress.read_text().splitlines()) - 1, 0) if progress.is_file() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--first", type=int, default=2, help="Rows of progress.csv before the lines count.")
    parser.add_argument("--iterations", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(HOOK)
        run = folder / "run"
        environment = {
            **os.environ, "MEASURE_INTO": name, "MEASURED": str(PACKAGE), "COVERAGE_CORE": "ctrace",
            "PYTHONPATH": os.pathsep.join([name, str(ROOT), str(Path(coverage.__file__).parents[1])]),
        }  # fmt: skip
        command = [sys.executable, "-m", "rl_vlm.cli", "train", given.config, *given.overrides, "--run-dir", str(run)]
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            for context, wanted in (("iteration", given.first), ("after", given.first + given.iterations)):
                deadline = time.monotonic() + 900
                while rows(run / "progress.csv") < wanted:
                    if process.poll() is not None or time.monotonic() > deadline:
                        sys.exit((folder / "log").read_text()[-3000:])
                    time.sleep(0.02)
                (folder / context).touch()
            time.sleep(5)  # until every process has saved its lines
        finally:
            process.terminate()
            process.wait(300)
        lines: dict[str, set[int]] = {}
        for part in folder.glob("data.*"):
            data = coverage.CoverageData(str(part))
            data.read()
            data.set_query_contexts(["iteration"])
            for file in data.measured_files():
                lines.setdefault(os.path.relpath(file, PACKAGE), set()).update(data.lines(file) or ())
    found = {file: count for file, count in sorted((file, len(numbers)) for file, numbers in lines.items()) if count}
    for file, count in found.items():
        print(f"{count:5d}  {file}")
    whole = sum(len((PACKAGE / file).read_text().splitlines()) for file in found)
    rooms = Counter(file.split("/")[0] for file in found)
    print(f"{given.config}: {whole} lines in {len(found)} files opened, of which {sum(found.values())} ran")
    print(f"Files by room: {dict(rooms.most_common())}")


if __name__ == "__main__":
    main()
