"""The commands that prepare and check a machine: `rl-vlm fetch`, `doctor` and `model make-tiny`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from rl_vlm.cli.options import AsJson, Overwrite, load_run
from rl_vlm.cli.output import say

commands = typer.Typer()
model_commands = typer.Typer(help="Build models.", no_args_is_help=True)
commands.add_typer(model_commands, name="model")


@commands.command(epilog="Examples: rl-vlm fetch Qwen/Qwen3-VL-2B-Instruct; rl-vlm fetch hiyouga/geometry3k --data")
def fetch(
    name: Annotated[str, typer.Argument(help="owner/name on the Hugging Face hub, or a short name of a data set.")],
    data: Annotated[
        bool,
        typer.Option(
            "--data",
            help="It is a data set: owner/name, or geo3k (Geo3k-v0), osv5m (GeoSpot-v0), nlvr2 (NLVR2-v0), flickr30k (Caption-v0). "
            "A short name prints a folder for env.data.",
        ),
    ] = False,
    max_rows: Annotated[
        int | None,
        typer.Option(help="Of a data set with a short name: at most so many rows of each split; 2000 by default."),
    ] = None,
) -> None:
    """Download a model or a data set once; afterwards everything works offline."""
    from rl_vlm.cli.fetch import fetch as fetch_from_hub

    say(str(fetch_from_hub(name, data, max_rows)))


@commands.command(epilog="Example: rl-vlm doctor configs/quickstart.yaml")
def doctor(
    config: Annotated[
        Path | None, typer.Argument(help="Also look whether this machine is large enough for it.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine: versions, hardware, rendering, ports, caches; say how to fix what is wrong."""
    from rl_vlm.cli import doctor as checkup

    checks = checkup.diagnose(load_run(config, None) if config is not None else None)
    if as_json:
        say(checkup.as_json(checks))
    else:
        colors = {"ok": typer.colors.GREEN, "warn": typer.colors.YELLOW, "fail": typer.colors.RED}
        width = max(len(check.name) for check in checks)
        for check in checks:
            typer.secho(f"{check.status:<5}", fg=colors[check.status], nl=False)
            say(f"{check.name:<{width}}  {check.detail}")
            if check.remedy:
                say(f"{'':<{width + 7}}→ {check.remedy}")
    if checkup.worst(checks) == "fail":
        raise typer.Exit(1)


@model_commands.command("make-tiny", epilog="Example: rl-vlm model make-tiny /tmp/tiny --seed 1")
def make_tiny(
    folder: Annotated[Path | None, typer.Argument(help="Where to write it; the cache by default.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Another seed, other weights.")] = 0,
    overwrite: Overwrite = False,
) -> None:
    """Build the tiny vision-language model, which needs no network. It takes about a minute."""
    from rl_vlm.files import link_tree
    from rl_vlm.models.builtin import builtin_models
    from rl_vlm.models.export import check_target, replace_model
    from rl_vlm.models.loading import quiet_libraries
    from rl_vlm.types import UserInputError

    quiet_libraries()
    tiny = builtin_models()["tiny"]
    if folder is None:
        if overwrite:
            raise UserInputError("--overwrite needs a folder: the model in the cache is always up to date.")
        say(str(tiny.folder(seed)))
        return
    check_target(folder, overwrite)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        made = tiny.make(Path(scratch) / "model", seed)
        with replace_model(folder) as draft:
            link_tree(made, draft)
    say(str(folder))
