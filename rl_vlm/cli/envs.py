"""The commands `rl-vlm envs`, `envs check`, `envs play` and `envs serve`."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Literal

import typer

from rl_vlm.cli.options import AsJson, parse_arguments
from rl_vlm.cli.output import say

commands = typer.Typer()
envs_commands = typer.Typer(help="List, check, play and serve environments.")
commands.add_typer(envs_commands, name="envs")

EnvId = Annotated[
    str,
    typer.Argument(help="A registry id, package.module:Class, path/to/env.py, verifiers:NAME, openenv:URL, http://..."),
]
# Of a run with default settings, which holds 128 environments in training and 544 more in an evaluation.
_MAX_SESSIONS = 1024
EnvArguments = Annotated[
    list[str] | None, typer.Option("--env-arg", help="key=value of env.kwargs, such as turns=2; as often as needed.")
]


@envs_commands.callback(invoke_without_command=True)
def list_them(context: typer.Context, as_json: AsJson = False) -> None:
    """List the environments that are known by name, with their splits and turns."""
    if context.invoked_subcommand is not None:
        return
    from rl_vlm.envs.registry import list_environments

    found = list_environments()
    if as_json:
        say(json.dumps(found, indent=2))
        return
    width = max(len(entry["id"]) for entry in found)
    for entry in found:
        items, turns = entry["num_items"], entry["max_turns"]
        facts = [f"{items['train']} items to train on, {items['test']} to test on"] if items else []
        facts += [f"up to {turns} turn{'s' if turns > 1 else ''}"] if turns else []
        about = f" ({'; '.join(facts)})" if facts else ""
        say(f"{entry['id']:<{width}}  {entry['description']}{about}")


@envs_commands.command(epilog="Example: rl-vlm envs check path/to/env.py --env-arg turns=2")
def check(
    env: EnvId,
    env_arg: EnvArguments = None,
    episodes: Annotated[int, typer.Option(min=1, help="How many are played.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Of the answers.")] = 0,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds that one reset or step may take before it is said to hang.")
    ] = 60.0,
    answers: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A text file of answers to try, one a line.")
    ] = None,
    image: Annotated[
        Path | None, typer.Option(help="Where the first image is written; a temporary file by default.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Try an environment and say what is wrong: splits, ends, cost, determinism, hostile answers.

    Exit code 1 if anything is.
    """
    from rl_vlm.envs.checking import check_environment
    from rl_vlm.files import write_atomic

    with redirect_stdout(sys.stderr):  # what the environment prints is no part of the report
        report = check_environment(
            env,
            parse_arguments(env_arg),
            episodes=episodes,
            seed=seed,
            call_s=timeout,
            answers=answers.read_text().splitlines() if answers else (),
        )
    if report.image is not None:
        image = image or Path(tempfile.gettempdir()) / f"rl-vlm-{re.sub(r'[^A-Za-z0-9.-]+', '-', env)[-60:]}.png"
        write_atomic(image, report.image.png)
    if as_json:
        findings = [
            {"name": finding.name, "status": finding.status, "detail": finding.detail} for finding in report.findings
        ]
        saved = str(image) if report.image is not None else None
        found = {
            "id": env,
            "ok": report.ok,
            "checks": findings,
            "prompt": report.prompt,
            "image": saved,
            **report.figures,
        }
        say(json.dumps(found, indent=2))
    else:
        if report.prompt:
            say(f"{report.prompt}\n")
        if report.image is not None:
            say(f"The first image is in {image}.\n")
        colors = {"ok": typer.colors.GREEN, "warn": typer.colors.YELLOW, "fail": typer.colors.RED}
        for finding in report.findings:
            typer.secho(f"{finding.status:<5}", fg=colors[finding.status], nl=False)
            say(f"{finding.name:<12}  {finding.detail}")
    raise typer.Exit(0 if report.ok else 1)


@envs_commands.command(epilog="Example: rl-vlm envs play GridWalk-v0 --index 3")
def play(
    env: EnvId,
    env_arg: EnvArguments = None,
    index: Annotated[int | None, typer.Option(min=0, help="Which item; a random one by default.")] = None,
    split: Annotated[str, typer.Option(help="train or test.")] = "train",
    seed: Annotated[int | None, typer.Option(min=0, help="Of the environment.")] = None,
    picture: Annotated[
        str, typer.Option(help="blocks: drawn in the terminal; open: saved and opened; none: only named.")
    ] = "blocks",
) -> None:
    """Play one episode yourself: what you type is the policy's answer; an empty line or Ctrl-D leaves."""
    from rl_vlm.cli.play import play_episode
    from rl_vlm.types import UserInputError

    if split not in ("train", "test") or picture not in ("blocks", "open", "none"):
        raise UserInputError("--split is train or test, and --picture is blocks, open or none.")
    kind: Literal["train", "test"] = "train" if split == "train" else "test"
    play_episode(env, parse_arguments(env_arg), split=kind, index=index, seed=seed, picture=picture)


@envs_commands.command(
    epilog="Example: rl-vlm envs serve GridWalk-v0 --port 8100; on the other side env.id=http://host:8100"
)
def serve(
    env: EnvId,
    env_arg: EnvArguments = None,
    host: Annotated[str, typer.Option(help="Beyond loopback RL_VLM_API_TOKEN is required.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8100,
    max_sessions: Annotated[
        int, typer.Option(min=1, max=16384, help="Environments at a time; each is made when a client opens it.")
    ] = _MAX_SESSIONS,
    processes: Annotated[
        bool,
        typer.Option("--processes", help="Each environment in a process of its own, which is killed where it hangs."),
    ] = False,
) -> None:
    """Serve an environment over HTTP, for training on other machines."""
    from rl_vlm.http.env_server import serve_environment

    code = serve_environment(
        env,
        parse_arguments(env_arg),
        host=host,
        port=port,
        max_sessions=max_sessions,
        processes=processes,
        announce=say,
    )
    raise typer.Exit(128 + code)
