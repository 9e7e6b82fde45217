"""The command `rl-vlm serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rl_vlm.cli.options import Adapter, Overrides
from rl_vlm.cli.output import say

commands = typer.Typer()


@commands.command(epilog="Example: rl-vlm serve tiny http.max_queue=64 --port 8080")
def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            help="tiny, a model folder, a hub name, a YAML configuration or a run folder. LOCAL_MODEL_PATH."
        ),
    ] = None,
    overrides: Overrides = None,
    adapter: Adapter = None,
    host: Annotated[str | None, typer.Option(help="127.0.0.1 by default, or SERVER_HOST.")] = None,
    port: Annotated[int | None, typer.Option(help="8000 by default, or SERVER_PORT; 0: any free one.")] = None,
) -> None:
    """Serve a model over HTTP: OpenAI's chat completions and /generate. Beyond loopback RL_VLM_API_TOKEN is required."""
    if model is not None and "=" in model and not Path(model).exists():
        overrides = [model, *(overrides or [])]
        model = None  # it comes from LOCAL_MODEL_PATH
    from rl_vlm.runs.signals import leaving_on_signals

    with leaving_on_signals():  # importing takes seconds
        from rl_vlm.models.trained import find_trained
        from rl_vlm.runs import serve as launch

        find_trained(adapter, None)

        planned = launch.plan(model, overrides or (), adapter=adapter, host=host, port=port)
        raise typer.Exit(128 + launch.run_server(planned, say))
