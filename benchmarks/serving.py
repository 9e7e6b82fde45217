"""Tokens per second of one served model: transformers' own generate, a one-request-at-a-time server, our engines, Serve, HTTP.

    python benchmarks/serving.py [--quick] [--engine vllm] [--out FILE]

A random Qwen3-VL of 6 M parameters, prompts of 116 tokens with one new 224² image, 64 new tokens, greedy; 1, 8, 32 and 64
requests at a time. Each contender lives in a process of its own with one torch thread, only one works at a time, and they
take turns in every round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models import SIX_MILLION, random_model
from report import Report

HERE = Path(__file__).parent


LABELS = {
    "generate": "transformers.generate", "one": "one at a time", "raw": "raw engine", "handle": "one Serve replica",
    "http": "HTTP",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Setup:
    """A model folder, an engine, changes of the configuration, and how much is measured."""

    folder: Path
    engine: str
    options: tuple[str, ...] = ()
    counts: tuple[int, ...] = (1, 8, 32, 64)
    rounds: int = 7
    kinds: tuple[str, ...] = tuple(LABELS)


class Contender:
    """A contender's process."""

    def __init__(self, kind: str, setup: Setup) -> None:
        self.label, self.kind = LABELS[kind], kind
        self.rates: dict[int, list[float]] = {}
        self.first: list[float] = []
        self._errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115  # closed with the process
        command = [sys.executable, str(HERE / "serving_contender.py"), kind, str(setup.folder), *setup.options]
        command += ["--engine", setup.engine]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environment
        )

    def answer(self) -> dict[str, Any]:
        """The next JSON line."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise RuntimeError(f"{self.label} ended: {self._errors.read()[-2000:]}")
        return json.loads(line)  # type: ignore[no-any-return]

    def run(self, count: int, keep: bool = True) -> None:
        """Answer `count` requests at once."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"run {count}\n")
        self._process.stdin.flush()
        result = self.answer()
        if keep:
            self.rates.setdefault(count, []).append(result["tokens"] / result["seconds"])
            if result["first"] is not None:
                self.first.append(result["first"])

    def rate(self, count: int) -> float:
        """Median tokens per second."""
        return statistics.median(self.rates[count])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(120)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._errors.close()


def measure(setup: Setup, report: Report) -> None:
    """Run everything and put it into the report."""
    contenders: dict[str, Contender] = {}
    try:
        for kind in setup.kinds:  # one after the other: each may load a large model
            contenders[kind] = Contender(kind, setup)
            contenders[kind].answer()
        for count in setup.counts:
            for contender in contenders.values():
                contender.run(count, keep=False)
            for _ in range(setup.rounds):
                for contender in contenders.values():
                    # One after the other takes its time, and its rate is the same at any count.
                    if contender.kind != "one" or count <= 32:
                        contender.run(count)
            for contender in contenders.values():
                if count in contender.rates:
                    report.add(f"{count} × {contender.label}", contender.rates[count], "tokens/s")
        _ratios(report, contenders, setup.counts)
    finally:
        for contender in contenders.values():
            contender.close()


def _ratios(report: Report, contenders: dict[str, Contender], counts: tuple[int, ...]) -> None:
    raw = contenders["raw"]
    for count in counts:
        for kind in ("handle", "http"):
            label = contenders[kind].label
            report.ratios[f"{label} / raw engine at {count}"] = contenders[kind].rate(count) / raw.rate(count)
        if "generate" in contenders:
            report.ratios[f"raw engine / generate at {count}"] = raw.rate(count) / contenders["generate"].rate(count)
    if "one" in contenders and 32 in counts:
        report.ratios["raw engine / one at a time at 32"] = raw.rate(32) / contenders["one"].rate(32)
    for contender in contenders.values():
        if contender.first:
            report.add(f"time to first token, {contender.label}", [1000 * s for s in contender.first], "ms")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="our own contenders at 8 and 32 requests only")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--out", type=Path, help="write JSON here")
    args = parser.parse_args()
    report = Report(f"Serving, engine {args.engine}")
    quick: dict[str, Any] = {"counts": (8, 32), "rounds": 2, "kinds": ("raw", "handle", "http")} if args.quick else {}
    with tempfile.TemporaryDirectory(prefix="rl-vlm-bench-") as scratch:
        folder = random_model(Path(scratch) / "model", max_pixels=512 * 512, **SIX_MILLION)
        measure(Setup(folder, args.engine, **quick), report)
    report.finish(args.out)


if __name__ == "__main__":
    main()
