"""Trials of a sweep that share one set of replicas (`serving.shared`), and trials with their own: memory and time.

    python benchmarks/shared_serving.py [--quick] [--trials 2 4 8] [--iterations 20] [--out FILE]

Each side is `rl-vlm sweep` of the quickstart in a process of its own. The seeds 0, 1, ... are the trials, which run
at the same time. Seconds are those of the whole command. Memory is the highest sum of the processes' proportional set
sizes (PSS counts pages that several processes share once), sampled twice a second; `serving` is that of replicas and
registries. Accuracy is that of the held-out split after the last iteration, the mean of the trials.
"""

from __future__ import annotations

import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml
from memory import memory_of
from report import Report, command_line

ROOT = Path(__file__).resolve().parents[1]
KINDS = {
    "ServeReplica": "serving", "VersionRegistry": "serving", "EnvRunner": "runners",
    "GRPO": "trials",
}  # fmt: skip
GIB = 2**30


@dataclass
class Sweep:
    """What one sweep took and reached; memory in GiB, at its highest."""

    seconds: float = 0.0
    memory: float = 0.0
    serving: float = 0.0
    processes: int = 0
    accuracy: float = 0.0
    failed: int = 0

    def look(self, process: psutil.Process) -> None:
        """Note the memory of a process and its children."""
        now = memory_of(process, KINDS, "Pss", "others")
        total = sum(size for _, size in now) / GIB
        if total > self.memory:
            self.memory, self.processes = total, len(now)
            self.serving = sum(size for kind, size in now if kind == "serving") / GIB


def run_sweep(trials: int, iterations: int, folder: Path, shared: bool, replicas: int) -> Sweep:
    """One sweep in a process of its own. Raises SystemExit with its output where it cannot start."""
    space = folder / "space.yaml"
    space.write_text(
        yaml.safe_dump({"space": {"seed": {"grid": list(range(trials))}}, "max_concurrent": trials, "shared": shared})
    )
    command = [
        sys.executable, "-m", "rl_vlm.cli", "sweep", str(ROOT / "configs/quickstart.yaml"),
        f"algorithm.iterations={iterations}", f"serving.num_replicas={replicas}", "rollout.num_env_runners=1",
        f"evaluation.every={iterations}",
        "evaluation.num_items=128", "resources.num_cpus=64", "--space", str(space), "--run-dir", str(folder / "sweep"),
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_JOB_ID")}
    sweep, started = Sweep(), time.monotonic()
    with (folder / "output.txt").open("w+") as output:
        with subprocess.Popen(command, env=environment, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT) as process:
            try:
                while process.poll() is None and time.monotonic() - started < 3600:
                    sweep.look(psutil.Process(process.pid))
                    time.sleep(0.5)
            finally:
                process.kill()
        sweep.seconds = time.monotonic() - started
        results = folder / "sweep/results.csv"
        if process.returncode not in (0, 1) or not results.is_file():
            output.seek(0)
            raise SystemExit(f"The sweep ended with {process.returncode}: {output.read()[-3000:]}")
    with results.open() as file:
        last = [float(row["last"]) for row in csv.DictReader(file) if row["finished"] == "True"]
    sweep.accuracy = statistics.fmean(last) if last else float("nan")
    sweep.failed = trials - len(last)  # those that never began, too
    return sweep


def measure(trials: list[int], iterations: int, rounds: int, replicas: int, sides: list[str]) -> Report:
    """Run everything and return the report; ratios where both sides were run."""
    report = Report("Trials that share replicas, and trials with their own")
    for count in trials:
        found: dict[str, list[Sweep]] = {side: [] for side in sides}
        for number in range(rounds):
            for side in sides if number % 2 == 0 else reversed(sides):
                with tempfile.TemporaryDirectory(prefix="rl-vlm-bench-") as folder:
                    outcome = run_sweep(count, iterations, Path(folder), side == "shared", replicas)
                print(f"{count} trials, {side}: {json.dumps(vars(outcome))}", flush=True)
                found[side].append(outcome)
        for side, outcomes in found.items():
            report.add(
                f"{count} trials, {side}, wall", [o.seconds for o in outcomes],
                processes=max(o.processes for o in outcomes), failed=sum(o.failed for o in outcomes),
                accuracy=statistics.fmean(o.accuracy for o in outcomes),
            )  # fmt: skip
            report.add(f"{count} trials, {side}, memory", [o.memory for o in outcomes], "GiB")
            report.add(f"{count} trials, {side}, serving's memory", [o.serving for o in outcomes], "GiB")
        if len(found) < 2:
            continue
        own, shared = found["own"], found["shared"]
        for name, attribute in (("wall", "seconds"), ("memory", "memory"), ("serving's memory", "serving")):
            peer, ours = (statistics.median(getattr(o, attribute) for o in side) for side in (own, shared))
            report.ratios[f"own / shared at {count} trials, {name}"] = peer / ours
    report.notes.append(
        f"{iterations} iterations per trial, {replicas} replicas per run or for all, one env runner per run."
    )
    return report


def main() -> None:
    """The command."""
    parser = command_line(__doc__, "two trials of two iterations")
    parser.add_argument("--trials", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--sides", nargs="+", choices=["own", "shared"], default=["own", "shared"])
    args = parser.parse_args()
    if args.quick:
        args.trials, args.iterations, args.rounds = [2], 2, 1
    measure(args.trials, args.iterations, args.rounds, args.replicas, args.sides).finish(args.out)


if __name__ == "__main__":
    main()
