"""The commands around machines: `rl-vlm fetch`, `doctor`, `cluster drain` and `top`."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from rl_vlm.cli.options import AsJson
from rl_vlm.cli.output import say, say_check

commands = typer.Typer()


@commands.command(epilog="Examples: rl-vlm fetch Qwen/Qwen3-VL-2B-Instruct; rl-vlm fetch hiyouga/geometry3k --data")
def fetch(
    name: Annotated[
        str, typer.Argument(help="owner/name on the Hugging Face hub, smol-eyes, or a short name of a data set.")
    ],
    data: Annotated[
        bool,
        typer.Option(
            "--data",
            help="It is a data set: owner/name, or geo3k (Geo3k-v0), osv5m (GeoSpot-v0), nlvr2 (NLVR2-v0), flickr30k "
            "(Caption-v0). A short name prints a folder for env.data.",
        ),
    ] = False,
    max_rows: Annotated[int | None, typer.Option(min=1, help="Of each split of such a data set; else 2000.")] = None,
) -> None:
    """Download a model or a data set once; afterwards everything works offline."""
    from rl_vlm.cli.fetch import fetch as fetch_from_hub

    say(str(fetch_from_hub(name, data, max_rows)))


@commands.command(epilog="Examples: rl-vlm doctor; rl-vlm doctor tiny. For one run: rl-vlm train CONFIG --dry-run")
def doctor(
    model: Annotated[str | None, typer.Argument(help="A model, as in model.path: say what works with it.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine: versions, hardware, rendering, caches, Ray's doors; say how to fix what is wrong. With a
    MODEL: which family it is, which code runs it, and what works with it."""
    if model is not None:
        from rl_vlm.runs.model_report import report

        facts = report(model)
        if as_json:
            say(json.dumps(facts, indent=2))
            return
        width = max(map(len, facts))
        for name, fact in facts.items():
            shown = ("no", "yes")[fact] if isinstance(fact, bool) else fact
            say(f"{name:<{width}}  {shown}")
        return
    from rl_vlm.cli import doctor as checkup

    checks = checkup.diagnose()
    if as_json:
        say(checkup.as_json(checks))
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            say_check(check.name, check.status, check.detail, width)
            if check.remedy:
                say(f"{'':<{width + 7}}→ {check.remedy}")
    if checkup.worst(checks) == "fail":
        raise typer.Exit(1)


cluster = typer.Typer(help="What the nodes of a cluster call.", no_args_is_help=True)
commands.add_typer(cluster, name="cluster")


@cluster.callback()
def _group() -> None:
    """Keep `drain` a command of its own: typer would make a group's only command the group."""


@cluster.command(epilog="Example: rl-vlm cluster drain --timeout 110")
def drain(
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait for them.")] = 110.0,
    actors: Annotated[bool, typer.Option("--actors", help="Only wait until no actor works here.")] = False,
) -> None:
    """Send SIGTERM to the runs of this user on this machine and wait until they have saved their checkpoints.

    Containers call it before they are stopped: the head's as it is; a worker's with --actors, because a run needs its
    learners to save. Exit code 1: some did not end in time.
    """
    from rl_vlm.runs.drain import drain_runs, wait_for_actors

    left = wait_for_actors(timeout) if actors else drain_runs(timeout)
    if left:
        say(f"Still running after {timeout:g} s: {', '.join(map(str, left))}.", err=True)
        raise typer.Exit(1)


WIDE = 180  # columns


@commands.command(
    epilog="Examples: rl-vlm top; rl-vlm top --once; rl-vlm top --json; rl-vlm top --address http://HEAD:8265"
)
def top(
    address: Annotated[str | None, typer.Option(help="The Ray dashboard; else RAY_API_SERVER_ADDRESS or here.")] = None,
    every: Annotated[float, typer.Option(min=0.5, help="Seconds between two readings.")] = 5.0,
    once: Annotated[bool, typer.Option("--once", help="Show it once and end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show runs, replicas, queues, versions and GPU memory of a cluster, live, once, or once as JSON."""
    from rich.console import Console

    from rl_vlm.monitoring.top import show

    # In a pipe or a file there is no width to fit.
    console = Console() if sys.stdout.isatty() else Console(width=WIDE)
    show(address, console, every_s=every, once=once, as_json=as_json)
