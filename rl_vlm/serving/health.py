"""The state of a replica, as a pure state machine: without Ray, and without a clock of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class ReplicaState(StrEnum):
    STARTING = "starting"  # it has not asked the registry yet, or not loaded what it must have before it serves
    SERVING = "serving"
    SUSPECT = "suspect"  # its engine did not answer a probe in time; requests go elsewhere until it does
    DEAD = "dead"  # it must be replaced


@dataclass(slots=True)
class Lifecycle:
    """The facts about one replica, from which its state is computed. Times are seconds of any monotonic clock."""

    probe_after_s: float  # an engine without progress for this long is probed
    load_patience_s: float = 60.0  # a replica whose loads fail for this long is dead
    max_failed_probes: int = 2  # in a row, after which the replica is dead
    started: bool = False  # it has asked the registry, and loaded what it must have before it serves
    asleep: bool = False  # its engine has given memory away, and takes no requests until it has it again
    failed_probes: int = 0
    load_error: str = ""  # why a version is not loaded, while loads keep failing
    death: str = ""  # why, once it is dead
    last_progress: float = float("-inf")
    _failing_since: float | None = None
    _progress: int = 0  # of a new engine, which so has to prove that it works before it counts as running

    @property
    def state(self) -> ReplicaState:
        """Dead wins over suspect, suspect over starting."""
        if self.death:
            return ReplicaState.DEAD
        if self.failed_probes:
            return ReplicaState.SUSPECT
        return ReplicaState.SERVING if self.started else ReplicaState.STARTING

    @property
    def rejects(self) -> bool:
        """Whether requests go elsewhere. Where a first load fails, another replica may have started already."""
        return bool(self.death or self.failed_probes or (self.load_error and not self.started))

    @property
    def ready(self) -> bool:
        """Whether a request may start now, if its version is there. Else it waits for the start, or for the engine."""
        return self.started and not self.asleep and not self.rejects

    def load(self) -> None:
        """A version was loaded, so loading works."""
        self.load_error, self._failing_since = "", None

    def fail_load(self, reason: str, now: float, *, curable: bool = True) -> None:
        """A version could not be loaded. `curable`: a new replica may succeed, so this one dies (`load_patience_s`)."""
        self.load_error = reason
        if not curable:
            return
        if self._failing_since is None:
            self._failing_since = now
        if now - self._failing_since >= self.load_patience_s:
            self.die(reason)

    def observe(self, progress: int, now: float) -> None:
        """Note the engine's count of what it computed (`EngineStats.progress`): a new value proves that it works."""
        if progress != self._progress:
            self._progress = progress
            self.pass_probe(now)

    def probe_due(self, now: float) -> bool:
        """Whether the engine must generate a token to prove that it can: always while suspect, never while asleep."""
        silent = self.failed_probes > 0 or now - self.last_progress >= self.probe_after_s
        return silent and not (self.death or self.asleep)

    @property
    def proven(self) -> bool:
        """Whether the engine has ever generated a token."""
        return math.isfinite(self.last_progress)

    def pass_probe(self, now: float) -> None:
        """The engine has generated that token, or works on others."""
        self.failed_probes, self.last_progress = 0, now

    def fail_probe(self, reason: str) -> None:
        """The engine neither generated that token within the deadline nor did anything else."""
        self.failed_probes += 1
        if self.failed_probes >= self.max_failed_probes:
            self.die(f"{reason} ({self.failed_probes} times in a row)")

    def die(self, reason: str) -> None:
        """The replica is dead. Only the first reason is kept."""
        self.death = self.death or reason
