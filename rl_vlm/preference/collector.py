"""Steps control environments with a policy: collection, evaluation episodes, exact resume. No Ray here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rl_vlm.config import PreferenceConfig
from rl_vlm.control_envs.base import ControlEnv
from rl_vlm.control_envs.registry import make_control_env
from rl_vlm.numerics import derive_seed
from rl_vlm.preference.replay import StepBatch
from rl_vlm.types import RLVLMError, UserInputError

MakeEnv = Callable[[], ControlEnv]


def make_run_env(config: PreferenceConfig) -> ControlEnv:
    """One environment of a run, whose pictures have `preference.image_size`."""
    if "image_size" in config.env.kwargs:
        raise UserInputError("env.kwargs.image_size is not used: set preference.image_size.")
    return make_control_env(config.env.id, image_size=config.preference.image_size, **config.env.kwargs)


class CollectionError(RLVLMError):
    """An environment failed, or no env runner answered in time."""


@contextmanager
def environment_errors() -> Iterator[None]:
    """Raise any exception of an environment as a CollectionError; this package's own errors stay as they are."""
    try:
        yield
    except RLVLMError:
        raise
    except Exception as error:  # an environment may raise anything
        raise CollectionError(f"An environment failed: {type(error).__name__}: {error}.") from error


class NumpyActor:
    """The agent's policy as plain matrices: mean and log standard deviation of a squashed Gaussian.

    `layers` are (weight [out, in], bias [out]) float32; the last one gives [2 A] numbers. The arithmetic is that of
    `networks.py`, without torch's cost per call.
    """

    def __init__(self, layers: Sequence[tuple[np.ndarray, np.ndarray]], log_std_bounds: tuple[float, float]) -> None:
        self.layers = [(np.asarray(weight, np.float32), np.asarray(bias, np.float32)) for weight, bias in layers]
        self.log_std_bounds = log_std_bounds

    @property
    def action_size(self) -> int:
        """A."""
        return len(self.layers[-1][1]) // 2

    def head(self, observations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and log standard deviation before the squashing, float32 [E, A] each."""
        hidden = observations
        for weight, bias in self.layers[:-1]:
            hidden = np.maximum(hidden @ weight.T + bias, 0.0)
        weight, bias = self.layers[-1]
        mean, raw = np.split(hidden @ weight.T + bias, 2, axis=1)
        low, high = self.log_std_bounds
        return mean, low + 0.5 * (high - low) * (np.tanh(raw) + 1)

    def act(self, observations: np.ndarray, noise: np.ndarray | None = None) -> np.ndarray:
        """Actions float32 [E, A]; `noise` [E, A] is standard normal, None gives the mode of the distribution."""
        mean, log_std = self.head(observations)
        return np.tanh(mean if noise is None else mean + noise * np.exp(log_std)).astype(np.float32)


@dataclass(slots=True)
class _OpenEpisode:
    """An unfinished episode, and the actions that repeat it."""

    number: int  # counted per environment
    noise: np.random.Generator
    observation: np.ndarray
    actions: list[np.ndarray] = field(default_factory=list)


class Collector:
    """Steps `count` environments side by side.

    Args:
        make: makes one environment.
        seed: of the run. Episode k of environment e starts from a seed of (run, e, k) and draws its noise from another.
        first_env, num_envs: this collector has environments first_env, first_env + 1, ... of all `num_envs`.
        count: how many of them.
        frames: draw a picture after every step.
    """

    def __init__(
        self, make: MakeEnv, *, seed: int, count: int = 1, first_env: int = 0, num_envs: int | None = None, frames: bool
    ) -> None:
        self._make, self._seed, self._frames = make, seed, frames
        self._first, self._count = first_env, count
        self._num_envs = num_envs or count
        self._envs: list[ControlEnv] = []
        self._open: list[_OpenEpisode] = []

    def collect(self, actor: NumpyActor | None, steps: int, episode_counts: Sequence[int] | None = None) -> StepBatch:
        """Take `steps` steps in every environment; the rows of one time step are adjacent.

        `actor` None acts uniformly at random. `episode_counts` [count] are the first episode numbers of a new
        collector, so that one that replaces a dead process uses no number twice.
        """
        if not self._envs:
            self._start(episode_counts or [0] * self._count)
        return StepBatch.concatenate([self._step_all(actor) for _ in range(steps)])

    def _start(self, episode_counts: Sequence[int]) -> None:
        self._envs = [self._make() for _ in range(self._count)]
        self._open = [self._reset(place, number) for place, number in enumerate(episode_counts)]

    def _reset(self, place: int, number: int) -> _OpenEpisode:
        env = self._first + place
        observation, _ = self._envs[place].reset(seed=derive_seed(self._seed, 20, env, number) % 2**31)
        noise = np.random.default_rng(derive_seed(self._seed, 21, env, number))
        return _OpenEpisode(number, noise, observation)

    def _step_all(self, actor: NumpyActor | None) -> StepBatch:
        observations = np.stack([episode.observation for episode in self._open])
        size = self._envs[0].action_space.shape[0]
        if actor is None:
            actions = np.stack([episode.noise.uniform(-1, 1, size) for episode in self._open]).astype(np.float32)
        else:
            noise = np.stack([episode.noise.standard_normal(size) for episode in self._open]).astype(np.float32)
            actions = actor.act(observations, noise)
        results = [env.step(action) for env, action in zip(self._envs, actions, strict=True)]
        batch = StepBatch(
            observations=observations,
            actions=actions,
            next_observations=np.stack([result[0] for result in results]),
            true_rewards=np.array([result[1] for result in results], np.float32),
            successes=np.array([e.success(r[4]) for e, r in zip(self._envs, results, strict=True)], np.float32),
            terminated=np.array([result[2] for result in results], bool),
            truncated=np.array([result[3] for result in results], bool),
            # A number that no other episode of the run has.
            episodes=np.array(
                [e.number * self._num_envs + self._first + k for k, e in enumerate(self._open)], np.int64
            ),
            times=np.array([len(episode.actions) for episode in self._open], np.int32),
            frames=np.stack([env.frame() for env in self._envs]) if self._frames else None,
        )
        for place, (observation, _, terminated, truncated, _) in enumerate(results):
            episode = self._open[place]
            if terminated or truncated:
                self._open[place] = self._reset(place, episode.number + 1)
            else:
                episode.observation = observation
                episode.actions.append(actions[place])
        return batch

    def state(self) -> dict[str, Any]:
        """Per environment its episode, the actions so far and the state of its noise, for `load`."""
        return {
            "episodes": [
                {
                    "number": episode.number,
                    "noise": episode.noise.bit_generator.state,
                    "actions": [action.tolist() for action in episode.actions],
                }
                for episode in self._open
            ]
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state: every open episode is started again and its actions are repeated."""
        saved = state["episodes"]
        if not saved:
            return
        self._start([entry["number"] for entry in saved])
        for place, entry in enumerate(saved):
            episode = self._open[place]
            for action in entry["actions"]:
                episode.actions.append(np.array(action, np.float32))
                episode.observation = self._envs[place].step(episode.actions[-1])[0]
            episode.noise.bit_generator.state = entry["noise"]

    def close(self) -> None:
        """Close the environments."""
        for env in self._envs:
            env.close()
        self._envs, self._open = [], []


@dataclass(slots=True)
class EpisodeResult:
    """One evaluation episode; `frames` uint8 [T, S, S, 3] where they were asked for."""

    seed: int
    true_return: float
    length: int
    success_best: float
    success_last: float
    frames: np.ndarray | None = None


def evaluation_seeds(config: PreferenceConfig) -> list[int]:
    """The starts of the evaluation episodes, the same at every evaluation of a run."""
    return [derive_seed(config.seed, 40, number) % 2**31 for number in range(config.preference.evaluation.episodes)]


class Evaluator:
    """Runs whole episodes with the mode of the policy.

    Args:
        make: makes one environment.
        parallel: how many episodes are stepped side by side.
        end_on_success: end an episode at the first step that succeeds, not only at the horizon.
    """

    def __init__(self, make: MakeEnv, parallel: int, end_on_success: bool = False) -> None:
        self._make, self._parallel, self._end_on_success = make, parallel, end_on_success
        self._envs: list[ControlEnv] = []

    def run(self, actor: NumpyActor, seeds: Sequence[int], film: int = 0) -> list[EpisodeResult]:
        """One episode per seed, in order; the first `film` of them with frames."""
        results: list[EpisodeResult] = []
        for start in range(0, len(seeds), self._parallel):
            chosen = seeds[start : start + self._parallel]
            results += self._run_some(actor, chosen, max(film - start, 0))
        return results

    def _run_some(self, actor: NumpyActor, seeds: Sequence[int], film: int) -> list[EpisodeResult]:
        while len(self._envs) < len(seeds):
            self._envs.append(self._make())
        observations = np.stack([env.reset(seed=seed)[0] for env, seed in zip(self._envs, seeds, strict=False)])
        results = [EpisodeResult(seed, 0.0, 0, 0.0, 0.0) for seed in seeds]
        films: list[list[np.ndarray]] = [[] for _ in seeds]
        running = list(range(len(seeds)))
        while running:
            actions = actor.act(observations[running])
            still = []
            for place, action in zip(running, actions, strict=True):
                env, result = self._envs[place], results[place]
                observation, reward, terminated, truncated, info = env.step(action)
                result.true_return += float(reward)
                result.length += 1
                result.success_last = env.success(info)
                result.success_best = max(result.success_best, result.success_last)
                if place < film:
                    films[place].append(env.frame())
                observations[place] = observation
                solved = self._end_on_success and result.success_last > 0
                if not (terminated or truncated or solved):
                    still.append(place)
            running = still
        for result, frames in zip(results, films, strict=True):
            result.frames = np.stack(frames) if frames else None
        return results

    def close(self) -> None:
        """Close the environments."""
        for env in self._envs:
            env.close()
        self._envs = []
