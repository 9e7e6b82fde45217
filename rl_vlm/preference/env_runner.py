"""Env runners of control environments: an RLlib env runner, and the driver's side, which replaces those that die."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from rl_vlm.config import PreferenceConfig
from rl_vlm.control_envs.base import ControlEnv
from rl_vlm.preference.collector import (
    CollectionError,
    Collector,
    NumpyActor,
    StepBatch,
    environment_errors,
    make_run_env,
)
from rl_vlm.preference.evaluation import EpisodeResult, evaluate
from rl_vlm.rollout.base_env_runner import RunEnvRunner
from rl_vlm.types import UserInputError

logger = logging.getLogger(__name__)

_SETTING = "preference.collection.timeout_s"


class ControlEnvRunner(RunEnvRunner):
    """Steps one environment of the run; all settings are in `run_config`."""

    def __init__(self, *, config: Any, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        run_config: PreferenceConfig = self.config.run_config
        settings = run_config.preference
        self.collector = Collector(
            lambda: make_run_env(run_config),
            seed=run_config.seed,
            env=self.place,
            num_envs=settings.collection.num_envs,
            frames=settings.draws_frames,
        )

    @cached_property
    def _evaluation_env(self) -> ControlEnv:
        return make_run_env(self.config.run_config)

    def sample(self, actor: NumpyActor | None, steps: int, first_episode: int) -> StepBatch:
        return self.collector.collect(actor, steps, first_episode)

    def evaluate(self, actor: NumpyActor, seeds: Sequence[int], film: int) -> list[EpisodeResult]:
        end_on_success = self.config.run_config.preference.evaluation.end_on_success
        return evaluate(self._evaluation_env, actor, seeds, film, end_on_success)

    def state(self) -> dict[str, Any] | None:
        return self.collector.state()

    def load(self, state: dict[str, Any] | None) -> None:
        self.collector.load(state)

    def stop(self) -> None:
        self.collector.close()
        if "_evaluation_env" in self.__dict__:
            self._evaluation_env.close()


class ControlSampler:
    """Collects from an RLlib env-runner group, or from its local runner when there are no others, for at most
    `timeout_s` a round."""

    def __init__(self, group: Any, timeout_s: float) -> None:
        self._group, self._timeout_s = group, timeout_s
        self._local: ControlEnvRunner | None = group.local_env_runner
        self.num_envs: int = 1 if self._local is not None else group.num_remote_env_runners()
        self.episode_counts = [0] * self.num_envs  # the first episode number of a replaced runner
        self.restarts = 0  # deaths of runners, not failed calls
        self._finish: Callable[[], list[StepBatch]] | None = None  # between `start` and `finish`

    @property
    def is_local(self) -> bool:
        """Whether the driver steps the environments itself, which it cannot do while it learns."""
        return self._local is not None

    @property
    def is_running(self) -> bool:
        """Whether `finish` has steps to return."""
        return self._finish is not None

    def _runners(self) -> list[Any]:
        manager = self._group._worker_manager
        return [manager.actors()[runner] for runner in manager.actor_ids()]

    def _call(
        self, method: str, arguments: Callable[[int], Any], timeout_s: float, setting: str
    ) -> Callable[[], list[Any]]:
        """Call a method of all runners, with `arguments(k)` of the k-th. The function that is returned waits for the
        results and raises CollectionError."""

        def call_local() -> list[Any]:
            with environment_errors():
                return [getattr(self._local, method)(*arguments(0))]

        def ask(number: int) -> Any:
            return getattr(self._runners()[number], method).remote(*arguments(number))

        if self._local is not None:
            return call_local
        running = {ask(number): number for number in range(self.num_envs)}
        return lambda: self._gather(running, ask, timeout_s, setting)

    def _shared(self, actor: NumpyActor | None) -> Any:
        """The actor as an argument of calls of all runners."""
        return actor if self.is_local else ray.put(actor)

    def start(self, actor: NumpyActor | None, steps: int) -> None:
        """Ask every runner for `steps` steps; `finish` returns them."""
        shared = self._shared(actor)
        self._finish = self._call(
            "sample", lambda k: (shared, steps, self.episode_counts[k]), self._timeout_s, _SETTING
        )

    def finish(self) -> StepBatch:
        """The steps of all runners, in the runners' order. Raises CollectionError."""
        assert self._finish is not None
        finish, self._finish = self._finish, None
        batch = StepBatch.concatenate(finish())
        # The episode after each environment's current one is where the replacement of a dead runner starts.
        for episode in np.unique(batch.episodes).tolist():
            self.episode_counts[episode % self.num_envs] = episode // self.num_envs + 1
        return batch

    def evaluate(self, actor: NumpyActor, seeds: Sequence[int], film: int, timeout_s: float) -> list[EpisodeResult]:
        """One episode per seed, in order, over all runners; the first `film` with frames. Raises CollectionError."""
        count, shared = self.num_envs, self._shared(actor)

        def arguments(number: int) -> Any:
            return shared, list(seeds[number::count]), len(range(number, film, count))

        shares = self._call("evaluate", arguments, timeout_s, "evaluation.timeout_s")()
        by_seed = {result.seed: result for share in shares for result in share}
        return [by_seed[seed] for seed in seeds]

    def _gather(
        self, running: dict[ray.ObjectRef, int], ask: Callable[[int], ray.ObjectRef], timeout_s: float, setting: str
    ) -> list[Any]:
        """The results of the calls `running`, in the runners' order; `ask` calls a runner that died again."""
        deadline = time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        died: set[int] = set()  # calls to these fail until Ray has restarted them
        while running:
            ready, _ = ray.wait(list(running), timeout=0.5)
            for reference in ready:
                number = running.pop(reference)
                try:
                    results[number] = ray.get(reference, timeout=30)
                except RayTaskError as error:
                    raise CollectionError(f"An environment failed: {error.cause}.") from error
                except GetTimeoutError:
                    running[reference] = number  # the steps were made, and fetching them is slow
                except RayError as error:
                    if isinstance(error, RayActorError) and number not in died:
                        died.add(number)
                        self.restarts += 1
                    time.sleep(0.5)
                    running[ask(number)] = number
            if running and time.monotonic() > deadline:
                for number in running.values():
                    ray.kill(self._runners()[number], no_restart=False)
                raise CollectionError(
                    f"{len(running)} env runners did not answer within {timeout_s:g} s: see the Ray logs, or "
                    f"raise {setting}."
                )
        return [results[number] for number in sorted(results)]

    def states(self) -> list[dict[str, Any] | None]:
        """The state of every runner's collector; a runner that is dead, or does not answer, has no open episode."""
        if self._local is not None:
            return [self._local.state()]
        references = [runner.state.remote() for runner in self._runners()]
        ray.wait(references, num_returns=len(references), timeout=self._timeout_s)
        states: list[dict[str, Any] | None] = []
        for reference in references:
            try:
                states.append(ray.get(reference, timeout=1.0))  # it was waited for
            except RayError as error:
                logger.warning("An env runner's episode is not in the checkpoint: %s", str(error).splitlines()[0])
                states.append(None)
        return states

    def load_states(self, states: Sequence[dict[str, Any] | None], episode_counts: Sequence[int]) -> None:
        """Restore every runner's environment. Raises CollectionError, and UserInputError where their number differs."""
        if len(states) != self.num_envs:
            raise UserInputError(
                f"The checkpoint has {len(states)} env runners and this run {self.num_envs}: keep "
                "preference.collection.num_env_runners."
            )
        self._call("load", lambda number: (states[number],), self._timeout_s, _SETTING)()
        self.episode_counts = list(episode_counts)
