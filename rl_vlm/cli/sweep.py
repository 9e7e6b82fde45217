"""`rl-vlm sweep`: many runs of one configuration with Ray Tune."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rl_vlm.cli.options import Config, Overrides, load_run
from rl_vlm.cli.output import say

commands = typer.Typer()


@commands.command(epilog="Example: rl-vlm sweep configs/quickstart.yaml --space tune/spaces/grpo.yaml")
def sweep(
    config: Config,
    overrides: Overrides = None,
    space: Annotated[Path, typer.Option(help="The YAML file that says what varies; see tune/spaces/.")] = ...,  # type: ignore[assignment]
    run_dir: Annotated[str | None, typer.Option(help="Where the results go; runs/NAME-sweep by default.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an interrupted sweep; nothing is repeated.")
    ] = False,
) -> None:
    """Train with many settings and compare them: a table, a figure, and the best configuration and adapter."""
    from rl_vlm.config.sweep import load_sweep

    run, found = load_run(config, overrides), load_sweep(space)
    from rl_vlm.sweeps.sweep import run_sweep, sweep_folder

    folder = sweep_folder(run_dir or Path("runs") / f"{run.name}-sweep")
    trials = run_sweep(run, found, folder, resume=resume)
    best = trials[0]
    settings = ", ".join(f"{key}={value}" for key, value in best.settings.items())
    say(
        f"{sum(trial.finished for trial in trials)} of {len(trials)} trials finished; best {found.metric} {best.best:.3f} with {settings}"
    )
    say(f"See {folder / 'results.md'}, {folder / 'results.png'} and {folder / 'best'}.")
    if not all(trial.finished for trial in trials):
        raise typer.Exit(1)
