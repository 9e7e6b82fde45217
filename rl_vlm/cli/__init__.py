"""The command line: one file per family of commands."""

from rl_vlm.cli.app import main, run

__all__ = ["main", "run"]
