"""Host memory of a run over its iterations: processes and object store, on episodes full of images.

    python benchmarks/host_memory.py [--iterations 50] [--turns 8] [--image-cache-mib 16] [--quick] [--out FILE]

Each turn of GridWalk-v0 shows a new picture, so a process that keeps what it receives grows with every iteration.
After each iteration the proportional set sizes of the run's processes are added up (PSS counts pages that several
processes share once): own memory by kind of process, and shared memory, which is Ray's object store. Mapped files are
not counted, because the kernel drops and shares them as it likes.

`growth` compares the median of the last five iterations with that of the sixth to the tenth, when every process has
done everything once. `MB per 1,000 trajectories` is the slope of a line through all iterations after the fifth. The
cache of image features is small by default, so that only a leak can grow.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
from memory import memory_of
from report import Report, command_line

ROOT = Path(__file__).resolve().parents[1]
KINDS = {
    "ServeReplica": "replicas", "EnvRunner": "env runners", "Learner": "learner", "_WrappedExecutable": "learner",
    "rl_vlm.cli": "driver",
}  # fmt: skip
GROUPS, GROUP_SIZE, WARM, PATIENCE_S = 8, 8, 5, 900.0


def measure(iterations: int, turns: int, image_cache_mib: int, folder: Path) -> tuple[list[Counter[str]], list[float]]:
    """Train in a process of its own; bytes by kind of process, and mean turns, after each iteration.

    Raises SystemExit with the command's output where it fails.
    """
    command = [
        sys.executable, "-m", "rl_vlm.cli", "train", str(ROOT / "configs/gridwalk_tiny.yaml"),
        f"algorithm.iterations={iterations}", f"env.kwargs.max_turns={turns}", f"rollout.max_turns={turns}",
        f"rollout.prompts_per_iteration={GROUPS}", f"rollout.group_size={GROUP_SIZE}", "learner.num_learners=1",
        "learner.cpus_per_learner=0.25", "serving.num_replicas=1", f"evaluation.every={iterations}",
        "evaluation.num_items=32", f"logging.checkpoint_every={iterations}", "sight.every=0",
        f"model.image_cache_mib={image_cache_mib}", "--run-dir", str(folder / "run"),
    ]  # fmt: skip
    samples: list[Counter[str]] = []
    mean_turns: list[float] = []
    with (folder / "output.txt").open("w+") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            last_change = time.monotonic()
            while process.poll() is None:
                time.sleep(0.05)
                if time.monotonic() - last_change > PATIENCE_S:
                    raise SystemExit(
                        f"No iteration ended within {PATIENCE_S:.0f} s: {(folder / 'output.txt').read_text()[-3000:]}"
                    )
                found = _rows(folder / "run" / "progress.csv")
                if len(found) > len(samples):
                    last_change = time.monotonic()
                    samples.append(_memory(psutil.Process(process.pid)))
                    mean_turns.append(float(found[-1]["rollout/turns"]))
        finally:
            process.terminate()  # saves and ends; nothing where it has ended
            process.wait(timeout=120)
    if process.returncode or len(samples) < iterations // 2:
        raise SystemExit(f"The run ended with {process.returncode}: {(folder / 'output.txt').read_text()[-3000:]}")
    return samples, mean_turns


def _rows(file: Path) -> list[dict[str, str]]:
    if not file.is_file():
        return []
    with file.open() as lines:
        return list(csv.DictReader(lines))


def _memory(process: psutil.Process) -> Counter[str]:
    now: Counter[str] = Counter()
    for kind, size in memory_of(process, KINDS, "Pss_Anon", "Ray and others"):
        now[kind] += size
    now["shared memory"] = sum(size for _, size in memory_of(process, KINDS, "Pss_Shmem", ""))
    return now


def main() -> None:
    """Command line."""
    parser = command_line(__doc__, "12 iterations, to see that it runs")
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--turns", type=int, default=8, help="the most turns of an episode, each with a picture")
    parser.add_argument("--image-cache-mib", type=int, default=16, help="of learner and replica")
    args = parser.parse_args()
    os.environ.setdefault("RAY_worker_niceness", "0")
    report = Report("Host memory of a run whose episodes are full of images")
    with tempfile.TemporaryDirectory(prefix="rl-vlm-memory-") as folder:
        iterations = 12 if args.quick else max(args.iterations, 12)
        found, mean_turns = measure(iterations, args.turns, args.image_cache_mib, Path(folder))
    totals = np.array([sum(sample.values()) for sample in found], dtype=np.float64)
    samples = [{**sample, "all": total} for sample, total in zip(found, totals, strict=True)]
    for kind in sorted({kind for sample in samples for kind in sample}, key=lambda kind: (kind == "all", kind)):
        sizes = [sample.get(kind, 0) / 2**20 for sample in samples]
        report.add(kind, sizes[-5:], unit="MiB", before=float(np.median(sizes[WARM : WARM + 5])))
    for number in range(9, len(samples), 10):  # how it went
        report.add(f"all, iteration {number + 1}", [totals[number] / 2**20], unit="MiB")
    growth = np.median(totals[-5:]) / np.median(totals[WARM : WARM + 5]) - 1
    report.ratios["growth after the fifth iteration (goal: at most 0.02)"] = float(growth)
    slope = np.polyfit(np.arange(len(totals) - WARM), totals[WARM:], 1)[0]
    report.ratios["MB per 1,000 trajectories"] = float(slope) * 1000 / (GROUPS * GROUP_SIZE) / 1e6
    report.notes.append(
        f"{len(samples)} iterations of {GROUPS} x {GROUP_SIZE} episodes, {np.mean(mean_turns):.1f} turns each on "
        f"average; {args.image_cache_mib} MiB of image features each in learner and replica."
    )
    report.finish(args.out)


if __name__ == "__main__":
    main()
