"""Presets of losses and estimators compared on several seeds: the table and figure of docs/benchmarks.md.

python tune/compare_losses.py --quick --out runs/losses
ray job submit --working-dir . -- python tune/compare_losses.py --out /shared/losses
"""

from pathlib import Path

from rl_vlm.config.sweep import SweepConfig
from rl_vlm.sweeps.results import report_best
from rl_vlm.sweeps.script import SweepArguments, run_script
from rl_vlm.sweeps.sweep import run_sweep

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
SMALL = ("serving.num_replicas=1", "rollout.num_env_runners=1", "resources.num_cpus=8")
PRESETS = ("grpo", "dapo", "dr_grpo", "gspo", "cispo", "sapo", "rloo", "reinforce_pp")


def work(given: SweepArguments) -> None:
    iterations = 30 if given.quick else 100
    run = given.recipe(
        CONFIG,
        *SMALL,
        f"algorithm.iterations={iterations}",
        f"evaluation.every={iterations // 2}",
        "evaluation.num_items=256",
    )
    sweep = SweepConfig.model_validate({
        "space": {
            "algorithm.preset": {"grid": list(PRESETS[:3] if given.quick else PRESETS)},
            "seed": {"grid": [0, 1] if given.quick else [0, 1, 2]},
        },
        "max_concurrent": 2,
    })  # fmt: skip
    report_best(run_sweep(run, sweep, given.out, resume=given.resume), sweep.metric, given.out)


if __name__ == "__main__":
    run_script(__doc__, "compare-losses", work)
