"""The command line: one file per family of commands."""

from rl_vlm.cli.app import main

__all__ = ["main"]
