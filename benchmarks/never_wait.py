"""Trajectories learned from per second where episodes take very different times: lag 0, and groups one by one.

    python benchmarks/never_wait.py [--quick] [--out FILE]

The environment (`slow_steps.py`) sleeps, so the engine is not the limit. All contenders train the tiny model with
group size 4. At lag 0 they sample, then learn. At lag 2 they learn from groups as these become complete, and wait for
late groups or drop them. Each lives in a process of its own and one steps at a time. Unmeasured steps come before
each measured stretch, so that nothing counts that was sampled during another's turn. `engine` is the replicas' CPU
seconds per second, `learner` the share of time in which it learns.
"""

from __future__ import annotations

import statistics

from loop import Stepper
from report import Report, command_line
from turns import HERE

PROMPTS, SIZE = 16, 4
SETTINGS = (
    f"env.id={HERE / 'slow_steps.py'}", "env.kwargs={task: count}", f"rollout.prompts_per_iteration={PROMPTS}",
    f"rollout.group_size={SIZE}", "rollout.require_end_of_turn=false", "algorithm.iterations=100000",
    "learner.num_learners=0",
)  # fmt: skip
LAG_0, NEVER_WAIT, DROP = "lag 0", "lag 2", "lag 2, late groups dropped"


def measure(quick: bool) -> Report:
    """Run everything and return the report."""
    report = Report("Rollouts of very different length: trajectories learned from per second")
    rounds, steps = (3, 4) if quick else (6, 8)
    contenders = [Stepper(LAG_0, "ours", *SETTINGS), Stepper(NEVER_WAIT, "ours", *SETTINGS, "rollout.max_policy_lag=2")]
    if not quick:
        contenders.append(Stepper(DROP, "ours", *SETTINGS, "rollout.max_policy_lag=2", "rollout.late_groups=drop"))
    rates: dict[str, list[float]] = {contender.label: [] for contender in contenders}
    try:
        for contender in contenders:
            contender.wait_until_ready()
        for _ in range(rounds):
            for contender in contenders:
                contender.run(3, PROMPTS, keep=False)
                taken = contender.run(steps, PROMPTS)
                rate = sum(step["trajectories"] for step in taken) / sum(step["total"] for step in taken)
                rates[contender.label].append(rate)
        for contender in contenders:
            taken = contender.steps[PROMPTS]
            total = sum(contender.totals(PROMPTS))
            report.add(
                contender.label, rates[contender.label], "1/s", learner=sum(step["learn"] for step in taken) / total,
                engine=sum(step["engine"] for step in taken) / total,
                utilisation=statistics.mean(step["utilisation"] for step in taken),
                oldest=max(step["lag_max"] for step in taken), dropped=taken[-1]["too_old"],
            )  # fmt: skip
        ratio = statistics.median(rates[NEVER_WAIT]) / statistics.median(rates[LAG_0])
        report.ratios[f"{NEVER_WAIT} / {LAG_0}"] = ratio
    finally:
        for contender in contenders:
            contender.close()
    return report


def main() -> None:
    """Command line."""
    args = command_line(__doc__, "fewer steps, and only the contenders of the ratio").parse_args()
    measure(args.quick).finish(args.out)


if __name__ == "__main__":
    main()
