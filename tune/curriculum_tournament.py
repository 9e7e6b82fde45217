"""A curriculum as a tournament: several trials learn each stage, and the best one's adapter starts the next stage's trials.

    python tune/curriculum_tournament.py --quick --out runs/tournament
    ray job submit --working-dir . -- python tune/curriculum_tournament.py --out /shared/tournament

Beside it one run trains on the last stage alone with as many samples as the whole tournament. The table compares both on
the same held-out items of the last stage.
"""  # noqa: E501

from pathlib import Path

from rl_vlm.config.sweep import SweepConfig
from rl_vlm.files import write_atomic
from rl_vlm.sweeps.results import TrialResult
from rl_vlm.sweeps.script import SweepArguments, run_script
from rl_vlm.sweeps.sweep import run_sweep

CONFIG = Path(__file__).parents[1] / "configs" / "gridwalk_tiny.yaml"
SMALL = ("serving.num_replicas=1", "rollout.num_env_runners=1", "resources.num_cpus=8", "algorithm.kl_coef=0.05")
STAGES = {
    "small": ("env.kwargs.size=3", "env.kwargs.walls=1", "env.kwargs.holes=1"),
    "middle": ("env.kwargs.size=3",),
    "large": (),
}
# Held-out items are those of the last stage in all of them.
LARGE = "evaluation.variants={default: {size: 4, walls: 2, holes: 2, min_distance: 3}}"


def work(given: SweepArguments) -> None:
    iterations, trials = (12, 2) if given.quick else (100, 4)
    stages = {name: STAGES[name] for name in ("small", "large")} if given.quick else STAGES
    rates = {"learner.lr": {"grid": [1e-3, 3e-3] if given.quick else [5e-4, 1e-3, 2e-3, 4e-3]}}

    def compete(name: str, count: int, changes: tuple[str, ...], space: dict[str, object]) -> list[TrialResult]:
        folder = given.out / name
        run = given.recipe(
            CONFIG, *SMALL, LARGE, f"name={name}", f"algorithm.iterations={count}", f"evaluation.every={count}",
            "evaluation.num_items=128", *changes,
        )  # fmt: skip
        sweep = SweepConfig.model_validate({"space": space, "max_concurrent": 2, "metric": "held_out/reward"})
        return run_sweep(run, sweep, folder, resume=given.resume and (folder / "sweep.yaml").is_file())

    given.out.mkdir(parents=True, exist_ok=True)
    rows, start = [], ()
    for name, changes in stages.items():
        found = compete(name, iterations, (*changes, *start), rates)
        rows.append((f"stage {name}, the best of {trials}", found[0]))
        start = (f"model.adapter={given.out / name / 'best' / 'adapter'}",)
    alone = compete("alone", iterations * trials * len(stages), (), {"learner.lr": {"grid": [2e-3]}})
    rows.append(("one run on the last stage, equal samples", alone[0]))
    table = "| | held-out reward before | after | best |\n|---|---|---|---|\n"
    table += "".join(f"| {name} | {trial.before:.3f} | {trial.last:.3f} | {trial.best:.3f} |\n" for name, trial in rows)
    write_atomic(given.out / "results.md", table)
    print(table)


if __name__ == "__main__":
    run_script(__doc__, "curriculum-tournament", work)
