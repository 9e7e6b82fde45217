"""Seconds per GRPO step: the system, the same recipe without Ray (the floor), and TRL, interleaved in one run.

    python benchmarks/loop.py [--quick] [--out FILE]

All contenders train the same tiny model on the same items with the same LoRA, group size 8 and 4 optimiser steps per
rollout. Each lives in a process of its own and only one steps at a time. The floor is the loop of
`examples/one_process.py` with the better of 1 and 2 torch threads. The system runs at policy lag 0 (sample, then
learn), at lags 1 and 2 (both at once), and as PPO with either critic.
"""

from __future__ import annotations

import statistics
from typing import Any

from report import Report, command_line
from turns import HERE, Contender

CONFIG = HERE.parent / "configs" / "quickstart.yaml"
PARTS = ("sample", "env", "score", "advantages", "learn", "publish")


class Stepper(Contender):
    """A contender that makes training steps."""

    def __init__(self, label: str, kind: str, *arguments: str) -> None:
        super().__init__(label, "loop_contender.py", kind, CONFIG, *arguments)
        self.steps: dict[int, list[dict[str, Any]]] = {}  # by their number of prompts

    def run(self, steps: int, prompts: int, keep: bool = True) -> list[dict[str, Any]]:
        """Make some steps; `keep` counts them."""
        taken: list[dict[str, Any]] = self.ask(f"{steps} {prompts}")
        if keep:
            self.steps.setdefault(prompts, []).extend(taken)
        return taken

    def totals(self, prompts: int) -> list[float]:
        """Seconds of each counted step."""
        return [step["total"] for step in self.steps[prompts]]


def measure(quick: bool, num_learners: int) -> Report:
    """Run everything and return the report."""
    report = Report("GRPO step: floor, Ray, TRL")
    sizes, rounds, steps = ((16,), 3, 5) if quick else ((16, 64), 6, 8)
    ours = (f"learner.num_learners={num_learners}", "algorithm.iterations=100000")
    floor = [Stepper("one process, 1 thread", "one", "--threads", "1")]
    bare = Stepper("rl_vlm, lag 0, no trajectories", "ours", *ours, "logging.trajectories_every=0")
    system = [Stepper("rl_vlm, lag 0", "ours", *ours), bare]
    peers: list[Stepper] = []
    if not quick:
        floor.append(Stepper("one process, 2 threads", "one", "--threads", "2"))
        further = {
            # Places of the env runners are made once, for both sizes: a round of 64 groups, or two, over two runners.
            "lag 1": ("rollout.max_policy_lag=1", "rollout.groups_per_runner=32"),
            "lag 2": ("rollout.max_policy_lag=2", "rollout.groups_per_runner=64"),
            "PPO, value head": ("algorithm.preset=ppo",),
            "PPO, critic adapter": ("algorithm.preset=ppo", "critic.kind=adapter"),
        }
        system += [Stepper(f"rl_vlm, {label}", "ours", *ours, *changes) for label, changes in further.items()]
        peers = [Stepper(f"TRL GRPOTrainer, {n} thread(s)", "trl", "--threads", str(n)) for n in (1, 2)]
    everyone = floor + system + peers
    try:
        for contender in everyone:
            contender.wait_until_ready()
        for prompts in sizes:
            running = [c for c in everyone if c not in peers or prompts == 16]
            for contender in running:
                contender.run(3, prompts, keep=False)
            for _ in range(rounds):
                for contender in running:
                    contender.run(steps, prompts)
            for contender in running:
                taken = contender.steps[prompts]
                parts = {part: statistics.median(step[part] for step in taken) for part in PARTS if part in taken[0]}
                report.add(f"{prompts}×8 {contender.label}", contender.totals(prompts), **parts)
            best = min(statistics.median(c.totals(prompts)) for c in floor)
            mine = statistics.median(system[0].totals(prompts))
            report.ratios[f"floor / rl_vlm at {prompts}×8"] = best / mine
            # Means: one step in ten writes trajectories.
            kept, without = (statistics.fmean(one.totals(prompts)) for one in system[:2])
            report.ratios[f"no trajectories / rl_vlm at {prompts}×8"] = without / kept
            if peers and prompts == 16:
                report.ratios["TRL / rl_vlm at 16×8"] = min(statistics.median(c.totals(16)) for c in peers) / mine
    finally:
        for contender in everyone:
            contender.close()
    return report


def main() -> None:
    """Command line."""
    parser = command_line(__doc__, "floor against lag 0 at 16×8 only")
    parser.add_argument("--learners", type=int, default=0, help="learner actors; 0: inside the driver")
    args = parser.parse_args()
    measure(args.quick, args.learners).finish(args.out)


if __name__ == "__main__":
    main()
