"""The commands to begin with: `rl-vlm recipes`, `recipes copy` and `init`."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rl_vlm.cli.options import AsJson, Overwrite
from rl_vlm.cli.output import say

commands = typer.Typer()
recipes_commands = typer.Typer(help="List and copy the recipes: configurations that come with the package.")
commands.add_typer(recipes_commands, name="recipes")

_PROJECT = Path(__file__).parent / "project"  # the files that `init` copies
_AGENT = Path(__file__).parents[1] / "zoo/boxes/agent.py"  # and of `init --agent`, with the recipe that trains it
_PLACEHOLDER = "my-project"  # stands in them for the project's name
_AFTERWARDS = """
Train with one by its name: rl-vlm train quickstart. Minutes are of two CPU cores. Tiny models other than tiny and
tiny-words are built on their first use, which takes one or two more."""


@recipes_commands.callback(invoke_without_command=True)
def list_them(context: typer.Context, as_json: AsJson = False) -> None:
    """List the recipes: what each is for, its model, what it needs, how long it takes, and what to expect."""
    if context.invoked_subcommand is not None:
        return
    from rl_vlm.config.recipes import read_recipe, recipe_names

    recipes = [read_recipe(name) for name in recipe_names()]
    if as_json:
        say(json.dumps([asdict(recipe) for recipe in recipes], indent=2))
        return
    for recipe in recipes:
        say(f"{recipe.name}: {recipe.purpose}")
        facts = (recipe.model, recipe.needs, f"takes: {recipe.takes}", f"expect: {recipe.expect}")
        say(f"    {' | '.join(fact for fact in facts if fact)}")
    say(_AFTERWARDS)


@recipes_commands.command(epilog="Example: rl-vlm recipes copy quickstart mine.yaml; rl-vlm train mine.yaml")
def copy(
    name: Annotated[str, typer.Argument(help="A recipe, such as quickstart or rl_vlm_f/drawer_open.")],
    target: Annotated[Path | None, typer.Argument(help="A file or a folder; else NAME.yaml here.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Copy a recipe, to change it."""
    from rl_vlm.config.recipes import recipe_file
    from rl_vlm.files import write_atomic
    from rl_vlm.types import UserInputError

    source = recipe_file(name)
    target = Path() if target is None else target
    file = target / source.name if target.is_dir() else target
    if file.exists() and not overwrite:
        raise UserInputError(f"{file} exists: choose another file, or add --overwrite.")
    if not file.absolute().parent.is_dir():
        raise UserInputError(f"{file} cannot be written: name a file in a folder that exists.")
    write_atomic(file, source.read_text())
    say(f"Wrote {file}. Train with it: rl-vlm train {file}")


@commands.command(epilog="Example: rl-vlm init my-task; cd my-task; pytest; rl-vlm train config.yaml")
def init(
    folder: Annotated[Path, typer.Argument(metavar="NAME", help="The folder to make; its name is the project's.")],
    agent: Annotated[bool, typer.Option("--agent", help="An agent that calls an OpenAI client, and a tool.")] = False,
) -> None:
    """Make a project of your own: an environment, its reward, a configuration, a test, a README and an AGENTS.md."""
    from rl_vlm.config.recipes import recipe_file
    from rl_vlm.types import UserInputError

    name = folder.absolute().name
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise UserInputError(f"{name!r} is no name of a project: use letters, digits, dots, hyphens and underscores.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserInputError(f"{folder} exists and is not an empty folder: choose another name.")
    folder.mkdir(parents=True, exist_ok=True)
    sources = (_PROJECT / "agent" if agent else _PROJECT).iterdir()
    files = {path.name: path.read_text() for path in sources if path.is_file()}  # and no __pycache__
    if agent:
        recipe = recipe_file("agent_tiny").read_text()
        config = recipe.replace("rl_vlm.zoo.boxes.agent", _AGENT.name).replace("agent_tiny", _PLACEHOLDER)
        files |= {_AGENT.name: _AGENT.read_text(), "config.yaml": config}
    for file, text in sorted(files.items()):
        (folder / file).write_text(text.replace(_PLACEHOLDER, name))
        say(f"Wrote {folder / file}")
    say(f"Next: cd {folder}; pip install pytest; pytest; rl-vlm train config.yaml")
