"""The preference loop's labels per session, segment length and reward model, on CartPole with a scripted teacher.

    python tune/preference_sweep.py --quick --out runs/preferences
    python tune/preference_sweep.py preference.labels.source=vlm --out runs/preferences-vlm    # labelled by the tiny VLM
    ray job submit --working-dir . -- python tune/preference_sweep.py --out /shared/preferences

Every setting gets the same number of labels in all. The agent's return on held-out starts decides.
"""  # noqa: E501

from pathlib import Path

from rl_vlm.config.sweep import SweepConfig
from rl_vlm.sweeps.results import report_best
from rl_vlm.sweeps.script import SweepArguments, run_script
from rl_vlm.sweeps.sweep import run_sweep

CONFIG = Path(__file__).parents[1] / "configs" / "rl_vlm_f" / "cartpole_tiny.yaml"


def work(given: SweepArguments) -> None:
    steps = 2000 if given.quick else 4000
    run = given.recipe(
        CONFIG, "preference.labels.source=scripted", "resources.num_cpus=8", f"preference.total_steps={steps}",
        f"preference.evaluation.every={steps // 2}", "preference.max_feedback=400",
    )  # fmt: skip
    segments = {"preference.session_pairs": {"grid": [25, 100]}, "preference.segment_length": {"grid": [1, 10]}}
    more = {"preference.reward_model.architecture": {"grid": ["cnn", "resnet18"]}, "seed": {"grid": [0, 1, 2]}}
    sweep = SweepConfig.model_validate({
        "space": segments if given.quick else {**segments, **more},
        "metric": "held_out/reward",
        "max_concurrent": 2,
    })  # fmt: skip
    report_best(run_sweep(run, sweep, given.out, resume=given.resume), sweep.metric, given.out)


if __name__ == "__main__":
    run_script(__doc__, "preference-sweep", work)
