"""Is this checkout as fast as another one? Training steps, a learner's passes and served answers of both, in turns.

    git worktree add ../old COMMIT && make -C ../old install
    python benchmarks/against.py ../old [--only loop learner serving] [--rounds N] [--quick] [--out FILE]

Each contender is a process of its own with the code and the recipes of its checkout; only one works at a time. The
ratios are other / ours of the medians: above 1 this checkout is faster. A change is within the noise where the
quartiles of the two overlap.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from learner import QUICK, SHAPE
from models import random_model, shape
from report import Report, command_line
from turns import HERE, Contender

OURS = HERE.parent
KINDS = ("loop", "learner", "serving")
_THREADS = {"OMP_NUM_THREADS": "1"}


def loop(tree: Path, folder: Path, quick: bool) -> tuple[Contender, Callable[[Contender], list[float]]]:
    """Seconds of GRPO steps of the quickstart."""
    changes = ("learner.num_learners=0", "algorithm.iterations=100000")
    contender = Contender(str(tree), "loop_contender.py", "ours", tree / "configs/quickstart.yaml", *changes, tree=tree)
    return contender, lambda one: [step["total"] for step in one.ask(f"{2 if quick else 8} 16")]


def learner(tree: Path, folder: Path, quick: bool) -> tuple[Contender, Callable[[Contender], list[float]]]:
    """Seconds of forward and backward of an update."""
    model, rows, length = folder / "learner", *((2, 80) if quick else (8, 1024))
    if not model.exists():
        random_model(model, **(QUICK if quick else SHAPE))
    script, gradients = "learner_contender.py", folder / f"{tree.name}.npy"
    contender = Contender(str(tree), script, "ours", model, rows, length, 2, "--gradients", gradients, tree=tree)
    return contender, lambda one: [one.ask("step")["seconds"]]


def serving(tree: Path, folder: Path, quick: bool) -> tuple[Contender, Callable[[Contender], list[float]]]:
    """Seconds per token of a Serve replica, 32 requests at a time."""
    if not (model := folder / "serving").exists():
        random_model(model, max_pixels=512 * 512, **shape("6m"))
    contender = Contender(
        str(tree), "serving_contender.py", "handle", model, "--engine", "transformers", tree=tree, **_THREADS
    )

    def seconds(one: Contender) -> list[float]:
        answer: dict[str, Any] = one.ask("32")
        return [answer["seconds"] / answer["tokens"]]

    return contender, seconds


def compare(report: Report, kind: str, other: Path, folder: Path, rounds: int, quick: bool) -> None:
    """Add a row for each checkout and their ratio."""
    start = {"loop": loop, "learner": learner, "serving": serving}[kind]
    with contextlib.ExitStack() as processes:
        sides = []
        for tree in (OURS, other):
            contender, measure = start(tree, folder, quick)
            processes.callback(contender.close)
            contender.wait_until_ready()
            measure(contender)  # not counted
            sides.append((contender, measure, list[float]()))
        for number in range(rounds):
            for contender, measure, seconds in sides if number % 2 == 0 else sides[::-1]:
                seconds += measure(contender)
    ours, others = (seconds for *_, seconds in sides)
    report.add(f"{kind}, this checkout", ours)
    report.add(f"{kind}, {other.name}", others)
    report.ratios[f"{kind}: {other.name} / this checkout"] = statistics.median(others) / statistics.median(ours)


def main() -> None:
    """Command line."""
    parser = command_line(__doc__, "small sizes and two rounds, to see that it runs")
    parser.add_argument("other", type=Path, help="the folder of the other checkout")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    report = Report("This checkout against another one")
    with tempfile.TemporaryDirectory(prefix="rl-vlm-against-") as scratch:
        for kind in args.only:
            rounds = 2 if args.quick else args.rounds
            compare(report, kind, args.other.resolve(), Path(scratch), rounds, args.quick)
    report.finish(args.out)


if __name__ == "__main__":
    main()
