"""The base of the env runners: the methods that RLlib calls.

They do not derive from RLlib's EnvRunner, whose import brings torch, Tune and Data into each of their processes: five
seconds of CPU. `RunnerGroup` starts them.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

from rl_vlm.envs.loading import load_plugins
from rl_vlm.models.reference import ModelReference
from rl_vlm.serving.registry import OWN, PolicyKey

# RLlib's keys of `get_spaces`: INPUT_ENV_SPACES and DEFAULT_MODULE_ID.
ENV_SPACES, MODULE_ID = "__env__", "default_policy"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """What an env runner is made from; id, key and model are those of the served policy, if there is one."""

    run_config: Any  # PolicyConfig or PreferenceConfig
    run_id: str
    model: ModelReference | None
    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    policy_key: PolicyKey = OWN


class RunEnvRunner:
    """An env runner of a run. Weights are in Serve or sent with each call, and the driver writes checkpoints: there is
    no state that RLlib has to synchronise. `worker_index` counts from 1; 0 is one in the driver's own process."""

    def __init__(self, *, config: RunnerConfig, worker_index: int = 1) -> None:
        self.config = config
        load_plugins(config.run_config.plugins)
        self.place = max(worker_index - 1, 0)  # among the runners
        # For environments that draw from the global generators.
        seed = config.run_config.seed + worker_index
        random.seed(seed)
        np.random.seed(seed % 2**32)

    def __repr__(self) -> str:
        """Ray's dashboard and logs show it in place of the class."""
        return f"{type(self).__name__}(run={self.config.run_config.name}, place={self.place})"

    @staticmethod
    def concurrent_calls(run: Any) -> int:
        """How many calls an actor of this class answers at once, each in a thread of its own if there are several."""
        return 1

    # What RLlib calls. There is no state, and metrics are part of the results.

    def ping(self) -> str:
        """Whether the process is alive."""
        return "pong"

    def apply(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Any function with the runner. A failure leaves it in an unknown state, so the process ends."""
        try:
            return func(self, *args, **kwargs)
        except Exception as error:
            logger.exception("%s failed in the env runner, which ends", func)
            raise SystemExit(1) from error

    def assert_healthy(self) -> None:
        """Any answer will do."""

    def get_spaces(self) -> dict[str, tuple[gymnasium.Space[Any], gymnasium.Space[Any]]]:
        """Observation and action space, under RLlib's keys."""
        spaces = self.config.observation_space, self.config.action_space
        return {ENV_SPACES: spaces, MODULE_ID: spaces}

    def get_metrics(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {}

    get_state = get_metrics

    def set_state(self, state: dict[str, Any]) -> None:
        pass
