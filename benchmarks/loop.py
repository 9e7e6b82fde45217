"""Seconds per GRPO step: the system, the same recipe without Ray (the floor), and TRL, interleaved in one run.

    python benchmarks/loop.py [--quick] [--out FILE]

All contenders train the same tiny model on the same items with the same LoRA, group size 8 and 4 optimiser steps per
rollout. Each lives in a process of its own and only one steps at a time. The floor is the bare loop with the better of
1 and 2 torch threads; the system runs at policy lag 0 (sample, then learn) and, for comparison, at lags 1 and 2 (both at
once) and as PPO with either critic.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from report import Report

HERE = Path(__file__).parent
CONFIG = HERE.parent / "configs" / "quickstart.yaml"
PARTS = ("sample", "env", "score", "advantages", "learn", "publish", "total")


class Contender:
    """A contender's process."""

    def __init__(self, label: str, kind: str, *arguments: str) -> None:
        self.label = label
        self.seconds: dict[int, list[dict[str, float]]] = {}
        command = [sys.executable, str(HERE / "contender.py"), kind, str(CONFIG), *arguments]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        os.set_blocking(self._process.stderr.fileno(), False)  # type: ignore[union-attr]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            errors = (self._process.stderr.read() or "")[-2000:]  # type: ignore[union-attr]
            raise RuntimeError(f"{self.label} ended: {errors}")
        return json.loads(line)  # type: ignore[no-any-return]

    def wait_until_ready(self) -> None:
        """Wait for its models to load."""
        self._answer()

    def run(self, steps: int, prompts: int, keep: bool = True) -> None:
        """Do some steps; `keep` counts them."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"step {steps} {prompts}\n")
        self._process.stdin.flush()
        taken = self._answer()["steps"]
        if keep:
            self.seconds.setdefault(prompts, []).extend(taken)

    def totals(self, prompts: int) -> list[float]:
        """Seconds of each counted step."""
        return [step["total"] for step in self.seconds[prompts]]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()


def measure(quick: bool, seed_learners: int) -> Report:
    """Run everything and return the report."""
    report = Report("GRPO step: floor, Ray, TRL")
    sizes, rounds, steps = ((16,), 3, 5) if quick else ((16, 64), 6, 8)
    ours = f"learner.num_learners={seed_learners}"
    floor = [Contender("bare loop, 1 thread", "bare", "--threads", "1")]
    system = [Contender("rl_vlm, lag 0", "ours", ours, "algorithm.iterations=100000")]
    peers: list[Contender] = []
    if not quick:
        floor.append(Contender("bare loop, 2 threads", "bare", "--threads", "2"))
        further = {
            # Places of the env runners are made once, for both sizes: a round of 64 groups, or two, over two runners.
            "lag 1": ("rollout.max_policy_lag=1", "rollout.groups_per_runner=32"),
            "lag 2": ("rollout.max_policy_lag=2", "rollout.groups_per_runner=64"),
            "PPO, value head": ("algorithm.preset=ppo",),
            "PPO, critic adapter": ("algorithm.preset=ppo", "critic.kind=adapter"),
        }
        for label, changes in further.items():
            system.append(Contender(f"rl_vlm, {label}", "ours", ours, "algorithm.iterations=100000", *changes))
        peers = [Contender(f"TRL GRPOTrainer, {n} thread(s)", "trl", "--threads", str(n)) for n in (1, 2)]
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
                taken = contender.seconds[prompts]
                parts = {
                    part: statistics.median(step[part] for step in taken) for part in PARTS[:-1] if part in taken[0]
                }
                report.add(f"{prompts}×8 {contender.label}", contender.totals(prompts), **parts)
            best = min(statistics.median(c.totals(prompts)) for c in floor)
            mine = statistics.median(system[0].totals(prompts))
            report.ratios[f"floor / rl_vlm at {prompts}×8"] = best / mine
            if peers and prompts == 16:
                report.ratios["TRL / rl_vlm at 16×8"] = min(statistics.median(c.totals(16)) for c in peers) / mine
    finally:
        for contender in everyone:
            contender.close()
    return report


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="floor against lag 0 at 16×8 only")
    parser.add_argument("--learners", type=int, default=0, help="learner actors; 0: inside the driver")
    parser.add_argument("--out", type=Path, help="write JSON here")
    args = parser.parse_args()
    measure(args.quick, args.learners).finish(args.out)


if __name__ == "__main__":
    main()
