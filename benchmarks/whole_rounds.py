"""Sampling ahead in whole rounds, which the system does not do: what `never_wait.py` compares with."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from rl_vlm.rollout.rollouts import RoundRollouts
from rl_vlm.rollout.sampler import Round
from rl_vlm.types import TrajectoryGroup


class WholeRounds(RoundRollouts):
    """Rounds are collected in order, each when its last group is complete; `max_policy_lag` rounds run while the learner works."""

    _rounds: deque[Round]

    def next_groups(self, version: int, iterations_left: int) -> list[TrajectoryGroup]:
        """The oldest round's groups; starts the rounds that the lag allows."""
        if not hasattr(self, "_rounds"):
            self._rounds = deque([self._start(version)])
        _, result = self._sampler.collect(self._rounds.popleft(), self.stop_requested)
        self._add(result)
        taken = self._take(self._batch, version)
        while len(self._rounds) < min(self._run.rollout.max_policy_lag, iterations_left):
            self._rounds.append(self._start(version))
        return taken

    def open_next(self) -> bool:
        """Nothing: the next rounds run already."""
        return False

    def _start(self, version: int) -> Round:
        return self._sampler.start([replace(task, min_version=version) for task in self._stream.take(self._batch)])
