"""Collects steps from all env runners in parallel and handles runners that die or hang."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.rllib.env.env_runner_group import EnvRunnerGroup

from rl_vlm.preference.collector import CollectionError, EpisodeResult, NumpyActor, environment_errors
from rl_vlm.preference.replay import StepBatch
from rl_vlm.types import UserInputError

logger = logging.getLogger(__name__)

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
        actor_ref = ray.put(actor)
        batches = self._gather(
            self._running,
            lambda runner: self._ask(runner, actor_ref),
            self._timeout_s,
            "preference.collection.timeout_s",
        )
        return self._counted(StepBatch.concatenate([batches[runner] for runner in sorted(batches)]))

    def _gather(
        self, running: dict[ray.ObjectRef, int], ask: Callable[[int], ray.ObjectRef], timeout_s: float, setting: str
    ) -> dict[int, Any]:
        """The results of the calls `running` by runner; `ask` calls a runner that died again. Raises
        CollectionError."""
        deadline = time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        died: set[int] = set()  # calls to these fail until Ray has restarted them
        while running:
            ready, _ = ray.wait(list(running), timeout=_POLL_S)
            for reference in ready:
                runner = running.pop(reference)
                try:
                    results[runner] = ray.get(reference, timeout=30)
                except RayTaskError as error:
                    raise CollectionError(f"An environment failed: {error.cause}.") from error
                except RayError as error:  # GetTimeoutError included: it is asked again
                    if isinstance(error, RayActorError) and runner not in died:
                        died.add(runner)
                        self.restarts += 1
                    time.sleep(0.5)
                    running[ask(runner)] = runner
            if running and time.monotonic() > deadline:
                for runner in running.values():
                    ray.kill(self._manager.actors()[runner], no_restart=False)
                raise CollectionError(
                    f"{len(running)} env runners did not answer within {timeout_s:g} s: see the Ray logs, or raise "
                    f"{setting}."
                )
        return results

    def _counted(self, batch: StepBatch) -> StepBatch:
        """Note the episode after each environment's current one, where the replacement of a dead runner starts."""
        for episode in np.unique(batch.episodes).tolist():
            self.episode_counts[episode % self.num_envs] = episode // self.num_envs + 1
        return batch

    def evaluate(self, actor: NumpyActor, seeds: Sequence[int], film: int, timeout_s: float) -> list[EpisodeResult]:
        """One episode per seed, in order, distributed over all runners; the first `film` with frames. Raises
        CollectionError."""
        if self._local is not None:
            with environment_errors():
                results: list[EpisodeResult] = self._local.evaluate(actor, seeds, film)
            return results
        runners = self._manager.actor_ids()
        shares = {runner: list(seeds[place :: len(runners)]) for place, runner in enumerate(runners)}
        actor_ref = ray.put(actor)

        def ask(runner: int) -> ray.ObjectRef:
            filmed = len(range(runners.index(runner), film, len(runners)))  # of its share
            reference: ray.ObjectRef = self._manager.actors()[runner].evaluate.remote(actor_ref, shares[runner], filmed)
            return reference

        parts = self._gather({ask(runner): runner for runner in runners}, ask, timeout_s, "evaluation.timeout_s")
        by_seed = {result.seed: result for part in parts.values() for result in part}
        return [by_seed[seed] for seed in seeds]

    def states(self) -> list[dict[str, Any]]:
        """The state of every runner's collector, in order; a runner that is dead, or does not answer, has no open
        episodes."""
        if self._local is not None:
            return [self._local.collector.state()]
        references = [runner.apply.remote(lambda r: r.collector.state()) for runner in self._actors()]
        ray.wait(references, num_returns=len(references), timeout=self._timeout_s)
        return [_state_of(reference) for reference in references]

    def load_states(self, states: Sequence[dict[str, Any]], episode_counts: Sequence[int]) -> None:
        """Restore every runner's environments, and `episode_counts`. Raises UserInputError where their number
        differs."""
        if len(states) != self.runners:
            raise UserInputError(
                f"The checkpoint has {len(states)} env runners and this run {self.runners}: keep "
                "preference.collection.num_env_runners."
            )
        counts = list(episode_counts)
        if len(counts) != self.num_envs:
            raise UserInputError(
                f"The checkpoint has {len(counts)} environments and this run {self.num_envs}: keep "
                "preference.collection.envs_per_runner."
            )
        if self._local is not None:
            self._local.collector.load(states[0])
        else:
            loading = [
                runner.apply.remote(lambda r, state=state: r.collector.load(state))
                for runner, state in zip(self._actors(), states, strict=True)
            ]
            ray.get(loading, timeout=self._timeout_s)
        self.episode_counts = counts

    def _actors(self) -> list[Any]:
        return [self._manager.actors()[runner] for runner in self._manager.actor_ids()]


def _state_of(reference: ray.ObjectRef) -> dict[str, Any]:
    try:
        return ray.get(reference, timeout=1.0)  # type: ignore[no-any-return]  # it was waited for
    except RayError as error:
        logger.warning("An env runner's episodes are not in the checkpoint: %s", str(error).splitlines()[0])
        return {"episodes": []}
