"""PreferenceSAC: SAC on a reward that is learned from preferences, as PEBBLE (arXiv 2106.05091) and RL-VLM-F do it.

Random steps; exploration rewarded by the entropy of states; a first labelling session, after which the whole replay buffer
is relabelled and the critics start anew; then a session every `num_interact` steps until `max_feedback`, each followed by
relabelling. One SAC update per environment step throughout. With a reward that is not learned this is SAC alone.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from safetensors import SafetensorError
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file

from rl_vlm.algorithms import preference_checkpoint as checkpoints
from rl_vlm.algorithms.base_config import RunAlgorithmConfig
from rl_vlm.algorithms.learners import on_one_learner
from rl_vlm.config import RunConfig
from rl_vlm.preference.agent_reward import AgentReward
from rl_vlm.preference.collector import EpisodeResult, NumpyActor, make_run_env
from rl_vlm.preference.env_runner import ControlEnvRunner
from rl_vlm.preference.episode_log import EpisodeTracker, FinishedEpisode
from rl_vlm.preference.evaluation import evaluation_seeds
from rl_vlm.preference.feedback import Feedback
from rl_vlm.preference.feedback_builder import LabellingSide, build_feedback
from rl_vlm.preference.replay import ReplayBuffer
from rl_vlm.preference.sac_learner import SACLearner, SACModule, SACUpdateBatch, SACUpdateResult
from rl_vlm.preference.sampler import ControlSampler
from rl_vlm.preference.schedule import first_session_step, next_boundary, phase, session_size
from rl_vlm.seeding import derive_seed
from rl_vlm.types import UserInputError

# With fewer updates than this a run ends before compiling has paid for itself.
_WORTH_COMPILING = 100_000
# The updater's statistics under the names of a run's figures.
_FIGURES = {
    "critic_loss": "critic/loss",
    "q": "critic/q",
    "batch_reward": "critic/reward",
    "actor_loss": "policy/loss",
    "entropy": "policy/entropy",
    "alpha_loss": "policy/alpha_loss",
    "alpha": "policy/alpha",
}


class PreferenceSACConfig(RunAlgorithmConfig):
    """RLlib's configuration of PreferenceSAC. Labels and logs go to `scratch_folder`."""

    def __init__(self, algo_class: type[Algorithm] | None = None) -> None:
        self.compile_updates = False
        self.horizon = 0
        super().__init__(algo_class or PreferenceSAC)

    def _apply_run_config(self) -> None:
        super()._apply_run_config()
        preference = self.run_config.preference
        collection, sac = preference.collection, preference.sac
        self.env_runners(
            env_runner_cls=ControlEnvRunner,
            num_env_runners=collection.num_env_runners,
            num_cpus_per_env_runner=collection.cpus_per_env_runner,
            create_local_env_runner=collection.num_env_runners == 0,
        )
        self.training(learner_class=SACLearner, lr=sac.lr)
        planned = preference.total_steps * sac.updates_per_step
        self.compile_updates = sac.compile == "on" or (sac.compile == "auto" and planned >= _WORTH_COMPILING)

    def prepare(self) -> None:
        """Fill in what only the environment knows: its spaces and its horizon."""
        env = make_run_env(self.run_config)
        self.environment(env=None, observation_space=env.observation_space, action_space=env.action_space)
        self.horizon = env.horizon
        env.close()
        self._apply_run_config()

    def get_default_rl_module_spec(self) -> RLModuleSpec:
        """RLlib asks for the module that the learner trains."""
        assert self.observation_space is not None and self.action_space is not None
        settings = {
            "settings": self.run_config.preference.sac,
            "seed": self.run_config.seed,
            "observation_size": self.observation_space.shape[0],
            "action_size": self.action_space.shape[0],
        }
        return RLModuleSpec(module_class=SACModule, model_config=settings)


class PreferenceSAC(Algorithm):
    """The training loop. One `train()` is `steps_per_iteration` environment steps, so Tune can run it as it is."""

    learner_group: Any
    env_runner_group: Any

    @classmethod
    def get_default_config(cls) -> PreferenceSACConfig:
        """RLlib asks for this."""
        return PreferenceSACConfig()

    def setup(self, config: AlgorithmConfig) -> None:
        """Start the labeller's side, env runners and the learner."""
        config = self.get_default_config().own_copy(config)
        config.prepare()
        config.freeze()
        self.config = config
        self.run: RunConfig = config.run_config
        self.folder = config.scratch_folder or Path(self.logdir)
        # Replicas of a served labeller load while the rest starts.
        self._labelling = LabellingSide(self.run, self.folder)
        try:
            super().setup(config)
            self._prepare()
        except BaseException:
            self._labelling.stop()
            raise

    def _prepare(self) -> None:
        # Small products: more threads win little, and lose much where others use the same cores.
        torch.set_num_threads(self.run.learner.num_threads)
        settings = self.settings = self.run.preference
        observations, actions = (self.config.observation_space.shape[0], self.config.action_space.shape[0])
        capacity = settings.replay_capacity
        frame_capacity = settings.frame_capacity if settings.draws_frames else 0
        if settings.rewards_images:
            # A row without its picture could not be relabelled.
            capacity = frame_capacity = min(capacity, settings.frame_capacity)
        self.replay = ReplayBuffer(
            min(capacity, settings.total_steps), observations, actions, frame_capacity, settings.image_size
        )
        self.feedback: Feedback | None = build_feedback(self.run, self.folder, self._labelling, (observations, actions))
        model = self.feedback.model if self.feedback is not None else None
        self.reward = AgentReward(settings, self.run.env.id, model)
        collection = settings.collection
        self.sampler = ControlSampler(self.env_runner_group, collection.envs_per_runner, collection.timeout_s)
        self.tracker = EpisodeTracker()
        self.env_steps = 0  # environment steps
        self.last_session = -1  # the step of the last one; -1: critics have not been reset yet
        self.last_metrics: dict[str, float] = {}
        self.on_episode: Callable[[FinishedEpisode], None] = lambda _: None
        self.on_session: Callable[[dict[str, float]], None] = lambda _: None
        self._rng = np.random.default_rng(derive_seed(self.run.seed, 10))
        self._actor = self._actor_of(self._on_learner(lambda learner: learner.actor_layers()))
        self.target_entropy: float = self._on_learner(lambda learner: learner.updater.target_entropy)
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._clock: defaultdict[str, float] = defaultdict(float)
        self._episodes: list[FinishedEpisode] = []
        self.stop_requested: Callable[[], bool] = lambda: False

    def _actor_of(self, layers: Any) -> NumpyActor:
        return NumpyActor(layers, self.settings.sac.log_std_bounds)

    # One iteration.

    def training_step(self) -> None:
        """Environment steps until the next row of figures is due."""
        started, first = time.perf_counter(), self.env_steps
        every = self.settings.steps_per_iteration
        end = min((self.env_steps // every + 1) * every, self.settings.total_steps)
        session: dict[str, float] = {}
        self._sums.clear()
        self._clock.clear()
        self._episodes = []
        while self.env_steps < end and not self.stop_requested():
            if self._session_is_due():
                with self._timed("session"):
                    report = self._session()
                if report is None:
                    break  # the user wants to stop
                session = report
            self._advance(end)
        if self.sampler.is_running:
            self._advance(end)  # the user wants to stop; what the env runners do must agree with the replay buffer
        self.last_metrics = {**self._figures(time.perf_counter() - started, self.env_steps - first), **session}
        for name, value in self.last_metrics.items():
            self.metrics.log_value(tuple(name.split("/")), value, window=1)

    def _advance(self, end: int) -> None:
        """Collect a round of steps, and make as many updates."""
        self._request(end)
        with self._timed("collect"):
            batch = self.sampler.finish()
        current = phase(self.settings, self.env_steps)
        with self._timed("reward"):
            rewards = self.reward.of(batch)
        self.replay.add(batch, rewards)
        before, self.env_steps = self.env_steps, self.env_steps + len(batch)
        for episode in self.tracker.add(batch, rewards):
            self._episodes.append(episode)
            self.on_episode(episode)
        if self._may_overlap(end):
            self._request(end)  # env runners step while the learner learns
        if before > 0 and current != "random":
            with self._timed("learn"):
                self._update(len(batch) * self.settings.sac.updates_per_step, explore=current == "explore")

    def _request(self, end: int) -> None:
        """Ask for the next round of steps, if that has not been done: no further than to where something changes."""
        if self.sampler.is_running:
            return
        num_envs = self.sampler.num_envs
        left = min(end, next_boundary(self.settings, self.env_steps, self._next_session())) - self.env_steps
        steps = max(min(self.settings.collection.steps, -(-left // num_envs)), 1)
        random = phase(self.settings, self.env_steps) == "random"
        self.sampler.start(None if random else self._actor, steps)

    def _may_overlap(self, end: int) -> bool:
        return not (self.run.deterministic or self.sampler.is_local or self.env_steps >= end or self._session_is_due())

    # Updates.

    def _update(self, count: int, explore: bool = False, reset: bool = False) -> None:
        replay, settings = self.replay, self.settings
        if not count and not reset:
            return
        rows = replay.sample_rows(count * settings.sac.batch_size, self._rng).reshape(count, settings.sac.batch_size)
        batch = SACUpdateBatch(
            replay.observations[rows],
            replay.actions[rows],
            replay.rewards[rows],
            replay.next_observations[rows],
            replay.continues[rows],
            visited=replay.observations[: len(replay)] if explore else None,
            exploration_k=settings.exploration_k,
            reset_critics=reset,
        )
        if self.learner_group.is_local:
            data = TrainingData(episodes=[batch])
        else:
            data = TrainingData(episodes_refs=[ray.put([batch])])
        (result,) = self.learner_group.update(training_data=data)
        self._count(result)
        self._actor = self._actor_of(result.actor)

    def _count(self, result: SACUpdateResult) -> None:
        updates = result.statistics.get("updates", 0.0)
        for name, value in result.statistics.items():
            self._sums[name] += value if name == "updates" else value * updates

    # Labels.

    def _next_session(self) -> int | None:
        """The step at which the next session (or the reset after exploration) is due; None: never again."""
        if self.last_session < 0:
            return first_session_step(self.settings) if self._starts_anew else None
        if self.feedback is None or self.feedback.exhausted:
            return None
        if not session_size(self.settings, self.env_steps, self.feedback.asked):
            return None
        return self.last_session + self.settings.num_interact

    @property
    def _starts_anew(self) -> bool:
        """Whether the critics learn from another reward at first than later."""
        return self.settings.learns_reward or self.settings.exploration_steps > 0

    def _session_is_due(self) -> bool:
        due = self._next_session()
        return due is not None and self.env_steps >= due

    def _session(self) -> dict[str, float] | None:
        """Labels, a better reward model, relabelling; after the first also new critics. None: the user wants to stop."""
        figures: dict[str, float] = {}
        first = self.last_session < 0
        if self.feedback is not None:
            self.feedback.stop_requested = self.stop_requested
            count = session_size(self.settings, self.env_steps, self.feedback.asked)
            report = self.feedback.session(
                self.replay, count, self.env_steps, self._rng, self.tracker.mean_true_return, self.config.horizon
            )
            if report is None and self.stop_requested():
                return None
            if report is not None:
                figures = report.metrics()
                with self._timed("relabel"):
                    self.reward.relabel(self.replay)
        if first:
            self._update(self.settings.reset_updates, reset=True)
        self.last_session = self.env_steps
        self.on_session(figures)
        return figures

    # Figures.

    def running_figures(self) -> dict[str, float]:
        """Means over the updates of the running iteration; empty before the first."""
        updates = self._sums.get("updates", 0.0)
        return {name: self._sums[sum_] / updates for sum_, name in _FIGURES.items()} if updates else {}

    def _figures(self, seconds: float, steps: int) -> dict[str, float]:
        figures = self.running_figures()
        if self._episodes:
            figures |= {
                "reward/mean": float(np.mean([episode.true_return for episode in self._episodes])),
                "reward/learned": float(np.mean([episode.learned_return for episode in self._episodes])),
                "rollout/success": float(np.mean([episode.success for episode in self._episodes])),
                "rollout/length": float(np.mean([episode.length for episode in self._episodes])),
            }
        if self.feedback is not None:
            figures["labels/total"] = float(self.feedback.asked)
        return {
            **figures,
            "rollout/episodes": float(self.tracker.finished),
            "rollout/steps_per_s": steps / max(seconds, 1e-9),
            "policy/updates": self._sums.get("updates", 0.0),
            "replay/rows": float(len(self.replay)),
            "replay/mib": self.replay.nbytes / 2**20,
            "restarts/env_runner": float(self.sampler.restarts),
            "time/step": seconds,
            **{f"time/{name}": value for name, value in self._clock.items()},
        }

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._clock[name] += time.perf_counter() - started

    def _on_learner(self, function: Any) -> Any:
        return on_one_learner(self.learner_group, function)

    # Evaluation.

    def evaluate_policy(self, film: bool = True) -> list[EpisodeResult]:
        """The evaluation episodes, always from the same random starts; the first few with pictures if `film`."""
        evaluation = self.settings.evaluation
        film_count, timeout = evaluation.film if film else 0, self.run.evaluation.timeout_s
        return self.sampler.evaluate(self._actor, evaluation_seeds(self.run), film_count, timeout)

    # Checkpoints.

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Tune's hook, and a run's; the folder holds safetensors, parquet, PNG and JSON, no pickle."""
        folder = Path(checkpoint_dir)
        tensors = self._on_learner(lambda learner: learner.tensors())
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / checkpoints.AGENT)
        save_arrays(self.replay.state(), folder / checkpoints.REPLAY)
        if self.feedback is not None:
            self.feedback.model.save(folder / checkpoints.REWARD_MODEL)
            checkpoints.link_tree(self.feedback.store.folder, folder / checkpoints.LABELS)
        checkpoints.write_state(
            folder,
            {
                "step": self.env_steps,
                "last_session": self.last_session,
                "rng": self._rng.bit_generator.state,
                "learner": self._on_learner(lambda learner: learner.scalars()),
                "feedback": self.feedback.state() if self.feedback is not None else None,
                "tracker": self.tracker.state(),
                "collectors": self.sampler.states(),
            },
        )

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Tune's hook, and `--resume`. Raises UserInputError when the checkpoint is incomplete or does not fit."""
        folder = Path(checkpoint_dir)
        state = checkpoints.read_state(folder)
        try:
            tensors = load_file(folder / checkpoints.AGENT)
            replay = load_arrays(folder / checkpoints.REPLAY)
        except (OSError, ValueError, SafetensorError) as error:
            raise UserInputError(f"The checkpoint {folder} is corrupt ({error}): use an older one.") from error
        scalars = state["learner"]
        self._on_learner(lambda learner: learner.restore(tensors, scalars))
        self._actor = self._actor_of(self._on_learner(lambda learner: learner.actor_layers()))
        self.replay.load(replay)
        if self.feedback is not None:
            checkpoints.restore_labels(folder / checkpoints.LABELS, self.feedback.store)
            self.feedback.load(state["feedback"], folder / checkpoints.REWARD_MODEL)
        self.env_steps, self.last_session = int(state["step"]), int(state["last_session"])
        self._rng.bit_generator.state = state["rng"]
        self.tracker.load(state["tracker"])
        self.sampler.load_states(state["collectors"])

    def restore_env_runners(self, env_runner_group: Any) -> list[int]:
        """RLlib's hook before each step: the sampler asks restarted runners itself."""
        return []

    def cleanup(self) -> None:
        """Stop env runners, the learner and the labeller's side."""
        super().cleanup()
        feedback = getattr(self, "feedback", None)
        if feedback is not None:
            feedback.close()
        self._labelling.stop()
