"""The commands around clusters: `rl-vlm cluster render`, `values` and `drain`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rl_vlm.cli.output import say

commands = typer.Typer()
cluster = typer.Typer(help="Manifests of clusters: AWS, GCP, one's own machines, Kubernetes.", no_args_is_help=True)
commands.add_typer(cluster, name="cluster")

_Values = Annotated[
    Path | None, typer.Option(help="A file of values, such as cluster/values.yaml; without it the defaults.")
]
_Changes = Annotated[list[str] | None, typer.Option("--set", help="A change, such as workers.gpu_serving.max=4.")]


@cluster.command(epilog="Example: rl-vlm cluster render aws --values cluster/values.yaml --out cluster")
def render(
    targets: Annotated[
        list[str] | None, typer.Argument(help="aws, gcp, onprem, kuberay, docker, apptainer; all by default.")
    ] = None,
    values: _Values = None,
    changes: _Changes = None,
    out: Annotated[Path, typer.Option(help="The folder of the manifests.")] = Path("cluster"),
) -> None:
    """Write the manifests of a file of values. Prints the files that changed."""
    from rl_vlm.cluster import render as rendering

    manifests = rendering.render(rendering.load_values(values, changes or ()), targets or ())
    changed = rendering.write(manifests, out)
    for path in changed:
        say(str(path))
    say(f"{len(changed)} of {len(manifests)} files changed.", err=True)


@cluster.command(epilog="Example: rl-vlm cluster values --set storage.nfs=10.0.0.2:/data > values.yaml")
def values(values: _Values = None, changes: _Changes = None) -> None:
    """Print all values with what they mean, to be edited."""
    from rl_vlm.cluster import render as rendering

    say(rendering.commented_values(rendering.load_values(values, changes or ())), nl=False)


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
    from rl_vlm.cluster.drain import drain_runs, wait_for_actors

    left = wait_for_actors(timeout) if actors else drain_runs(timeout)
    if left:
        say(f"Still running after {timeout:g} s: {', '.join(map(str, left))}.", err=True)
        raise typer.Exit(1)
