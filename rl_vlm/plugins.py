"""Plugins: a user's modules and files that register environments, losses, estimators and rewards."""

from __future__ import annotations

from collections.abc import Sequence

from rl_vlm.envs.loading import load_object


def load_plugins(names: Sequence[str]) -> None:
    """Import modules (`package.module`) and files (`path/to/file.py`), each once per process.

    What they register is known afterwards. The driver, every env runner and every learner call this.
    Raises UserInputError that names the plugin and what its import needs.
    """
    for name in names:
        load_object(name)
