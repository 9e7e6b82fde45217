"""`rl-vlm runs` and `rl-vlm show`: what runs did, in the terminal or as JSON."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from rl_vlm.runs.api import Run

commands = typer.Typer()
_BARS = "▁▂▃▄▅▆▇█"
_COLUMNS = 60  # of a curve
_SCHEMA = 1  # of the JSON
_CURVES = ("reward/mean", "policy/entropy", "mismatch/kl", "sft/loss")
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@commands.command(name="runs", epilog="Example: rl-vlm runs")
def list_runs(
    folders: Annotated[list[str] | None, typer.Argument(help="Folders with runs, or runs; else runs/.")] = None,
    as_json: AsJson = False,
) -> None:
    """List runs: what they trained, how far they came, and what for."""
    from rl_vlm.safe_text import printable
    from rl_vlm.view.library import Library

    found = Library(folders or ["runs"]).lines()
    if as_json:
        typer.echo(json.dumps({"schema": _SCHEMA, "runs": found}, indent=2))
        return
    header = ("RUN", "TRAINS", "ENVIRONMENT", "STATUS", "ITERATIONS", "REWARD", "ACCURACY", "CHANGED")
    rows: list[tuple[str, ...]] = [header]
    for one in found:
        both = (" → ".join(map(_number, one[name])) for name in ("reward", "accuracy"))
        ago = f"{(time.time() - one['changed']) / 3600:.1f} h ago"
        facts = (one["folder"], one["algorithm"], Path(one["environment"]).name, one["status"], one["iterations"])
        rows.append((*map(str, facts), *both, ago))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows if found else ():
        typer.echo("  ".join(printable(text).ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    if not found:
        typer.echo(f"There is no run in {', '.join(folders or ['runs'])}.")


@commands.command(epilog="Example: rl-vlm show runs/quickstart")
def show(
    run: Annotated[str, typer.Argument(help="A run folder, also of a run that goes on; or its URL.")],
    episodes: Annotated[int, typer.Option(min=0, help="Episodes of the newest dump, by their rewards.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Show a run: its outcome, its curves, and episodes with their pictures from the worst to the best."""
    from rich.console import Console
    from rich.text import Text

    from rl_vlm.files import to_jsonable
    from rl_vlm.runs.api import load_run
    from rl_vlm.safe_text import printable
    from rl_vlm.types import UserInputError
    from rl_vlm.view.reader import RunReader

    found = load_run(run)
    one = RunReader(found).line()
    if one["status"] == "damaged":
        raise UserInputError(f"{run} is damaged: {one['error']}")
    chosen = spread(found.newest_trajectories.to_dict("records"), episodes)
    if as_json:
        content = {"schema": _SCHEMA, **one, "result": found.metrics, "episodes": chosen}
        content["evaluations"] = found.evaluations.to_dict("records")
        typer.echo(json.dumps(to_jsonable(content), indent=2))
        return
    console = Console(highlight=False, soft_wrap=True)
    title = f"{one['folder']}: {one['algorithm']} on {one['environment']}, {one['status']}"
    console.print(Text(printable(title), "bold"))
    for finding in one["findings"]:
        console.print(Text(printable(f"! {finding['text']}"), "yellow"))
    progress = found.progress
    for name in _CURVES:
        if name in progress and len(values := progress[name].dropna()):
            console.print(
                f"{name:>22}  {curve(values.tolist())}  {_number(values.iloc[0])} → {_number(values.iloc[-1])}"
            )
    for row in found.evaluations.to_dict("records")[-1:]:
        for key in (key for key in row if key.startswith("accuracy/")):
            low, high = (_number(row.get(key.replace("accuracy", f"accuracy_{side}"))) for side in ("low", "high"))
            console.print(f"{key:>22}  {_number(row[key])} [{low}, {high}] at {row['iteration']:.0f}", markup=False)
    for episode in chosen:
        _print_episode(console, found, episode)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def curve(values: Sequence[float]) -> str:
    """Values as characters: means of equally many neighbours, from the lowest to the highest."""
    each = math.ceil(len(values) / _COLUMNS)
    means = [math.fsum(values[k : k + each]) / len(values[k : k + each]) for k in range(0, len(values), each)]
    low, span = min(means), max(means) - min(means)
    return "".join(_BARS[round((mean - low) / span * (len(_BARS) - 1)) if span else 0] for mean in means)


def spread(episodes: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Evenly from the lowest to the highest reward."""
    ordered = sorted(episodes, key=lambda episode: float(episode["reward"]))
    count = min(count, len(ordered))
    return [ordered[round(k * (len(ordered) - 1) / max(count - 1, 1))] for k in range(count)]


def _print_episode(console: Console, run: Run, episode: dict[str, Any]) -> None:
    from rl_vlm.cli.conversation import draws_pictures, print_message

    console.print(f"\n[bold]iteration {episode['iteration']}, reward {episode['reward']:.4g}[/] ({episode['status']})")

    def shown(part: Any) -> Any:
        if isinstance(part, str):
            return part
        return (
            run.image(part["image"])
            if draws_pictures(console)
            else f"(picture trajectories/images/{part['image']}.png)"
        )

    for message in episode["messages"]:
        print_message(console, message["role"], map(shown, message["parts"]))
