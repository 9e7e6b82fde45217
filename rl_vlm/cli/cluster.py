"""The command around clusters: `rl-vlm cluster drain`."""

from __future__ import annotations

from typing import Annotated

import typer

from rl_vlm.cli.output import say

commands = typer.Typer()
cluster = typer.Typer(help="What the nodes of a cluster call.", no_args_is_help=True)
commands.add_typer(cluster, name="cluster")


@cluster.callback()
def _group() -> None:
    """Keep `drain` a command of its own: typer would make a group's only command the group."""


@cluster.command(epilog="Example: rl-vlm cluster drain --timeout 110")
def drain(
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait for them.")] = 110.0,
    actors: Annotated[
        bool, typer.Option("--actors", help="Only wait, until no actor of a run works on this machine.")
    ] = False,
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
