"""Sampling ahead in whole rounds, which the system does not do: what `never_wait.py` compares with."""

from __future__ import annotations

from collections import deque

from rl_vlm.rollout.rollouts import RoundRollouts
from rl_vlm.rollout.sampler import Sampler
from rl_vlm.types import TrajectoryGroup


class WholeRounds(RoundRollouts):
    """Rounds are collected in order, each when its last group is complete; `max_policy_lag` rounds run while the learner works."""

    _rounds: deque[Sampler]

    def next_groups(self, version: int, iterations_left: int) -> list[TrajectoryGroup]:
        """The oldest round's groups; starts the rounds that the lag allows."""
        if not hasattr(self, "_rounds"):
            self._rounds = deque([self._start(version)])
        self._add(self._rounds.popleft().finish(self.stop_requested))
        taken = self._take(self._batch, version)
        while len(self._rounds) < min(self._run.rollout.max_policy_lag, iterations_left):
            self._rounds.append(self._start(version))
        return taken

    def open_next(self) -> None:
        """Nothing: the next rounds run already."""

    def _start(self, version: int) -> Sampler:
        started = Sampler(self._sampler.runners, sharded=True)
        started.give(self._stream.take(self._batch), self._run.rollout.timeout_s, version)
        return started
