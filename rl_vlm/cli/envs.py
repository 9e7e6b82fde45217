"""The commands `rl-vlm envs`, `envs check`, `envs play` and `envs serve`."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from rl_vlm.cli.options import AsJson, parse_arguments
from rl_vlm.cli.output import say, say_check

commands = typer.Typer()
envs_commands = typer.Typer(help="List, check, play and serve environments.")
commands.add_typer(envs_commands, name="envs")

EnvId = Annotated[
    str,
    typer.Argument(help="A registry id, package.module:Class, path/to/env.py, verifiers:NAME, openenv:URL, http://..."),
]
# Of a run with default settings, which holds 128 environments in training and 544 more in an evaluation.
_MAX_SESSIONS = 1024
EnvArguments = Annotated[list[str] | None, typer.Option("--env-arg", help="key=value of env.kwargs; repeatable.")]


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
        float, typer.Option(min=0.1, help="Seconds after which a reset or step counts as hanging.")
    ] = 60.0,
    answers: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Answers to try, one a line.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Try an environment and say what is wrong: splits, ends, cost, determinism, hostile answers.

    Exit code 1 if anything is.
    """
    from rl_vlm.envs.checking import check_environment
    from rl_vlm.files import write_atomic

    with redirect_stdout(sys.stderr):  # what the environment prints is no part of the report
        tried = answers.read_text().splitlines() if answers else ()
        report = check_environment(
            env, parse_arguments(env_arg), episodes=episodes, seed=seed, call_s=timeout, answers=tried
        )
    image = None
    if report.image is not None:
        image = f"{tempfile.gettempdir()}/rl-vlm-{re.sub(r'[^A-Za-z0-9.-]+', '-', env)[-60:]}.png"
        write_atomic(Path(image), report.image.png)
    if as_json:
        checks = [asdict(finding) for finding in report.findings]
        found = {"id": env, "ok": report.ok, "checks": checks, "prompt": report.prompt, "image": image}
        say(json.dumps({**found, **report.numbers}, indent=2))
    else:
        say(f"{report.prompt}\n" + (f"The first image is in {image}.\n" if image else ""))
        for finding in report.findings:
            say_check(finding.name, finding.status, finding.detail)
    raise typer.Exit(0 if report.ok else 1)


@envs_commands.command(epilog="Example: rl-vlm envs play GridWalk-v0 --index 3")
def play(
    env: EnvId,
    env_arg: EnvArguments = None,
    index: Annotated[int | None, typer.Option(min=0, help="Which item; a random one by default.")] = None,
    split: Annotated[Literal["train", "test"], typer.Option()] = "train",
    seed: Annotated[int | None, typer.Option(min=0, help="Of the environment.")] = None,
) -> None:
    """Play one episode yourself: what you type is the policy's answer; an empty line or Ctrl-D leaves."""
    from rl_vlm.cli.play import play_episode

    play_episode(env, parse_arguments(env_arg), split=split, index=index, seed=seed)


@envs_commands.command(
    epilog="Example: rl-vlm envs serve GridWalk-v0 --port 8100; on the other side env.id=http://host:8100"
)
def serve(
    env: EnvId,
    env_arg: EnvArguments = None,
    host: Annotated[str, typer.Option(help="Beyond loopback RL_VLM_API_TOKEN is required.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8100,
    max_sessions: Annotated[int, typer.Option(min=1, max=16384, help="Environments at a time.")] = _MAX_SESSIONS,
    processes: Annotated[bool, typer.Option("--processes", help="Each in a process, which can be killed.")] = False,
) -> None:
    """Serve an environment over HTTP, for training on other machines."""
    from rl_vlm.runs.signals import leaving_on_signals

    with leaving_on_signals():  # importing takes seconds
        from rl_vlm.http.env_server import serve_environment

        arguments = parse_arguments(env_arg)
        serve_environment(
            env, arguments, host=host, port=port, max_sessions=max_sessions, processes=processes, announce=say
        )
