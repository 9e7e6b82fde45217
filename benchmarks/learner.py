"""Forward and backward of one GRPO update with a large vocabulary: the system against TRL's GRPOTrainer, interleaved.

    python benchmarks/learner.py [--rounds N] [--threads N] [--kinds KIND ...] [--factors N ...] [--quick] [--out FILE]

Vocabulary 151,936, hidden 256, 2 layers, LoRA, 8 rows of 1024 tokens, float32. Every contender is a process of its own with the
same weights and batch; they take turns, one computes at a time. Peak memory is that of the whole process. Loss and gradient
must agree. `lean` measures no entropies, which TRL always does. Then the
system alone with 1, 2 and 4 times the rows: MiB above the process before the step, which only activations may raise. `--kinds`
and `--factors` without values leave out either part.

CPU seconds tell more than wall time where others use the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from models import random_model
from report import Report

HERE = Path(__file__).parent
KINDS = ("ours", "lean", "trl")  # the peer is the last
LABELS = {"ours": "rl_vlm", "lean": "rl_vlm, no entropies", "trl": "TRL"}
SHAPE = {
    "vocab_size": 151_936, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 32, "intermediate_size": 704,
}  # fmt: skip
QUICK = {**SHAPE, "vocab_size": 6_000, "hidden_size": 64, "intermediate_size": 128}
_LOSS_TOLERANCE, _GRADIENT_TOLERANCE = 1e-5, 1e-3


class Contender:
    """A contender's process."""

    def __init__(self, kind: str, folder: Path, rows: int, length: int, threads: int, scratch: Path) -> None:
        self.kind, self.rows = kind, rows
        self.steps: list[dict[str, Any]] = []
        self._gradients = scratch / f"{kind}-{rows}.npy"
        command = [sys.executable, str(HERE / "learner_contender.py"), kind, str(folder)]
        self._log = (scratch / f"{kind}-{rows}.log").open("w+")
        self._process = subprocess.Popen(
            [*command, *map(str, (rows, length, threads)), "--gradients", str(self._gradients)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
        )
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"{LABELS[self.kind]} ended: {self._log.read()[-2000:]}")
        return json.loads(line)  # type: ignore[no-any-return]

    def step(self, keep: bool = True) -> None:
        """One forward and backward pass."""
        assert self._process.stdin is not None
        print("step", file=self._process.stdin, flush=True)
        answer = self._answer()
        print(f"{LABELS[self.kind]}, {self.rows} rows: {answer['seconds']:.1f} s", file=sys.stderr, flush=True)
        if keep:
            self.steps.append(answer)

    def median(self, figure: str) -> float:
        """Of the steps that were kept."""
        return statistics.median(one[figure] for one in self.steps)

    def gradients(self) -> np.ndarray:
        """Of the last step."""
        return np.load(self._gradients)  # type: ignore[no-any-return]

    def stop(self) -> None:
        """End the process."""
        self._process.communicate("quit\n", timeout=60)
        self._log.close()


def compare(report: Report, contenders: Sequence[Contender], rounds: int) -> None:
    """Warm up, take turns, and add rows and ratios. Raises RuntimeError where results differ."""
    for contender in contenders:
        contender.step(keep=False)
    for number in range(rounds):
        for contender in contenders if number % 2 == 0 else contenders[::-1]:
            contender.step()
    *own, peer = contenders
    expected, loss = peer.gradients(), peer.median("loss")
    for contender in own:
        found = contender.gradients()
        error = float(np.abs(found - expected).max() / np.abs(expected).max())
        if abs(contender.median("loss") - loss) > _LOSS_TOLERANCE or error > _GRADIENT_TOLERANCE:
            raise RuntimeError(
                f"{LABELS[contender.kind]} and TRL differ: loss {contender.median('loss')} and {loss}, gradient by {error:.1e}."
            )
        report.notes.append(
            f"{LABELS[contender.kind]}: loss differs from TRL's by "
            f"{abs(contender.median('loss') - loss):.1e}, the gradient by {error:.1e} of its largest element."
        )
    for contender in contenders:
        report.add(
            LABELS[contender.kind],
            [one["seconds"] for one in contender.steps],
            cpu_s=contender.median("cpu"),
            peak_mib=contender.median("peak"),
            base_mib=contender.median("base"),
        )
    for contender in own:
        for figure, name in (("peak", "peak memory"), ("seconds", "seconds"), ("cpu", "CPU seconds")):
            ratio = contender.median(figure) / peer.median(figure)
            report.ratios[f"{name}, {LABELS[contender.kind]} / TRL (lower is better)"] = ratio


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kinds", nargs="*", choices=KINDS[:-1], default=KINDS[:-1], help="beside TRL (default: all)")
    parser.add_argument("--factors", nargs="*", type=int, default=[1, 2, 4], help="of the rows, for the system alone")
    parser.add_argument("--model", type=Path, help="keep the model in this folder; one that is there is used")
    parser.add_argument("--quick", action="store_true", help="a small model and one round, to see that it runs")
    parser.add_argument("--out", type=Path, help="write JSON here")
    args = parser.parse_args()
    rows, length, shape, rounds = (2, 80, QUICK, 1) if args.quick else (8, 1024, SHAPE, args.rounds)
    report = Report(f"A policy update's passes: {rows} x {length} tokens, vocabulary {shape['vocab_size']:,}")
    with tempfile.TemporaryDirectory(prefix="rl-vlm-learner-") as name:
        scratch = Path(name)
        folder = random_model((args.model or scratch / "model").absolute(), **shape)

        def start(kind: str, factor: int = 1) -> Contender:
            return Contender(kind, folder, factor * rows, length, args.threads, scratch)

        contenders: list[Contender] = []
        try:
            for kind in (*args.kinds, KINDS[-1]) if args.kinds else ():
                contenders.append(start(kind))
            if contenders:
                compare(report, contenders, rounds)
                report.finish(args.out)  # the rest takes minutes
        finally:
            for contender in contenders:
                contender.stop()
        for factor in args.factors:
            alone = start("ours", factor)
            try:
                alone.step()
            finally:
                alone.stop()
            (one,) = alone.steps
            above = one["peak"] - one["base"]
            report.add(
                f"rl_vlm, {factor} x the tokens",
                [one["seconds"]],
                cpu_s=one["cpu"],
                peak_mib=one["peak"],
                base_mib=one["base"],
                above_mib=above,
                kib_per_token=above * 1024 / (factor * rows * length),
            )
    report.finish(args.out)


if __name__ == "__main__":
    main()
