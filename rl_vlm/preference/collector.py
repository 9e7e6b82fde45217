"""Steps control environments with a policy, with an exact resume. No Ray here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from rl_vlm.config import PreferenceConfig
from rl_vlm.control_envs.base import ControlEnv
from rl_vlm.control_envs.registry import make_control_env
from rl_vlm.seeding import derive_seed
from rl_vlm.types import RLVLMError, UserInputError

MakeEnv = Callable[[], ControlEnv]


def make_run_env(config: PreferenceConfig) -> ControlEnv:
    """An environment of a run. Raises UserInputError where no episode holds a segment: no pair could be labelled."""
    settings = config.preference
    if "image_size" in config.env.kwargs:
        raise UserInputError("env.kwargs.image_size is not used: set preference.image_size.")
    env = make_control_env(config.env.id, image_size=settings.image_size, **config.env.kwargs)
    asks_for_pairs = settings.reward == "learn_from_preference" and settings.labels.source != "cache"
    if asks_for_pairs and settings.segment_length > env.horizon:
        env.close()
        raise UserInputError(
            f"preference.segment_length is {settings.segment_length} and episodes have at most {env.horizon} steps: no "
            "pair of segments could be labelled. Take shorter segments, or longer episodes."
        )
    return env


class CollectionError(RLVLMError):
    """An environment failed, or no env runner answered in time.

    Do: repair the environment that the message names, then `--resume`.
    """


@contextmanager
def environment_errors() -> Iterator[None]:
    """Raise any exception of an environment as a CollectionError; this package's own errors stay as they are."""
    try:
        yield
    except RLVLMError:
        raise
    except Exception as error:  # an environment may raise anything
        raise CollectionError(f"An environment failed: {type(error).__name__}: {error}.") from error


@dataclass(slots=True)
class StepBatch:
    """n steps of any number of environments, each environment's in the order in which they happened."""

    observations: np.ndarray  # float32 [n, O], as the next ones
    actions: np.ndarray  # float32 [n, A]
    next_observations: np.ndarray
    true_rewards: np.ndarray  # float32 [n], as the successes
    successes: np.ndarray
    terminated: np.ndarray  # bool [n]
    truncated: np.ndarray
    episodes: np.ndarray  # int64 [n], numbers that are never reused
    times: np.ndarray  # int32 [n], from 0
    frames: np.ndarray | None = None  # uint8 [n, S, S, 3], drawn after the step

    def __len__(self) -> int:
        return len(self.actions)

    @classmethod
    def concatenate(cls, batches: list[StepBatch]) -> StepBatch:
        columns: dict[str, Any] = {}
        for name in (column.name for column in fields(cls)):
            parts = [getattr(batch, name) for batch in batches]
            columns[name] = None if parts[0] is None else np.concatenate(parts)
        return cls(**columns)


class NumpyActor:
    """The agent's policy without torch's cost per call: a squashed Gaussian with the arithmetic of
    `sac.sample_actions`. `layers` are (weight [out, in], bias [out]) float32; the last one gives [2 A] numbers."""

    def __init__(self, layers: Sequence[tuple[np.ndarray, np.ndarray]], log_std_bounds: tuple[float, float]) -> None:
        self.layers = [(np.asarray(weight, np.float32), np.asarray(bias, np.float32)) for weight, bias in layers]
        self.log_std_bounds = log_std_bounds

    def act(self, observations: np.ndarray, noise: np.ndarray | None = None) -> np.ndarray:
        """Actions float32 [E, A]; `noise` [E, A] is standard normal, None gives the mode of the distribution."""
        hidden = observations
        for weight, bias in self.layers[:-1]:
            hidden = np.maximum(hidden @ weight.T + bias, 0.0)
        weight, bias = self.layers[-1]
        mean, raw = np.split(hidden @ weight.T + bias, 2, axis=1)
        if noise is not None:
            low, high = self.log_std_bounds
            mean = mean + noise * np.exp(low + 0.5 * (high - low) * (np.tanh(raw) + 1))
        return np.tanh(mean).astype(np.float32)


class Collector:
    """Steps one environment, number `env` of all `num_envs` of the run; with `frames` each step is drawn.

    Episode k of environment e starts from a seed of (run, e, k) and draws its noise from another.
    """

    def __init__(self, make: MakeEnv, *, seed: int, env: int = 0, num_envs: int = 1, frames: bool) -> None:
        self._make, self._seed, self._number, self._num_envs, self._frames = make, seed, env, num_envs, frames
        self._env: ControlEnv | None = None
        self._episode = 0  # counted per environment
        self._actions: list[np.ndarray] = []  # of the unfinished episode, which they repeat

    def collect(self, actor: NumpyActor | None, steps: int, first_episode: int = 0) -> StepBatch:
        """Take `steps` steps. `actor` None acts uniformly at random. A new collector begins with `first_episode`, so
        that one that replaces a dead process uses no number twice."""
        if self._env is None:
            self._env = self._make()
            self._reset(self._env, first_episode)
        return StepBatch.concatenate([self._step(self._env, actor) for _ in range(steps)])

    def _reset(self, env: ControlEnv, episode: int) -> None:
        self._episode, self._actions = episode, []
        self._observation, _ = env.reset(seed=derive_seed(self._seed, 20, self._number, episode) % 2**31)
        self._noise = np.random.default_rng(derive_seed(self._seed, 21, self._number, episode))

    def _step(self, env: ControlEnv, actor: NumpyActor | None) -> StepBatch:
        size = env.action_space.shape[0]
        if actor is None:
            action = self._noise.uniform(-1, 1, size).astype(np.float32)
        else:
            noise = self._noise.standard_normal(size).astype(np.float32)
            action = actor.act(self._observation[None], noise[None])[0]
        observation, reward, terminated, truncated, info = env.step(action)
        batch = StepBatch(
            observations=np.array([self._observation]),
            actions=np.array([action]),
            next_observations=np.array([observation]),
            true_rewards=np.array([reward], np.float32),
            successes=np.array([env.success(info)], np.float32),
            terminated=np.array([terminated], bool),
            truncated=np.array([truncated], bool),
            # A number that no other episode of the run has.
            episodes=np.array([self._episode * self._num_envs + self._number], np.int64),
            times=np.array([len(self._actions)], np.int32),
            frames=np.array([env.frame()]) if self._frames else None,
        )
        self._observation = observation
        self._actions.append(action)
        if terminated or truncated:
            self._reset(env, self._episode + 1)
        return batch

    def state(self) -> dict[str, Any] | None:
        """The open episode: its number, actions so far, and the state of its noise; None before the first step."""
        if self._env is None:
            return None
        actions = [action.tolist() for action in self._actions]
        return {"episode": self._episode, "noise": self._noise.bit_generator.state, "actions": actions}

    def load(self, saved: Mapping[str, Any] | None) -> None:
        """Restore a saved state: start the open episode again and repeat its actions."""
        if saved is None:
            return
        env = self._env = self._make()
        self._reset(env, saved["episode"])
        for action in saved["actions"]:
            self._actions.append(np.array(action, np.float32))
            self._observation = env.step(self._actions[-1])[0]
        self._noise.bit_generator.state = saved["noise"]

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None


@dataclass(slots=True)
class Episode:
    """An episode of the collection so far."""

    number: int = 0  # among the finished episodes of a run, from 1
    learned_return: float = 0.0
    true_return: float = 0.0
    success: float = 0.0  # the best of any moment, 0 or 1
    length: int = 0


class EpisodeTracker:
    """Sums rewards and steps per episode."""

    def __init__(self) -> None:
        self.finished = 0
        self._open: dict[int, Episode] = {}
        self._returns: deque[float] = deque(maxlen=10)

    def add(self, batch: StepBatch, rewards: np.ndarray) -> list[Episode]:
        """Add a round of steps with the agent's rewards; returns the episodes that ended."""
        ended = []
        for row, number in enumerate(batch.episodes.tolist()):
            episode = self._open.setdefault(number, Episode())
            episode.learned_return += float(rewards[row])
            episode.true_return += float(batch.true_rewards[row])
            episode.success = max(episode.success, float(batch.successes[row]))
            episode.length += 1
            if batch.terminated[row] or batch.truncated[row]:
                self.finished += 1
                episode.number = self.finished
                self._returns.append(episode.true_return)
                ended.append(self._open.pop(number))
        return ended

    @property
    def mean_true_return(self) -> float:
        """Over the last ten episodes; 0 before the first ends."""
        return float(np.mean(self._returns)) if self._returns else 0.0

    def state(self) -> dict[str, Any]:
        return {
            "finished": self.finished,
            "returns": list(self._returns),
            "open": {str(number): asdict(episode) for number, episode in self._open.items()},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.finished = int(state["finished"])
        self._returns = deque(state["returns"], maxlen=10)
        self._open = {int(number): Episode(**episode) for number, episode in state["open"].items()}
