"""The env runners as the driver sees them: which are up, how often they died, and how one that hangs is restarted."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import ray
from ray.rllib.env.env_runner_group import EnvRunnerGroup

_PROBE_EVERY_S = 1.0  # a probe waits for the runners that do not answer yet


class EnvRunners:
    """Keeps count of who died, once however many of its calls fail.

    Args:
        group: actors that Ray restarts when they die.
    """

    def __init__(self, group: EnvRunnerGroup) -> None:
        self._group = group
        # Runners that died or were killed and have not come back; their deaths are counted.
        self._down: set[int] = set()
        self._deaths = 0  # not yet reported
        self._lives: Counter[int] = Counter()
        self._probed = 0.0
        self.restarts = 0

    @property
    def _manager(self) -> Any:
        return self._group._worker_manager

    def actor(self, runner: int) -> Any:
        """The handle of a runner."""
        return self._manager.actors()[runner]

    def all(self) -> list[int]:
        """The ids of all runners."""
        return list(self._manager.actor_ids())

    def healthy(self) -> list[int]:
        """The ids of the runners that are up as far as is known."""
        return list(self._manager.healthy_actor_ids())

    def life(self, runner: int) -> int:
        """How often this runner has died: what a call to an earlier life says about health is out of date."""
        return self._lives[runner]

    def lost(self, runner: int) -> None:
        """Count a runner that died, until it is back."""
        self._manager.set_actor_state(runner, healthy=False)
        if runner not in self._down:
            self._down.add(runner)
            self._lives[runner] += 1
            self._deaths += 1
            self.restarts += 1

    def restart(self, runner: int) -> None:
        """Kill a runner in which an environment hangs; Ray starts it again."""
        ray.kill(self.actor(runner), no_restart=False)
        self._manager.set_actor_state(runner, healthy=False)
        self._down.add(runner)
        self._lives[runner] += 1
        self.restarts += 1

    def probe(self, at_most_every_s: float = 0.0) -> None:
        """Look whether runners that are down are back, including those that RLlib has marked."""
        for runner in self._unhealthy():
            self.lost(runner)
        if self._down and time.monotonic() - self._probed >= at_most_every_s:
            self._manager.probe_unhealthy_actors(timeout_seconds=_PROBE_EVERY_S, mark_healthy=True)
            self._probed = time.monotonic()
            self._down &= self._unhealthy()

    def take_deaths(self) -> int:
        """How many runners died since the last call."""
        deaths, self._deaths = self._deaths, 0
        return deaths

    def _unhealthy(self) -> set[int]:
        return set(self.all()) - set(self.healthy())
