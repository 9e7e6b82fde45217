"""`rl-vlm top`: what runs on a cluster, from its metrics."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from rl_vlm.cli.options import AsJson

commands = typer.Typer()
WIDE = 180  # columns


@commands.command(
    epilog="Examples: rl-vlm top; rl-vlm top --once --json; rl-vlm top --prometheus http://localhost:9090"
)
def top(
    address: Annotated[
        str | None,
        typer.Option(
            help="The Ray dashboard, http://HEAD:8265. Without it RAY_API_SERVER_ADDRESS, else this machine's."
        ),
    ] = None,
    prometheus: Annotated[
        str | None, typer.Option(help="Read a Prometheus instead, such as http://localhost:9090.")
    ] = None,
    every: Annotated[float, typer.Option(min=0.5, help="Seconds between two readings.")] = 5.0,
    once: Annotated[bool, typer.Option("--once", help="Show it once and end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show runs, replicas, queues, versions and GPU memory of a cluster, live."""
    from rich.console import Console

    from rl_vlm.monitoring import samples
    from rl_vlm.monitoring.top import show
    from rl_vlm.types import UserInputError

    if address is not None and prometheus is not None:
        raise UserInputError("--address and --prometheus contradict each other: give one of them.")

    def read() -> tuple[list[samples.Sample], list[str]]:
        if prometheus is not None:
            return samples.read_prometheus(prometheus), []
        return samples.read_cluster(address or samples.default_dashboard())

    # In a pipe or a file there is no width to fit.
    console = Console() if sys.stdout.isatty() else Console(width=WIDE)
    show(read, console, every_s=every, once=once, as_lines=as_json)
