"""What the scripts in tune/ share: their arguments, their recipes, and the last line that they print."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from rl_vlm.config import TrainConfig, load_config
from rl_vlm.sweeps.sweep import sweep_folder
from rl_vlm.types import RLVLMError, UserInputError


class SweepArguments(argparse.Namespace):
    """The arguments of a script: its small setting or the full one, where results go, and changes to every trial."""

    quick: bool
    out: Path
    resume: bool
    changes: list[str]

    def recipe(self, path: str | Path, *small: str) -> TrainConfig:
        """A configuration with these changes, and then the user's. Raises UserInputError."""
        return load_config(Path(path), [*small, *self.changes])


def run_script(description: str, name: str, work: Callable[[SweepArguments], None]) -> None:
    """Read the arguments, do the work, and end with an exit code: 1 when it fails, 2 for bad input."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small: minutes on two cores")
    parser.add_argument("--out", type=sweep_folder, default=f"runs/{name}", help="where results go (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted sweep; nothing is repeated")
    parser.add_argument("changes", nargs="*", metavar="key=value", help="changes to the configuration of every trial")
    try:
        work(parser.parse_args(namespace=SweepArguments()))
    except RLVLMError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserInputError) else int(getattr(error, "exit_code", 1)))
