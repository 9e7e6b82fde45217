"""Forward and backward of one GRPO update with a large vocabulary: the system against TRL's GRPOTrainer, in turns.

    python benchmarks/learner.py [--rounds N] [--threads N] [--kinds KIND ...] [--factors N ...] [--quick] [--out FILE]

Vocabulary 151,936, hidden 256, 2 layers, LoRA, 8 rows of 1024 tokens, float32. Every contender is a process with the
same weights and batch, and one computes at a time. Peak memory is that of the whole process. Loss and gradient must
agree. `lean` measures no entropies, which TRL always does. Then the system alone gets 1, 2 and 4 times the rows: only
activations may raise the MiB above the process before the step. `--kinds` and `--factors` without values leave out
either part.

CPU seconds tell more than wall time where others use the machine.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from models import random_model
from report import Report, command_line
from turns import Contender

KINDS = ("ours", "lean", "trl")  # the peer is the last
LABELS = {"ours": "rl_vlm", "lean": "rl_vlm, no entropies", "trl": "TRL"}
SHAPE = {
    "vocab_size": 151_936, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 704,
}  # fmt: skip
QUICK = {**SHAPE, "vocab_size": 6_000, "hidden_size": 64, "intermediate_size": 128}
_LOSS_TOLERANCE, _GRADIENT_TOLERANCE = 1e-5, 1e-3


class Learner(Contender):
    """A contender that makes forward and backward passes."""

    def __init__(self, kind: str, folder: Path, rows: int, length: int, threads: int, scratch: Path) -> None:
        self._gradients = scratch / f"{kind}-{rows}.npy"
        arguments = (kind, folder, rows, length, threads, "--gradients", self._gradients)
        super().__init__(LABELS[kind], "learner_contender.py", *arguments, OMP_NUM_THREADS=str(threads))
        self.rows = rows
        self.steps: list[dict[str, Any]] = []
        self.wait_until_ready()

    def step(self, keep: bool = True) -> None:
        """One forward and backward pass."""
        answer = self.ask("step")
        print(f"{self.label}, {self.rows} rows: {answer['seconds']:.1f} s", file=sys.stderr, flush=True)
        if keep:
            self.steps.append(answer)

    def median(self, figure: str) -> float:
        """Of the steps that were kept."""
        return statistics.median(one[figure] for one in self.steps)

    def figures(self) -> dict[str, float]:
        """Medians for a row of the report."""
        return {name: self.median(key) for name, key in (("cpu_s", "cpu"), ("peak_mib", "peak"), ("base_mib", "base"))}

    def gradients(self) -> np.ndarray:
        """Of the last step."""
        return np.load(self._gradients)  # type: ignore[no-any-return]


def compare(report: Report, contenders: Sequence[Learner], rounds: int) -> None:
    """Warm up, take turns, and add rows and ratios. Raises RuntimeError where results differ."""
    for contender in contenders:
        contender.step(keep=False)
    for number in range(rounds):
        for contender in contenders if number % 2 == 0 else contenders[::-1]:
            contender.step()
    *own, peer = contenders
    expected, loss = peer.gradients(), peer.median("loss")
    for contender in own:
        found, label = contender.gradients(), contender.label
        gap = abs(contender.median("loss") - loss)
        error = float(np.abs(found - expected).max() / np.abs(expected).max())
        if gap > _LOSS_TOLERANCE or error > _GRADIENT_TOLERANCE:
            raise RuntimeError(f"{label} and TRL differ: loss by {gap:.1e}, gradient by {error:.1e}.")
        report.notes.append(
            f"{label}: loss differs from TRL's by {gap:.1e}, the gradient by {error:.1e} of its largest element."
        )
    for contender in contenders:
        report.add(contender.label, [one["seconds"] for one in contender.steps], **contender.figures())
    for contender in own:
        for figure, name in (("peak", "peak memory"), ("seconds", "seconds"), ("cpu", "CPU seconds")):
            ratio = contender.median(figure) / peer.median(figure)
            report.ratios[f"{name}, {contender.label} / TRL (lower is better)"] = ratio


def main() -> None:
    """Command line."""
    parser = command_line(__doc__, "a small model and one round, to see that it runs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kinds", nargs="*", choices=KINDS[:-1], default=KINDS[:-1], help="beside TRL (default: all)")
    parser.add_argument("--factors", nargs="*", type=int, default=[1, 2, 4], help="of the rows, for the system alone")
    args = parser.parse_args()
    rows, length, shape, rounds = (2, 80, QUICK, 1) if args.quick else (8, 1024, SHAPE, args.rounds)
    report = Report(f"A policy update's passes: {rows} x {length} tokens, vocabulary {shape['vocab_size']:,}")
    with tempfile.TemporaryDirectory(prefix="rl-vlm-learner-") as name, contextlib.ExitStack() as processes:
        scratch = Path(name)
        folder = random_model(scratch / "model", **shape)

        def start(kind: str, factor: int = 1) -> Learner:
            return Learner(kind, folder, factor * rows, length, args.threads, scratch)

        contenders: list[Learner] = []
        for kind in (*args.kinds, KINDS[-1]) if args.kinds else ():
            contenders.append(start(kind))
            processes.callback(contenders[-1].close)
        if contenders:
            compare(report, contenders, rounds)
            report.finish(args.out)  # the rest takes minutes
        processes.close()
        for factor in args.factors:
            alone = start("ours", factor)
            processes.callback(alone.close)
            alone.step()
            above = alone.median("peak") - alone.median("base")
            per_token = above * 1024 / (factor * rows * length)
            label, seconds = f"rl_vlm, {factor} x the tokens", [alone.median("seconds")]
            report.add(label, seconds, **alone.figures(), above_mib=above, kib_per_token=per_token)
            processes.close()
    report.finish(args.out)


if __name__ == "__main__":
    main()
