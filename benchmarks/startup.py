"""Seconds from the command to the first iteration of the quickstart, beside what its parts cost a bare process.

    python benchmarks/startup.py [--quick] [--out FILE]

The bare process imports torch, transformers, Ray, Serve and RLlib, starts a private Ray, Serve and one empty deployment, one
after the other. The quickstart is measured from its command until its first iteration is in `progress.csv`: model, replicas,
env runners, learner, the evaluation before training and the iteration included. They take turns, and a dry run is measured
between them. CPU seconds are those of all processes of a contender, and tell more than wall time where others use the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import psutil
from report import Report

from rl_vlm.models.loading import resolve_model

HERE = Path(__file__).parent
CONFIG = HERE.parent / "configs" / "quickstart.yaml"
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}
DEADLINE_S = 300.0
DRY_RUN_LIMIT_S = 5.0
BARE, OURS, DRY = "bare process", "quickstart", "dry run"


def cpu_seconds(process: psutil.Process) -> float:
    """CPU seconds of a process and its descendants, those that have ended and were waited for included."""
    total = 0.0
    for member in [process, *process.children(recursive=True)]:
        try:
            total += sum(member.cpu_times()[:4])  # user, system, and both of ended children
        except psutil.NoSuchProcess:
            continue
    return total


def bare() -> tuple[float, float, dict[str, float]]:
    """Wall and CPU seconds of the bare process, and the seconds of its steps."""
    started = time.perf_counter()
    command = [sys.executable, str(HERE / "startup_contender.py")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=ENVIRONMENT
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        line = process.stdout.readline()
        wall, cpu = time.perf_counter() - started, cpu_seconds(psutil.Process(process.pid))
        process.stdin.close()
        process.wait(60)
    if not line:
        raise RuntimeError(f"The bare process ended with code {process.returncode}.")
    return wall, cpu, json.loads(line)["seconds"]


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "rl_vlm.cli", "train", str(CONFIG), *arguments]


def quickstart(scratch: Path) -> tuple[float, float]:
    """Wall and CPU seconds until the first iteration of the quickstart has been logged."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder, tempfile.TemporaryFile(mode="w+") as output:
        figures = Path(folder) / "run" / "progress.csv"
        started = time.perf_counter()
        process = subprocess.Popen(
            _command("--run-dir", str(figures.parent)), stdout=output, stderr=subprocess.STDOUT, env=ENVIRONMENT
        )
        try:
            while not (figures.is_file() and figures.read_bytes().count(b"\n") >= 2):
                if process.poll() is not None or time.perf_counter() - started > DEADLINE_S:
                    output.seek(0)
                    raise RuntimeError(f"The quickstart did not come to its first iteration: {output.read()[-2000:]}")
                time.sleep(0.02)
            return time.perf_counter() - started, cpu_seconds(psutil.Process(process.pid))
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def dry_run() -> tuple[float, float]:
    """Wall and CPU seconds of `rl-vlm train configs/quickstart.yaml --dry-run`."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(_command("--dry-run"), check=True, stdout=subprocess.DEVNULL, env=ENVIRONMENT, timeout=DEADLINE_S)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(rounds: int) -> Report:
    """Let all take turns and return the report."""
    report = Report("Startup: command to first iteration")
    walls: dict[str, list[float]] = defaultdict(list)
    cpus: dict[str, list[float]] = defaultdict(list)
    steps: dict[str, list[float]] = defaultdict(list)

    def keep(label: str, figures: Sequence[float]) -> None:
        walls[label].append(figures[0])
        cpus[label].append(figures[1])

    resolve_model("tiny")  # built once for all
    with tempfile.TemporaryDirectory(prefix="rl-vlm-bench-") as scratch:
        for _ in range(rounds):
            *figures, seconds = bare()
            keep(BARE, figures)
            for step, value in seconds.items():
                steps[step].append(value)
            keep(DRY, dry_run())
            keep(OURS, quickstart(Path(scratch)))
    for label, values in walls.items():
        report.add(label, values, cpu_s=statistics.median(cpus[label]))
    for step, values in steps.items():
        report.add(f"{BARE}: {step}", values)
    for unit, taken in (("wall", walls), ("CPU", cpus)):
        report.ratios[f"{BARE} / {OURS}, {unit}"] = statistics.median(taken[BARE]) / statistics.median(taken[OURS])
        report.ratios[f"{DRY_RUN_LIMIT_S:g} s / {DRY}, {unit}"] = DRY_RUN_LIMIT_S / statistics.median(taken[DRY])
    return report


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round instead of five")
    parser.add_argument("--out", type=Path, help="write JSON here")
    args = parser.parse_args()
    measure(1 if args.quick else 5).finish(args.out)


if __name__ == "__main__":
    main()
