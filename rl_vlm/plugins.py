"""Plugins: a user's modules and files that register environments, losses, estimators and rewards."""

from __future__ import annotations

from collections.abc import Sequence

from rl_vlm.envs.loading import load_object


def load_plugins(names: Sequence[str]) -> None:
    """Import modules (`package.module`) and files (`path/to/file.py`), each once per process. Raises UserInputError."""
    for name in names:
        load_object(name)
