"""GRPO's learning rate, LoRA rank, clip range and group size: random settings, of which ASHA stops the worst early.

    python tune/grpo_asha.py --quick --out runs/asha
    ray job submit --working-dir . -- python tune/grpo_asha.py --out /shared/asha

The space is wide on purpose: most of its learning rates are too low or too high to learn Shapes within the budget.
"""

from pathlib import Path

from rl_vlm.config.sweep import SweepConfig
from rl_vlm.sweeps.results import report_best
from rl_vlm.sweeps.script import SweepArguments, run_script
from rl_vlm.sweeps.sweep import run_sweep

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
SMALL = ("serving.num_replicas=1", "rollout.num_env_runners=1", "resources.num_cpus=8")


def work(given: SweepArguments) -> None:
    iterations, every = (60, 15) if given.quick else (160, 20)
    run = given.recipe(
        CONFIG, *SMALL, f"algorithm.iterations={iterations}", f"evaluation.every={every}", "evaluation.num_items=256"
    )
    sweep = SweepConfig.model_validate({
        "space": {
            "learner.lr": {"loguniform": [2e-5, 2e-2]},
            "model.lora.rank": {"choice": [4, 8, 16]},
            "algorithm.clip_high": {"choice": [0.2, 0.28]},
            "rollout.group_size": {"choice": [4, 8]},
        },
        "num_samples": 6 if given.quick else 16,
        "max_concurrent": 2,
        "stopping": {"name": "asha", "grace_period": every, "reduction_factor": 2},
    })  # fmt: skip
    report_best(run_sweep(run, sweep, given.out, resume=given.resume), sweep.metric, given.out)


if __name__ == "__main__":
    run_script(__doc__, "grpo-asha", work)
