"""`rl-vlm config`: what can be set, and the pages of docs/ that are written by programs."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Literal

import typer

from rl_vlm.cli.output import say

commands = typer.Typer()
Kind = Literal["policy", "preference", "sft", "sweep"]
Page = Literal["configuration", "http_api", "errors"]
_PAGES = {
    "configuration": "rl_vlm.config.reference",
    "http_api": "rl_vlm.http.reference",
    "errors": "rl_vlm.cli.errors",
}


@commands.command(epilog="Examples: rl-vlm config; rl-vlm config rollout; rl-vlm config preference.sac --of preference")
def config(
    key: Annotated[str, typer.Argument(help="A section or a key; without one all are shown.")] = "",
    of: Annotated[Kind | None, typer.Option(help="What is configured; else the first of these with the key.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a page of docs/ that is written so.")] = False,
    page: Annotated[Page, typer.Option(help="Which page --markdown prints.")] = "configuration",
) -> None:
    """Show the keys of the configuration: default, type, and what each means."""
    from rl_vlm.config import reference
    from rl_vlm.config.complaints import unknown_key
    from rl_vlm.config.recipes import recipe_names
    from rl_vlm.types import UserInputError

    if markdown:
        say(import_module(_PAGES[page]).page())
        return
    kinds = (reference.KINDS[of],) if of else reference.KINDS.values()
    found = (
        [one for one in reference.reference(kind) if f"{one.name}.".startswith(key and f"{key}.")] for kind in kinds
    )
    if not (chosen := next(filter(None, found), [])):
        if key in recipe_names():
            raise UserInputError(f"{key} is a recipe, and no key: `rl-vlm recipes copy {key}` writes it here.")
        raise UserInputError(unknown_key(key, reference.KINDS[of or "policy"]))
    for one in chosen:
        say(f"{one.name}: {one.default or '(must be given)'}\n    {one.type}\n    {one.meaning}")
