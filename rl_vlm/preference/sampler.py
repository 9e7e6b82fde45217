"""Collects steps from all env runners in parallel and handles runners that die or hang."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.rllib.env.env_runner_group import EnvRunnerGroup

from rl_vlm.preference.collector import CollectionError, EpisodeResult, NumpyActor, environment_errors
from rl_vlm.preference.replay import StepBatch

_POLL_S = 0.5


class ControlSampler:
    """Collects from an RLlib env-runner group, or from its local runner when there are no others.

    Args:
        group: the env runners.
        envs_per_runner: environments of each.
        timeout_s: how long one round of steps may take, restarts of dead runners included.
    """

    def __init__(self, group: EnvRunnerGroup, envs_per_runner: int, timeout_s: float) -> None:
        self._group = group
        self._envs_per_runner = envs_per_runner
        self._timeout_s = timeout_s
        self._local: Any = group.local_env_runner
        self.runners = 1 if self._local is not None else group.num_remote_env_runners()
        self.num_envs = self.runners * envs_per_runner
        self.episode_counts = [0] * self.num_envs  # the first episode number of a replaced runner
        self.restarts = 0  # deaths of runners, not failed calls
        self.is_running = False  # between `start` and `finish`
        self._running: dict[ray.ObjectRef, int] = {}
        self._request: tuple[NumpyActor | None, int] = (None, 0)

    @property
    def is_local(self) -> bool:
        """Whether the driver steps the environments itself, which it cannot do while it learns."""
        return self._local is not None

    @property
    def _manager(self) -> Any:
        return self._group._worker_manager

    def start(self, actor: NumpyActor | None, steps: int) -> None:
        """Ask every runner for `steps` steps per environment; `finish` returns them."""
        self._request, self.is_running = (actor, steps), True
        if self._local is None:
            actor_ref = ray.put(actor)
            self._running = {self._ask(runner, actor_ref): runner for runner in self._manager.actor_ids()}

    def _ask(self, runner: int, actor: Any) -> ray.ObjectRef:
        first = (runner - 1) * self._envs_per_runner
        counts = self.episode_counts[first : first + self._envs_per_runner]
        reference: ray.ObjectRef = self._manager.actors()[runner].sample.remote(
            actor=actor, steps=self._request[1], episode_counts=counts
        )
        return reference

    def finish(self) -> StepBatch:
        """The steps of all runners, in the runners' order. Raises CollectionError."""
        (actor, steps), self.is_running = self._request, False
        if self._local is not None:
            with environment_errors():
                return self._counted(self._local.sample(actor=actor, steps=steps, episode_counts=self.episode_counts))
        deadline = time.monotonic() + self._timeout_s
        found: dict[int, StepBatch] = {}
        died: set[int] = set()  # calls to these fail until Ray has restarted them
        actor_ref = ray.put(actor)
        while self._running:
            ready, _ = ray.wait(list(self._running), timeout=_POLL_S)
            for reference in ready:
                runner = self._running.pop(reference)
                try:
                    found[runner] = ray.get(reference, timeout=30)
                except RayTaskError as error:
                    raise CollectionError(f"An environment failed: {error.cause}.") from error
                except RayError as error:  # GetTimeoutError included: the steps are asked for again
                    if isinstance(error, RayActorError) and runner not in died:
                        died.add(runner)
                        self.restarts += 1
                    time.sleep(0.5)
                    self._running[self._ask(runner, actor_ref)] = runner
            if self._running and time.monotonic() > deadline:
                for runner in self._running.values():
                    ray.kill(self._manager.actors()[runner], no_restart=False)
                raise CollectionError(
                    f"{len(self._running)} env runners did not answer within {self._timeout_s:g} s: see the Ray logs, or "
                    "raise preference.collection.timeout_s."
                )
        return self._counted(StepBatch.concatenate([found[runner] for runner in sorted(found)]))

    def _counted(self, batch: StepBatch) -> StepBatch:
        """Note the episode after each environment's current one, where the replacement of a dead runner starts."""
        for episode in np.unique(batch.episodes).tolist():
            self.episode_counts[episode % self.num_envs] = episode // self.num_envs + 1
        return batch

    def evaluate(self, actor: NumpyActor, seeds: Sequence[int], film: int, timeout_s: float) -> list[EpisodeResult]:
        """One episode per seed, in order, distributed over all runners."""
        if self._local is not None:
            with environment_errors():
                results: list[EpisodeResult] = self._local.evaluate(actor, seeds, film)
            return results
        runners = self._manager.actor_ids()
        shares = [list(seeds[place :: len(runners)]) for place in range(len(runners))]
        references = [
            self._manager.actors()[runner].evaluate.remote(actor, share, film if place == 0 else 0)
            for place, (runner, share) in enumerate(zip(runners, shares, strict=True))
        ]
        try:
            parts = ray.get(references, timeout=timeout_s)
        except RayError as error:
            raise CollectionError(f"Evaluation failed: {error}") from error
        found = {result.seed: result for part in parts for result in part}
        return [found[seed] for seed in seeds]

    def states(self) -> list[dict[str, Any]]:
        """The state of every runner's collector, in order."""
        if self._local is not None:
            return [self._local.collector.state()]
        return self._get(lambda runner: runner.apply.remote(lambda r: r.collector.state()))

    def load_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Restore every runner's environments."""
        if len(states) != self.runners:
            raise CollectionError(
                f"The checkpoint has {len(states)} env runners and this run {self.runners}: keep "
                "preference.collection.num_env_runners."
            )
        if self._local is not None:
            self._local.collector.load(states[0])
        else:
            self._get(lambda runner, state: runner.apply.remote(lambda r: r.collector.load(state)), states)
        self.episode_counts = [int(entry["number"]) + 1 for state in states for entry in state["episodes"]]
        self.episode_counts = self.episode_counts or [0] * self.num_envs

    def _get(self, call: Callable[..., ray.ObjectRef], *arguments: Sequence[Any]) -> list[Any]:
        """The results of `call(runner, ...)` on every runner, one of each argument for each."""
        actors = [self._manager.actors()[runner] for runner in self._manager.actor_ids()]
        references = [call(*parts) for parts in zip(actors, *arguments, strict=True)]
        return list(ray.get(references, timeout=self._timeout_s))
