"""The commands around runs: `rl-vlm train`, `eval`, `rollout` and `export`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from rl_vlm.cli.errors import error_report
from rl_vlm.cli.options import (
    Adapter,
    Config,
    DeleteFirst,
    NewRunDir,
    Overrides,
    Overwrite,
    Resume,
    load_run,
    refuse_both,
)

commands = typer.Typer()

RunDir = Annotated[Path | None, typer.Option(help="A run folder, whose trained adapter (or agent) is used.")]
Out = Annotated[Path | None, typer.Option(help="Write the results to this file as well.")]


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
    from rl_vlm.runs import preflight
    from rl_vlm.runs import train as training

    if dry_run:
        for name, value in preflight.inspect_run(run).items():
            typer.echo(f"{name}: {value}")
        typer.echo(f"{run.name}: nothing is wrong with the configuration, the model and the data.")
        return
    error_report.folder = folder = run_dir or training.default_run_dir(run)
    result = training.train(run, run_dir, resume=resume, overwrite=overwrite)
    typer.echo(_summary(result, folder))
    if result.get("status") != "done":
        raise typer.Exit(1)


@commands.command(
    "eval", epilog="Example: rl-vlm eval configs/quickstart.yaml --run-dir runs/quickstart --out eval.json"
)
def evaluate(
    config: Config,
    overrides: Overrides = None,
    adapter: Adapter = None,
    run_dir: RunDir = None,
    blind: Annotated[
        bool,
        typer.Option("--blind", help="Also with blank images, and with those of other items: does it need to see?"),
    ] = False,
    out: Out = None,
) -> None:
    """Measure a policy on the held-out split, or a preference run's agent on its evaluation episodes; print JSON."""
    run = load_run(config, overrides)
    source = run_dir or (config if config.is_dir() and adapter is None else None)
    _check_out(out)
    results = run.spec.load("evaluate")(run, adapter=adapter, run_dir=source, out=out, blind=blind)
    typer.echo(json.dumps(results, indent=2))


@commands.command(epilog="Example: rl-vlm rollout configs/quickstart.yaml --episodes 8 --temperature 0")
def rollout(
    config: Config,
    overrides: Overrides = None,
    adapter: Adapter = None,
    run_dir: RunDir = None,
    episodes: Annotated[int, typer.Option(min=1, help="How many episodes.")] = 4,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Episodes at the same time.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy. Default: the configuration's.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the likeliest tokens with this share, in (0, 1].")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=0, help="Sample from this many likeliest tokens; 0: from all.")
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Per turn.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Default: the configuration's.")] = None,
    out: Out = None,
) -> None:
    """Play episodes and print one JSON line for each, and a summary at the end."""
    run = load_run(config, overrides)
    _check_out(out)
    from rl_vlm.models.adapter import find_adapter
    from rl_vlm.runs import evaluate as harness

    options = {
        "batch_size": batch_size,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "max_new_tokens": max_new_tokens,
        "seed": seed,
    }
    sampling = {name: value for name, value in options.items() if value is not None}
    summary = harness.rollout(
        run, adapter=find_adapter(adapter, run_dir), episodes=episodes, sampling=sampling, out=out
    )
    typer.echo(json.dumps({"summary": summary}))


@commands.command(epilog="Example: rl-vlm export runs/quickstart my-model")
def export(
    source: Annotated[Path, typer.Argument(metavar="RUN_OR_ADAPTER", help="A run folder or a peft adapter folder.")],
    out: Annotated[Path, typer.Argument(help="The Hugging Face model folder to write.")],
    model: Annotated[str | None, typer.Option(help="The base model; by default the one that the run names.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Merge a trained adapter into its model and write an ordinary Hugging Face folder."""
    from rl_vlm.models.export import export_model
    from rl_vlm.models.loading import quiet_libraries

    quiet_libraries()
    typer.echo(f"Wrote {export_model(source, out, model, overwrite)}: weights, processor and chat template.")


def _check_out(out: Path | None) -> None:
    """Refuse an output file that cannot be written before the work starts, not after it."""
    from rl_vlm.types import UserInputError

    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise UserInputError(f"--out {out} cannot be written: name a file in a folder that exists.")


def _summary(result: dict[str, Any], folder: Path) -> str:
    parts = [f"{result.get('status')} after {result.get('iterations')} {result.get('unit', 'iterations')}"]
    # A preference run's own reward is learned and changes its scale: only its evaluation is comparable over a run.
    reward = "evaluation_reward" if "evaluation_reward_after" in result else "reward"
    for label, name in (("accuracy", "accuracy"), ("reward", reward)):
        before, after = result.get(f"{name}_before"), result.get(f"{name}_after")
        if before is not None and after is not None:
            parts.append(f"{label} {before:.3f} → {after:.3f}")
    return f"{', '.join(parts)}; see {folder / 'curve.png'}"
