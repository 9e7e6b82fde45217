"""Env runners of control environments, and the driver's side of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError

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
from rl_vlm.rollout.actors import ActorLostError, ActorPool
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
    """Collects from env runners, or from a `local` one where there are no others, for at most `timeout_s` a round. A
    runner that dies is called anew."""

    def __init__(self, runners: ActorPool, local: ControlEnvRunner | None, timeout_s: float) -> None:
        self._runners, self._local, self._timeout_s = runners, local, timeout_s
        self.num_envs: int = 1 if local is not None else len(runners)
        self.episode_counts = [0] * self.num_envs  # the first episode number of a replaced runner
        self._finish: Callable[[], list[StepBatch]] | None = None  # between `start` and `finish`

    @property
    def is_local(self) -> bool:
        """Whether the driver steps the environments itself, which it cannot do while it learns."""
        return self._local is not None

    @property
    def is_running(self) -> bool:
        """Whether `finish` has steps to return."""
        return self._finish is not None

    @property
    def restarts(self) -> int:
        """Deaths of runners, not failed calls."""
        return self._runners.restarts

    def _call(
        self, method: str, arguments: Callable[[int], Any], timeout_s: float, setting: str
    ) -> Callable[[], list[Any]]:
        """Call a method of all runners, with `arguments(k)` of the k-th. The function that is returned waits for the
        results and raises CollectionError."""

        def call_local() -> list[Any]:
            with environment_errors():
                return [getattr(self._local, method)(*arguments(0))]

        def wait() -> list[Any]:
            try:
                return calls.results(timeout_s, resend=True)
            except RayTaskError as error:
                raise CollectionError(f"An environment failed: {error.cause}.") from error
            except ActorLostError as error:
                raise CollectionError(f"Env runners: {error}. See the Ray logs, or raise {setting}.") from error

        if self._local is not None:
            return call_local
        # Runners are numbered from 1.
        calls = self._runners.begin(lambda number, runner: getattr(runner, method).remote(*arguments(number - 1)))
        return wait

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

    def states(self) -> list[dict[str, Any] | None]:
        """The state of every runner's collector; a runner that is dead, or does not answer, has no open episode."""
        if self._local is not None:
            return [self._local.state()]
        references = [self._runners[number].state.remote() for number in self._runners.numbers]
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
