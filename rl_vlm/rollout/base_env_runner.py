"""What both env runners tell RLlib. (Nothing heavy is imported here: every env-runner process does.)"""

from __future__ import annotations

from typing import Any

import gymnasium
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.env import INPUT_ENV_SPACES
from ray.rllib.env.env_runner import EnvRunner

from rl_vlm.plugins import load_plugins

Spaces = tuple[gymnasium.Space[Any], gymnasium.Space[Any]]


class RunEnvRunner(EnvRunner):
    """An env runner of a run: made from the algorithm's `run_config`, without state that RLlib should carry around.

    Weights are in Serve or travel with each call, figures travel with the results, and checkpoints are the driver's.
    """

    def __init__(self, own_spaces: Spaces, *, config: Any, worker_index: int = 1, **kwargs: Any) -> None:
        super().__init__(config=config, worker_index=worker_index, **kwargs)
        load_plugins(config.run_config.plugins)
        self._spaces = own_spaces
        self.place = max(worker_index - 1, 0)  # among the runners; RLlib counts remote ones from 1

    def assert_healthy(self) -> None:
        """RLlib asks after construction: an answer is all that it needs."""

    def get_spaces(self) -> dict[str, Spaces]:
        """Observation and action space, under RLlib's keys."""
        return {INPUT_ENV_SPACES: self._spaces, DEFAULT_MODULE_ID: self._spaces}

    def get_metrics(self) -> dict[str, Any]:
        """RLlib asks for metrics; ours travel with the results."""
        return {}

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """RLlib asks for a state to restore; there is none."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """RLlib's counterpart to `get_state`."""
