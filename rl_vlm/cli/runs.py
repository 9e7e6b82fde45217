"""The commands around runs: `rl-vlm train`, `plan` and `export`. Those that measure are in evaluation.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from rl_vlm.cli.errors import error_report
from rl_vlm.cli.options import (
    Config,
    DeleteFirst,
    NewRunDir,
    Overrides,
    Overwrite,
    Resume,
    load_run,
    refuse_both,
)
from rl_vlm.cli.output import say

commands = typer.Typer()


@commands.command(epilog="Example: rl-vlm train configs/quickstart.yaml learner.lr=1e-3 --run-dir runs/my-first")
def train(
    config: Config,
    overrides: Overrides = None,
    run_dir: NewRunDir = None,
    resume: Resume = False,
    overwrite: DeleteFirst = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check configuration, model and data; train nothing.")
    ] = False,
) -> None:
    """Train a policy. Ctrl-C saves a checkpoint; --resume goes on from it."""
    refuse_both(resume, overwrite)
    run = load_run(config, overrides)
    from rl_vlm.runs import kinds
    from rl_vlm.runs import train as training

    if dry_run:
        for name, value in kinds.inspect_run(run).items():
            say(f"{name}: {value}")
        for sentence in run.notes():
            say(sentence)
        say(f"{run.name}: nothing is wrong with the configuration, the model and the data.")
        return
    if resume and config.is_dir():  # the run itself, wherever it is
        run_dir = run_dir or str(config)
    place = run_dir or str(training.default_run_dir(run))
    error_report.folder = Path(place)
    result = training.train(run, run_dir, resume=resume, overwrite=overwrite)
    say(_summary(result, place))
    if result.get("status") != "done":
        raise typer.Exit(1)


@commands.command(epilog="Example: rl-vlm plan configs/geo3k_qwen3vl_4b.yaml --gpu-gib 47.4")
def plan(
    config: Config,
    overrides: Overrides = None,
    gpu_gib: Annotated[
        float | None,
        typer.Option(
            min=1.0, help="Memory of a GPU; else this machine's, else the card that model.gpu_memory_gib names."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, sizes in bytes.")] = False,
) -> None:
    """Print how much memory a run needs on each GPU, part by part, from the model's shapes alone. Code 1: it does not fit."""
    run = load_run(config, overrides)
    from rl_vlm.runs.memory import describe, make_plan

    found = make_plan(run, gpu_gib)
    typer.echo(json.dumps(found.as_dict(), indent=2) if as_json else "\n".join(describe(run, found)))
    if not found.fits:
        raise typer.Exit(1)


@commands.command(epilog="Example: rl-vlm export runs/quickstart my-model")
def export(
    source: Annotated[
        Path, typer.Argument(metavar="RUN_OR_ADAPTER", help="A run folder, or a folder of what was trained.")
    ],
    out: Annotated[Path, typer.Argument(help="The Hugging Face model folder to write.")],
    model: Annotated[str | None, typer.Option(help="The base model; by default the one that the run names.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Write what a run trained as an ordinary Hugging Face folder: its adapter merged into the model, or all weights."""
    from rl_vlm.models.export import export_model
    from rl_vlm.models.loading import quiet_libraries

    quiet_libraries()
    say(f"Wrote {export_model(source, out, model, overwrite)}: weights, processor and chat template.")


def _summary(result: dict[str, Any], place: str) -> str:
    parts = [f"{result.get('status')} after {result.get('iterations')} {result.get('unit', 'iterations')}"]
    # A preference run's own reward is learned and changes its scale: only its evaluation is comparable over a run.
    reward = "evaluation_reward" if "evaluation_reward_after" in result else "reward"
    for label, name in (("accuracy", "accuracy"), ("reward", reward)):
        before, after = result.get(f"{name}_before"), result.get(f"{name}_after")
        if after is not None:  # there is no before of a single row
            parts.append(f"{label} {after:.3f}" if before is None else f"{label} {before:.3f} → {after:.3f}")
    return f"{', '.join(parts)}; see {place}/curve.png"
