"""SAC updates per second: the system, eager and compiled, against Stable-Baselines3, interleaved.

    python benchmarks/sac.py [--quick] [--out FILE]

Equal networks and batches on Pendulum-v1. Each contender lives in a process of its own, pinned to the same core, and
one updates at a time. An update samples a batch from the replay buffer and makes one step of both critics, of the
actor, of alpha and of the targets. Ours goes through RLlib's learner. Rates are per second of CPU time, so that
another process on the core does not count. SBX (JAX) takes part where it is installed: `pip install sbx-rl`.
"""

from __future__ import annotations

import statistics
from importlib.util import find_spec

from report import Report, command_line
from turns import Contender

SIZES = ((256, 2, 256), (256, 3, 512))
CONTENDERS = ("eager", "compiled", "sb3", *(["sbx"] if find_spec("sbx") else []))
LABELS = {"eager": "rl_vlm", "compiled": "rl_vlm, compiled", "sb3": "Stable-Baselines3", "sbx": "SBX"}


class Updater(Contender):
    """A contender that makes SAC updates."""

    def __init__(self, kind: str, size: tuple[int, int, int]) -> None:
        variables = {"OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu", "RAY_USAGE_STATS_ENABLED": "0"}
        super().__init__(LABELS[kind], "sac_contender.py", kind, *size, **variables)
        self.kind = kind
        self.rates: list[float] = []

    def run(self, updates: int, keep: bool = True) -> None:
        """Make some updates; `keep` counts them."""
        spent = self.ask(str(updates))
        if keep:
            self.rates.append(updates / spent)


def measure(quick: bool) -> Report:
    """Run everything and return the report."""
    report = Report("SAC updates per second of one core")
    kinds = [kind for kind in CONTENDERS if not (quick and kind == "compiled")]
    rounds, updates = (3, 60) if quick else (10, 100)
    for size in SIZES[:1] if quick else SIZES:
        hidden, depth, batch = size
        name = f"{hidden}×{depth} batch {batch}"
        contenders = [Updater(kind, size) for kind in kinds]
        try:
            for contender in contenders:
                contender.wait_until_ready()
                contender.run(updates, keep=False)  # compiles, and warms up
            for _ in range(rounds):
                for contender in contenders:
                    contender.run(updates)
        finally:
            for contender in contenders:
                contender.close()
        medians = {}
        for contender in contenders:
            report.add(f"{name} {contender.label}", contender.rates, unit="/s")
            medians[contender.kind] = statistics.median(contender.rates)
        for kind in ("eager", "compiled"):
            for peer in ("sb3", "sbx"):
                if {kind, peer} <= medians.keys():
                    report.ratios[f"{LABELS[kind]} / {LABELS[peer]} at {name}"] = medians[kind] / medians[peer]
    return report


def main() -> None:
    """Command line."""
    args = command_line(__doc__, "end within a minute: one size, nothing compiled").parse_args()
    measure(args.quick).finish(args.out)


if __name__ == "__main__":
    main()
