"""Tokens per second of one served model: transformers' generate, one request at a time, our engines, Serve, HTTP.

    python benchmarks/serving.py [--quick] [--size 2b] [--engine vllm] [--out FILE]

A random Qwen3-VL of 6 M parameters answers prompts of 116 tokens with one new 224² image by 64 new tokens, greedy; 1,
8, 32 and 64 requests at a time. Each contender lives in a process of its own with one torch thread, and they take
turns in every round. With `--size 2b` or `4b` they share one GPU, in bfloat16; vLLM takes a fifth of its memory for
each contender, which must be 16 GiB at 4B.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models import random_model, shape
from report import Report, command_line
from turns import Contender

LABELS = {
    "generate": "transformers.generate", "one": "one at a time", "raw": "raw engine", "handle": "one Serve replica",
    "http": "HTTP",
}  # fmt: skip
_GPU = ("model.dtype=bfloat16", "serving.gpus_per_replica=1", "serving.vllm.gpu_memory_utilization=0.2")


@dataclass(frozen=True, slots=True)
class Setup:
    """A model folder, an engine, changes of the configuration, and how much is measured."""

    folder: Path
    engine: str
    options: tuple[str, ...] = ()
    counts: tuple[int, ...] = (1, 8, 32, 64)
    rounds: int = 7
    kinds: tuple[str, ...] = tuple(LABELS)


class Server(Contender):
    """A contender that answers requests."""

    def __init__(self, kind: str, setup: Setup) -> None:
        arguments = (kind, setup.folder, *setup.options, "--engine", setup.engine)
        super().__init__(LABELS[kind], "serving_contender.py", *arguments, OMP_NUM_THREADS="1")
        self.kind = kind
        self.rates: dict[int, list[float]] = {}
        self.first: list[float] = []

    def run(self, count: int, keep: bool = True) -> None:
        """Answer `count` requests at once."""
        result = self.ask(str(count))
        if keep:
            self.rates.setdefault(count, []).append(result["tokens"] / result["seconds"])
            if result["first"] is not None:
                self.first.append(result["first"])

    def rate(self, count: int) -> float:
        """Median tokens per second."""
        return statistics.median(self.rates[count])


def measure(setup: Setup, report: Report) -> None:
    """Run everything and put it into the report."""
    contenders: dict[str, Server] = {}
    try:
        for kind in setup.kinds:  # one after the other: each may load a large model
            contenders[kind] = Server(kind, setup)
            contenders[kind].wait_until_ready()
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


def _ratios(report: Report, contenders: dict[str, Server], counts: tuple[int, ...]) -> None:
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
    parser = command_line(__doc__, "our own contenders at 8 and 32 requests only")
    parser.add_argument("--size", choices=("6m", "2b", "4b"), default="6m", help="2b and 4b need a GPU")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    args = parser.parse_args()
    on_gpu = args.size != "6m"
    how: dict[str, Any] = {"counts": (1, 8, 32, 64, 256)} if on_gpu else {}
    if args.quick:
        how = {"counts": (8, 32), "rounds": 2, "kinds": ("raw", "handle", "http")}
    report = Report(f"Serving {args.size.upper()}, engine {args.engine}")
    with tempfile.TemporaryDirectory(prefix="rl-vlm-bench-") as scratch:
        place = {"device": "cuda", "dtype": "bfloat16"} if on_gpu else {}
        folder = random_model(Path(scratch) / "model", max_pixels=512 * 512, **place, **shape(args.size))
        measure(Setup(folder, args.engine, _GPU if on_gpu else (), **how), report)
    report.finish(args.out)


if __name__ == "__main__":
    main()
