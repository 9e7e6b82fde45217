"""`rl-vlm view` and `rl-vlm report`: runs in the browser, live or as one file."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from rl_vlm.cli.output import say

commands = typer.Typer()
_EPISODES = 500


@commands.command(epilog="Examples: rl-vlm view; rl-vlm view runs/quickstart; rl-vlm view s3://BUCKET/RUN")
def view(
    runs: Annotated[
        list[str] | None, typer.Argument(help="Run folders, URLs of some, or folders with runs below; else runs/.")
    ] = None,
    host: Annotated[str, typer.Option(help="Beyond loopback RL_VLM_API_TOKEN must be set.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 6007,
) -> None:
    """Look at runs in the browser while they go on: curves, episodes with their pictures, what the policy sees."""
    from rl_vlm.config import HTTPSection
    from rl_vlm.envs.address import TOKEN_VARIABLE, url_host
    from rl_vlm.http.server import HTTPServer, bind, check_exposure
    from rl_vlm.view.library import Library
    from rl_vlm.view.server import page_app

    token, limits = os.environ.get(TOKEN_VARIABLE), HTTPSection(host=host, port=port)
    check_exposure(host, token)
    library = Library(runs or ["runs"])
    with bind(host, port) as sock:
        asked = f"?token={quote(token, safe='')}" if token else ""
        address = f"http://{url_host(host)}:{sock.getsockname()[1]}/{asked}"
        app = page_app(library, limits, token)
        threading.Thread(target=library.warm, daemon=True).start()
        HTTPServer(app, sock, limits, lambda: say(f"Open {address}  (Ctrl-C ends)")).run([sock])


@commands.command(epilog="Example: rl-vlm report runs/quickstart --out quickstart.html")
def report(
    runs: Annotated[list[str], typer.Argument(help="Run folders, or URLs of some.")],
    out: Annotated[Path | None, typer.Option(help="FILE.html.")] = None,
    to: Annotated[str | None, typer.Option(help="wandb:PROJECT.")] = None,
    episodes: Annotated[int, typer.Option(min=1, max=5000, help="How many it holds at most.")] = _EPISODES,
) -> None:
    """Write runs as one HTML file, which opens offline and can be sent: what `rl-vlm view` shows. Or send the episodes
    of one run, with their pictures, to Weights & Biases."""
    from rl_vlm.runs.api import load_run
    from rl_vlm.types import UserInputError
    from rl_vlm.view.reader import RunReader

    kind, _, project = (to or "").partition(":")
    if (out is None) == (to is None) or (to and (kind != "wandb" or not project)):
        raise UserInputError("Say where the report goes: --out FILE.html, or --to wandb:PROJECT.")
    if out is not None:
        from rl_vlm.view.report import write_report

        made = write_report(runs, out, episodes)
        size = f"{made['bytes'] / 2**20:.1f} MiB"
        say(f"{made['file']}: {made['episodes']} episodes, {made['pictures']} pictures, {size}")
        return
    if len(runs) > 1:
        raise UserInputError("Give one run: Weights & Biases takes them one by one.")
    from rl_vlm.view.exports import send_wandb

    say(f"{to}: {send_wandb(RunReader(load_run(runs[0])), project, episodes)} episodes")
