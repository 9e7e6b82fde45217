"""Population-based training of GRPO: all trials train a while, then the worst copy the best one's weights and vary its settings.

    python tune/grpo_pbt.py --quick --out runs/pbt
    ray job submit --working-dir . -- python tune/grpo_pbt.py --out /shared/pbt

Synchronous: nobody is replaced before everybody has come to the end of the interval.
"""  # noqa: E501

from pathlib import Path

from rl_vlm.config.sweep import SweepConfig
from rl_vlm.sweeps.results import report_best
from rl_vlm.sweeps.script import SweepArguments, run_script
from rl_vlm.sweeps.sweep import run_sweep

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
SMALL = ("serving.num_replicas=1", "rollout.num_env_runners=1", "resources.num_cpus=8", "learner.lr_schedule=constant")


def work(given: SweepArguments) -> None:
    iterations, interval, population = (45, 15, 3) if given.quick else (160, 20, 6)
    run = given.recipe(
        CONFIG, *SMALL, f"algorithm.iterations={iterations}", f"evaluation.every={interval}", "evaluation.num_items=256"
    )
    sweep = SweepConfig.model_validate({
        "space": {"learner.lr": {"loguniform": [1e-4, 1e-2]}, "algorithm.clip_high": {"uniform": [0.1, 0.4]}},
        "num_samples": population,
        "shared": True,  # a trial that copies another starts anew, and replicas of its own would too
        "stopping": {"name": "pbt", "grace_period": interval},
    })  # fmt: skip
    report_best(run_sweep(run, sweep, given.out, resume=given.resume), sweep.metric, given.out)


if __name__ == "__main__":
    run_script(__doc__, "grpo-pbt", work)
