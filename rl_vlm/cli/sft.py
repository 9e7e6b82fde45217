"""The commands of supervised fine-tuning: `rl-vlm sft` and `rl-vlm sft-example`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rl_vlm.cli.errors import error_report
from rl_vlm.cli.options import Config, DeleteFirst, NewRunDir, Overrides, Resume, refuse_both
from rl_vlm.cli.output import say

commands = typer.Typer()


@commands.command(epilog="Example: rl-vlm sft configs/sft_tiny.yaml sft.data=my-data learner.lr=1e-4")
def sft(
    config: Config,
    overrides: Overrides = None,
    run_dir: NewRunDir = None,
    resume: Resume = False,
    overwrite: DeleteFirst = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check configuration, model and every conversation; train nothing.")
    ] = False,
) -> None:
    """Fine-tune on conversations with images (LoRA). Ctrl-C saves a checkpoint; --resume goes on from it."""
    from rl_vlm.config import load_sft_config

    refuse_both(resume, overwrite)
    job = load_sft_config(config / "config.yaml" if config.is_dir() else config, overrides or ())
    from rl_vlm.runs import sft as tuning

    if dry_run:
        for name, value in tuning.inspect_sft(job)[0].items():
            say(f"{name}: {value}")
        say(f"{job.name}: nothing is wrong with the configuration, the model and the data.")
        return
    if resume and config.is_dir():  # the run itself, wherever it is
        run_dir = run_dir or str(config)
    place = run_dir or str(tuning.default_run_dir(job))
    error_report.folder = Path(place)
    result = tuning.sft(job, run_dir, resume=resume, overwrite=overwrite, progress=say)
    say(_summary(result, place))
    if result.get("status") != "done":
        raise typer.Exit(1)


@commands.command(
    "sft-example", epilog="Example: rl-vlm sft-example my-data; rl-vlm sft configs/sft_tiny.yaml sft.data=my-data"
)
def sft_example(
    folder: Annotated[Path, typer.Argument(help="The folder to write: new, or empty.")],
) -> None:
    """Write the built-in conversations about shapes as files, as an example of the form that your own take."""
    from rl_vlm.supervised.example import write_example

    counts = ", ".join(f"{count} conversations in {split}.jsonl" for split, count in write_example(folder).items())
    say(f"Wrote {folder}: {counts}.")


def _summary(result: dict[str, Any], place: str) -> str:
    parts = [f"{result.get('status')} after {result.get('iterations')} steps"]
    for label, name in (("held-out loss", "eval_loss"), ("exact answers", "accuracy")):
        before, after = result.get(f"{name}_before"), result.get(f"{name}_after")
        if before is not None and after is not None:
            parts.append(f"{label} {before:.3f} → {after:.3f}")
    return f"{', '.join(parts)}; the adapter is in {place}/adapter, the curve in {place}/curve.png"
