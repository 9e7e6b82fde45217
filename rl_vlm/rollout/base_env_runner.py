"""The base of the env runners, actors that step environments.

They do not derive from RLlib's EnvRunner, whose import brings torch, Tune and Data into each of their processes: five
seconds of CPU.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_vlm.envs.loading import load_plugins
from rl_vlm.models.reference import ModelReference
from rl_vlm.serving.registry import OWN, PolicyKey


@dataclass(frozen=True, slots=True)
class ServedTeacher:
    """The service of a teacher (`teacher`), its model, and the version that answers; -1: the model itself."""

    run_id: str
    model: ModelReference
    version: int


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """What an env runner is made from; id, key and model are those of the served policy, if there is one."""

    run_config: Any  # PolicyConfig or PreferenceConfig
    run_id: str
    model: ModelReference | None
    policy_key: PolicyKey = OWN
    teacher: ServedTeacher | None = None


class RunEnvRunner:
    """An env runner of a run, without a state to restore: weights are in Serve or sent with each call. `worker_index`
    counts from 1; 0 is one in the driver's own process."""

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

    def ping(self) -> None:
        """Any answer says that the process is alive."""
