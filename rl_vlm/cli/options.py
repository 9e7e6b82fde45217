"""Arguments and options that several commands share, and how they read a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rl_vlm.config import TrainConfig

Config = Annotated[Path, typer.Argument(help="A YAML file, a recipe such as quickstart, or a run folder.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Changes to the configuration, such as learner.lr=1e-3.")]
Adapter = Annotated[Path | None, typer.Option(help="A peft adapter folder. Without it the base model is used.")]
NewRunDir = Annotated[str | None, typer.Option(help="The run folder, or a URL s3://BUCKET/RUN; else runs/NAME.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in the run folder.")]
DeleteFirst = Annotated[bool, typer.Option("--overwrite", help="First delete what the run in the folder wrote.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check configuration, model and data; train nothing.")]


def load_run(config: Path | None, overrides: Sequence[str] | None) -> TrainConfig:
    """The configuration of a YAML file, or of the run folder that holds it, or the defaults, with changes."""
    from rl_vlm.config import load_config

    return load_config(config, overrides or ())


def parse_arguments(given: Sequence[str] | None) -> dict[str, Any]:
    """The arguments of `--env-arg key=value`, with dots for nesting and YAML for values. Raises UserInputError."""
    from rl_vlm.config.overrides import apply_override, parse_override

    arguments: dict[str, Any] = {}
    for argument in given or ():
        apply_override(arguments, *parse_override(argument))
    return arguments
