"""The command line, `rl-vlm`; one file per family of commands.

Exit codes: 0 done, 1 failed while running, 2 bad input, 130 and 143 interrupted. Commands
import what they need when they run, because `rl-vlm --help` must not wait for torch and Ray.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from rl_vlm.cli import envs, evaluation, labels, recipes, reference, runs, show, tools, view
from rl_vlm.cli.foreign_options import check_options
from rl_vlm.cli.output import error_report, log_to_stderr, say
from rl_vlm.deadlines import exit_process

app = typer.Typer(
    name="rl-vlm",
    help="Reinforcement learning with vision-language models on Ray.",
    epilog="Start here: rl-vlm doctor, then rl-vlm train quickstart; rl-vlm recipes lists more",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for family in (runs, show, view, evaluation, recipes, labels, envs, reference, tools):
    app.add_typer(family.commands)


def _print_version(asked: bool) -> None:
    if asked:
        from rl_vlm import __version__

        say(f"rl-vlm {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """The entry point of `rl-vlm`."""
    exit_process(run(argv))


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; errors become one sentence on stderr."""
    error_report.folder = None
    log_to_stderr()
    try:
        given = list(sys.argv[1:] if argv is None else argv)
        command = typer.main.get_command(app)
        check_options(command, given)
        # Not app(): it replaces sys.excepthook for the whole process.
        command.main(given, prog_name="rl-vlm")
    except SystemExit as end:
        code = end.code
        return code if isinstance(code, int) else 0 if code is None else 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return error_report.report(error)
    return 0
