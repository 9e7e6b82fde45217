"""A quarter of an hour on one bare GPU without a network: is the learner right and fast, and does vLLM work beside it?

    python benchmarks/gpu/quarter_hour.py --luggage luggage/1.tar.xz --part 1 --out part1.json
    python benchmarks/gpu/quarter_hour.py --luggage luggage/2.cut --part 2 --out part2.json
    python benchmarks/gpu/quarter_hour.py --luggage luggage/3.cut --part 3 --out part3.json

`benchmarks/gpu/pack.py` makes the luggage. `--size tiny` tries the same code on a CPU. Each check runs in a process of
its own or in one that it shares with its neighbours, which is killed when the check's time is over: a hang costs
nothing else. `--out` has the results after each check. Exit code 1: a check failed or ran out of time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

# No other imports: a GPU's process must not depend on what this one has loaded.

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
_SLACK = 1.5  # a check may take so many times as long as expected
_IMPORT_S = 30.0  # until a new process has imported torch and the rest
_END_S = 10.0  # until a process has closed its engine
_SETUP = ("vllm_engine.start", "vllm_engine.start_eager")


@dataclass(frozen=True)
class Check:
    """A method of a module's class Bench."""

    name: str
    part: str
    seconds: float  # expected on an H200
    size: str = "2b"
    setup: tuple[str, ...] = ()  # the first of these that succeeds must have run in the same process

    @property
    def bench(self) -> str:
        return self.name.partition(".")[0]


CHECKS = {
    check.name: check
    for check in (
        Check("correctness.versions", "1", 20),
        Check("correctness.kernels", "1", 20),
        Check("correctness.sequences", "1", 15),
        Check("correctness.backbone", "1", 20),
        Check("correctness.packing", "1", 20),
        Check("correctness.first_ratio", "1", 10),
        Check("speed.checkpointing", "2", 25, "4b"),
        Check("speed.no_checkpointing", "2", 15, "4b"),
        Check("speed.compiled", "2", 35, "4b"),
        Check("speed.profile", "2", 15, "4b"),
        Check("vllm_engine.weights", "3", 55),  # with the import of vLLM
        Check("vllm_engine.start", "3", 120),
        Check("vllm_engine.start_eager", "fallback", 60),
        Check("vllm_engine.agreement", "3", 25, setup=_SETUP),
        Check("vllm_engine.adapters", "3", 20, setup=_SETUP),
        Check("vllm_engine.decoding", "3", 40, setup=_SETUP),
        Check("vllm_engine.turns", "3", 40, setup=_SETUP),
        Check("vllm_engine.in_flight", "3", 20, setup=_SETUP),
        Check("vllm_engine.killed", "3", 10, setup=_SETUP),
        Check("vllm_full.reload", "3", 60),
        Check("correctness.precision", "more", 30),
        Check("correctness.wide_head", "more", 15),
        Check("correctness.checkpointing", "more", 30),
        Check("correctness.moments", "more", 20),
        Check("speed.images_not_kept", "more", 25, "4b"),
        Check("speed.head", "more", 20, "4b"),
        Check("speed.images", "more", 20, "4b"),
        Check("speed.cards", "more", 60, "4b"),
        Check("engine.decoding", "more", 60),
        Check("engine.adapter", "more", 20),
        Check("engine.gap", "more", 40),
    )
}


class Worker:
    """The process of one bench; it makes a check for each line that it reads."""

    def __init__(self, bench: str, size: str, work: Path, site: Path) -> None:
        self.key, self.work = (bench, size), work
        self.succeeded: set[str] = set()
        path = [str(ROOT), str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
        # Libraries that torch loads by their paths, and vLLM by their names.
        libraries = [str(place) for root in sys.path for place in Path(root).glob("nvidia/*/lib")]
        libraries += filter(None, [os.environ.get("LD_LIBRARY_PATH")])
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", bench, "--size", size, "--work", str(work)], stdin=subprocess.PIPE,
            env={"VLLM_LOGGING_LEVEL": "INFO", **os.environ, "PYTHONPATH": ":".join(path),
                 "LD_LIBRARY_PATH": ":".join(libraries), "HF_HUB_OFFLINE": "1"},
            text=True, start_new_session=True,
        )  # fmt: skip
        self.extra_s = _IMPORT_S

    def make(self, name: str, limit: float) -> dict[str, Any]:
        """The result of a check; kills the process when the limit is reached."""
        assert self.process.stdin is not None
        file = self.work / f"{name}.json"
        file.unlink(missing_ok=True)
        deadline, self.extra_s = time.monotonic() + limit + self.extra_s, 0.0
        try:
            print(name, file=self.process.stdin, flush=True)
        except BrokenPipeError:
            pass  # it has ended, as is said below
        while time.monotonic() < deadline:
            ended = self.process.poll() is not None
            result = json.loads(file.read_text()) if file.exists() else {"figures": {}}
            if result.get("status", "running") != "running":
                self.succeeded |= {name} if result["status"] == "ok" else set()
                return result
            if ended:
                reason = f"its process ended with code {self.process.returncode}"
                return {**result, "status": "failed", "reason": reason}
            time.sleep(0.05)
        self.kill()
        result = json.loads(file.read_text()) if file.exists() else {"figures": {}}
        return {**result, "status": "timed out", "reason": f"killed after {limit:.0f} s"}

    def close(self) -> None:
        """Let it end by itself, else kill it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            pass
        self.kill()

    def kill(self) -> None:
        """Kill it with the processes that it started."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


class Run:
    """The checks that were chosen, one after the other."""

    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        self.args, self.work, self.worker = args, work, None
        self.started = time.monotonic()
        self.results: list[dict[str, Any]] = []

    def make_all(self, names: Iterable[str]) -> int:
        """Make the checks; the exit code."""
        for name in names:
            self.make(CHECKS[name])
        self._change_worker(None)
        return int(any(one["status"] in ("failed", "timed out") for one in self.results))

    def make(self, check: Check) -> bool:
        """Make a check, with what it needs before it; whether it succeeded."""
        size = self.args.size or check.size
        self._change_worker((check.bench, size))
        needs_setup = bool(check.setup) and not self.worker.succeeded & set(check.setup)
        ahead = CHECKS[check.setup[0]].seconds if needs_setup else 0.0
        left = self.args.budget - (time.monotonic() - self.started)
        if check.seconds + ahead > left:
            reason = f"it needs {check.seconds + ahead:.0f} s, and the budget has {max(left, 0):.0f} s left"
            return self._keep(check, size, 0.0, {"status": "skipped", "reason": reason, "figures": {}})
        if needs_setup and not any(self.make(CHECKS[name]) for name in check.setup if not self._failed(name)):
            reason = f"{check.setup[0]} did not succeed"
            return self._keep(check, size, 0.0, {"status": "skipped", "reason": reason, "figures": {}})
        print(f"{check.name} ({size}, about {check.seconds:.0f} s)", flush=True)
        began = time.monotonic()
        limit = min(_SLACK * check.seconds, self.args.budget - (began - self.started))
        result = self.worker.make(check.name, limit)
        return self._keep(check, size, time.monotonic() - began, result)

    def _failed(self, name: str) -> bool:
        return any(one["name"] == name and one["status"] != "ok" for one in self.results)

    def _change_worker(self, key: tuple[str, str] | None) -> None:
        """A living worker of this bench and size, and no other; None: none at all."""
        if self.worker is not None and (self.worker.key != key or self.worker.process.poll() is not None):
            self.worker.close()
            self.worker = None
        if self.worker is None and key is not None:
            self.worker = Worker(*key, self.work, self.args.site)

    def _keep(self, check: Check, size: str, seconds: float, result: dict[str, Any]) -> bool:
        self.results.append({"name": check.name, "size": size, "seconds": round(seconds, 2),
                             "expected_s": check.seconds, **result})  # fmt: skip
        print(f"{check.name}: {result['status']} {result.get('reason', '')}, {seconds:.1f} s", flush=True)
        if self.args.out:
            draft = self.args.out.with_suffix(".draft")
            draft.write_text(json.dumps({"checks": self.results}, indent=2) + "\n")
            os.replace(draft, self.args.out)
        return result["status"] == "ok"


def serve(bench_name: str, size: str, work: Path) -> None:
    """Make the checks that standard input names, in this process."""
    import asyncio
    import importlib

    from report import Report

    bench: Any = None

    def make(method: str, report: Report) -> Any:
        nonlocal bench
        common = importlib.import_module("common")
        if bench is None:
            folder, device = common.prepare(work, size)
            bench = importlib.import_module(bench_name).Bench(folder, size, device)
        common.free()
        bench.report = report
        return getattr(bench, method)()

    for line in sys.stdin:
        name = line.strip()
        report = Report(work / f"{name}.json")
        report.run(partial(make, name.partition(".")[2], report))
    if "engine" in vars(bench or object):
        asyncio.run(bench.engine.close())


def unpack(luggage: list[Path], site: Path) -> None:
    """Put what `pack.py` packed into `site`; the archive that was cut is unpacked when both its pieces are there."""
    site.mkdir(parents=True, exist_ok=True)
    for path in luggage:
        shutil.copy(path, site)
    cut = [site / "2.cut", site / "3.cut"]
    if all(piece.exists() for piece in cut):
        (site / "engine.tar.xz").write_bytes(b"".join(piece.read_bytes() for piece in cut))
        for piece in cut:
            piece.unlink()
    for archive in site.glob("*.tar.xz"):
        with tarfile.open(archive) as content:
            content.extractall(site, filter="tar")
        archive.unlink()


def main(given: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=("1", "2", "3", "more"), default=["1", "2", "3"])
    parser.add_argument("--only", nargs="+", choices=CHECKS, metavar="NAME", help="these checks, see --list")
    parser.add_argument("--list", action="store_true", help="name all checks and end")
    parser.add_argument("--size", choices=("tiny", "2b", "4b", "8b"), help="of all models; else 2b, and 4b for speed")
    parser.add_argument("--budget", type=float, default=570.0, help="seconds; what would not fit is left out")
    parser.add_argument("--out", type=Path, help="write JSON here after each check")
    parser.add_argument("--luggage", type=Path, nargs="+", default=[], help="what to unpack first")
    parser.add_argument("--site", type=Path, default=Path(tempfile.gettempdir()) / "rl-vlm-luggage", help="where to")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(given)
    if args.serve:
        serve(args.serve, args.size, args.work)
        return 0
    if args.list:
        for check in CHECKS.values():
            print(f"{check.part:>8} {check.seconds:4.0f} s  {check.size}  {check.name}")
        return 0
    unpack(args.luggage, args.site)
    with tempfile.TemporaryDirectory(prefix="rl-vlm-gpu-") as work:
        names = args.only or [check.name for check in CHECKS.values() if check.part in args.part]
        return Run(args, Path(work)).make_all(names)


if __name__ == "__main__":
    sys.exit(main())
