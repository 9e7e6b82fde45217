"""PreferenceSAC: SAC on a reward that is learned from preferences, as PEBBLE (arXiv 2106.05091) and RL-VLM-F do it.

Random steps; exploration rewarded by the entropy of states; a first labelling session, after which the whole replay
buffer is relabelled and the critics are reset; then a session every `num_interact` steps until `max_feedback`, each
followed by relabelling. One SAC update per environment step throughout. With a reward that is not learned this is SAC
alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from safetensors import SafetensorError
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file

from rl_vlm.algorithms.base import RunAlgorithm, RunAlgorithmConfig
from rl_vlm.algorithms.checkpoint import AGENT, read_state, write_state
from rl_vlm.config import PreferenceConfig
from rl_vlm.files import link_tree
from rl_vlm.models.devices import driver_device
from rl_vlm.preference.collector import Episode, EpisodeTracker, NumpyActor, StepBatch, make_run_env
from rl_vlm.preference.env_runner import ControlEnvRunner, ControlSampler
from rl_vlm.preference.evaluation import EpisodeResult, evaluation_metrics, evaluation_seeds
from rl_vlm.preference.feedback import Feedback, build_feedback
from rl_vlm.preference.replay import ReplayBuffer
from rl_vlm.preference.sac import Batch
from rl_vlm.preference.sac_learner import SACLearner, SACModule, SACUpdateBatch
from rl_vlm.preference.schedule import first_session_step, next_boundary, phase, session_size
from rl_vlm.seeding import derive_seed
from rl_vlm.types import UserInputError

# Beside AGENT in a checkpoint.
_REPLAY, _REWARD_MODEL, _LABELS = "replay.safetensors", "reward_model.safetensors", "labels"
# The updater's statistics under the names of a run's metrics.
_METRICS = {
    "critic_loss": "critic/loss",
    "q": "critic/q",
    "batch_reward": "critic/reward",
    "actor_loss": "policy/loss",
    "actor_entropy": "policy/entropy",
    "alpha_loss": "policy/alpha_loss",
    "alpha_value": "policy/alpha",
}
# Reward modes by the similarity of picture and text: the labels.source with the same model.
_SIMILARITY_SOURCES = {"clip_image_text_matching": "clip", "blip2_image_text_matching": "itm"}


class PreferenceSACConfig(RunAlgorithmConfig):
    """RLlib's configuration of PreferenceSAC. Labels and logs go to `scratch_folder`."""

    run_config: PreferenceConfig
    runner_class = ControlEnvRunner
    horizon = 0

    def _apply_run_config(self) -> None:
        super()._apply_run_config()
        preference = self.run_config.preference
        collection, sac = preference.collection, preference.sac
        self.env_runners(
            num_env_runners=collection.num_env_runners,
            num_cpus_per_env_runner=collection.cpus_per_env_runner,
        )
        self.learners(learner_class=SACLearner)
        self.training(lr=sac.lr)

    def get_default_rl_module_spec(self) -> RLModuleSpec:
        assert self.observation_space is not None and self.action_space is not None
        settings = {
            "settings": self.run_config.preference.sac,
            "seed": self.run_config.seed,
            "observation_size": self.observation_space.shape[0],
            "action_size": self.action_space.shape[0],
        }
        return RLModuleSpec(module_class=SACModule, model_config=settings)


class PreferenceSAC(RunAlgorithm):
    """The training loop. One `train()` is `steps_per_iteration` environment steps."""

    run_config: PreferenceConfig

    @classmethod
    def get_default_config(cls) -> PreferenceSACConfig:
        return PreferenceSACConfig(cls, PreferenceConfig())

    def start_services(self, config: PreferenceSACConfig) -> None:
        env = make_run_env(self.run_config)
        config.environment(env=None, observation_space=env.observation_space, action_space=env.action_space)
        config.horizon = env.horizon
        env.close()
        self._service = config.service
        if self._service is None and self.run_config.preference.asks_served_model:
            from rl_vlm.serving.service import start_service

            self._service = start_service(self.run_config)

    def stop_services(self) -> None:
        if (feedback := getattr(self, "feedback", None)) is not None:
            feedback.close()
        super().stop_services()

    def _served(self) -> tuple[Any, Any]:
        """A client of the served model and its text side, once it is ready; (None, None) where nothing is served."""
        service = self._service
        if service is None:
            return None, None
        from rl_vlm.models.loading import load_text_side
        from rl_vlm.serving.client import PolicyClient
        from rl_vlm.serving.router import homes

        service.wait_until_ready()
        serving = self.run_config.serving
        client = PolicyClient(
            service.run_id,
            deadline_s=serving.request_timeout_s,
            homes=homes(service.key, 0, 1, serving),
            key=service.key,
        )
        return client, load_text_side(service.model.folder, self.run_config.model.pixels)

    def make_state(self) -> None:
        # The matrices are small: more threads gain little, and cost much where other processes use the same cores.
        torch.set_num_threads(self.run_config.learner.num_threads)
        settings = self.settings = self.run_config.preference
        # The reward changes after the first phase: then the critics must be reset.
        self._starts_anew = settings.learns_reward or settings.exploration_steps > 0
        observations, actions = (self.config.observation_space.shape[0], self.config.action_space.shape[0])
        capacity = settings.replay_capacity
        frame_capacity = settings.frame_capacity if settings.draws_frames else 0
        if settings.rewards_images:
            # A row without its picture could not be relabelled.
            capacity = frame_capacity = min(capacity, settings.frame_capacity)
        num_envs = settings.collection.num_envs
        steps = -(-settings.total_steps // num_envs) * num_envs  # all environments step together, the last time, too
        self.replay = ReplayBuffer(min(capacity, steps), observations, actions, frame_capacity, settings.image_size)
        self.feedback: Feedback | None = build_feedback(
            self.run_config, self.folder, self._served(), (observations, actions)
        )
        # What gives the reward where the task does not.
        self._reward_model: Any = self.feedback.model if self.feedback is not None else None
        if settings.reward in _SIMILARITY_SOURCES:
            from rl_vlm.labelling.building import build_similarity

            labels = settings.labels.model_copy(update={"source": _SIMILARITY_SOURCES[settings.reward]})
            self._reward_model = build_similarity(labels, self.run_config.env.id, driver_device(self.run_config))
        self.sampler = ControlSampler(self.runners, self.local_runner, settings.collection.timeout_s)
        self.tracker = EpisodeTracker()
        self.env_steps = 0  # environment steps
        self.last_session = -1  # the step of the last one; -1: critics have not been reset yet
        self._reset_is_due = False
        self.on_episode: Callable[[Episode], None] = lambda _: None
        self.on_session: Callable[[dict[str, float]], None] = lambda _: None
        self._rng = np.random.default_rng(derive_seed(self.run_config.seed, 10))
        self.target_entropy = -float(actions)
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._episodes: list[Episode] = []
        self._remember_learner()

    # One iteration.

    def iterate(self) -> None:
        """Environment steps until the next row of metrics is due."""
        self._first_step = self.env_steps
        every = self.settings.steps_per_iteration
        end = min((self.env_steps // every + 1) * every, self.settings.total_steps)
        self._session_metrics: dict[str, float] = {}
        self._sums.clear()
        self._episodes = []
        if self._reset_is_due:  # a learner was lost during it
            self._reset_critics()
        while self.env_steps < end and not self.stop_requested():
            if self._session_is_due():
                with self.timed("session"):
                    report = self._session()
                if report is None:
                    break  # the user wants to stop
                self._session_metrics = report
            self._advance(end)
        while self.sampler.is_running:
            self._advance(end)  # the user wants to stop; the running steps must be in the replay buffer too
        self._remember_learner()

    def _advance(self, end: int) -> None:
        """Collect a round of steps, and make as many updates."""
        self._request(end)
        with self.timed("collect"):
            batch = self.sampler.finish()
        current = phase(self.settings, self.env_steps)
        with self.timed("reward"):
            rewards = self._rewards_of(batch)
        self.replay.add(batch, rewards)
        before, self.env_steps = self.env_steps, self.env_steps + len(batch)
        for episode in self.tracker.add(batch, rewards):
            self._episodes.append(episode)
            self.on_episode(episode)
        over = self.env_steps >= end or self._session_is_due() or self.stop_requested()
        if not (self.run_config.deterministic or self.sampler.is_local or over):
            self._request(end)  # env runners step while the learner learns
        if before > 0 and current != "random":
            with self.timed("learn"):
                self._update(len(batch) * self.settings.sac.updates_per_step, explore=current == "explore")

    def _rewards_of(self, batch: StepBatch) -> np.ndarray:
        """float32 [n]."""
        if self.settings.reward == "gt_task_reward":
            return batch.true_rewards
        if self.settings.reward == "sparse_task_reward":
            return batch.successes
        sees_frames = self._reward_model.input_kind == "image"
        inputs = batch.frames if sees_frames else np.concatenate([batch.observations, batch.actions], axis=1)
        return self._reward_model.rewards(inputs)  # type: ignore[no-any-return]

    def _request(self, end: int) -> None:
        """Start the next round of steps unless one is running; it ends at the next change of phase at the latest."""
        if self.sampler.is_running:
            return
        num_envs = self.sampler.num_envs
        left = min(end, next_boundary(self.settings, self.env_steps, self._next_session())) - self.env_steps
        steps = max(min(self.settings.collection.steps, -(-left // num_envs)), 1)
        random = phase(self.settings, self.env_steps) == "random"
        self.sampler.start(None if random else self._actor, steps)

    # Updates.

    def _update(self, count: int, explore: bool = False, reset: bool = False) -> None:
        replay, settings = self.replay, self.settings
        if not count and not reset:
            return
        rows = replay.sample_rows(count * settings.sac.batch_size, self._rng).reshape(count, settings.sac.batch_size)
        batch = SACUpdateBatch(
            tuple(getattr(replay, name)[rows] for name in Batch._fields),
            visited=replay.observations[: len(replay)] if explore else None,
            exploration_k=settings.exploration_k,
            reset_critics=reset,
        )
        ((statistics, layers),) = self.learners.update([batch])
        updates = statistics.get("updates", 0.0)
        for name, value in statistics.items():
            self._sums[name] += value if name == "updates" else value * updates
        self._actor = NumpyActor(layers, self.settings.sac.log_std_bounds)

    def _remember_learner(self) -> None:
        """Take the actor, and copy the state of a remote learner, which may die: a few megabytes per iteration."""
        remote = not self.learner_group.is_local
        actor, self._learner_state = self.learners.call(
            lambda learner: (learner.actor_layers(), learner.snapshot() if remote else None)
        )
        self._actor = NumpyActor(actor, self.settings.sac.log_std_bounds)

    def restore_learners(self) -> None:
        """Experience, labels and reward model are in the driver."""
        state = self._learner_state
        self.learners.call(lambda learner: learner.restore(state))
        self._remember_learner()

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

    def _session_is_due(self) -> bool:
        due = self._next_session()
        return due is not None and self.env_steps >= due

    def _session(self) -> dict[str, float] | None:
        """Ask for labels, train the reward model, relabel; the first session also resets the critics. None: to stop."""
        metrics: dict[str, float] = {}
        if self.feedback is not None:
            self.feedback.stop_requested = self.stop_requested
            count = session_size(self.settings, self.env_steps, self.feedback.asked)
            report = self.feedback.session(
                self.replay, count, self.env_steps, self._rng, self.tracker.mean_true_return, self.config.horizon
            )
            if report is None and self.stop_requested():
                return None
            if report is not None:
                metrics = report
                with self.timed("relabel"):
                    self.replay.relabel_with(self._reward_model.input_kind, self._reward_model.rewards)
        self._reset_is_due = self.last_session < 0
        self.last_session = self.env_steps
        self.on_session(metrics)
        if self._reset_is_due:
            self._reset_critics()
        return metrics

    def _reset_critics(self) -> None:
        self._update(self.settings.reset_updates, reset=True)
        self._remember_learner()  # a learner that replaces this one must not have the critics from before
        self._reset_is_due = False

    # Metrics.

    def update_statistics(self) -> dict[str, float]:
        """Means over the updates of the running iteration; empty before the first."""
        updates = self._sums.get("updates", 0.0)
        return {name: self._sums[name] / updates for name in _METRICS} if updates else {}

    def iteration_metrics(self, seconds: float) -> dict[str, float]:
        metrics = {_METRICS[name]: value for name, value in self.update_statistics().items()}
        if self._episodes:
            metrics |= {
                "reward/mean": float(np.mean([episode.true_return for episode in self._episodes])),
                "reward/learned": float(np.mean([episode.learned_return for episode in self._episodes])),
                "rollout/success": float(np.mean([episode.success for episode in self._episodes])),
                "rollout/length": float(np.mean([episode.length for episode in self._episodes])),
            }
        if self.feedback is not None:
            metrics["labels/total"] = float(self.feedback.asked)
        self.restarts["env_runner"] = self.sampler.restarts
        return {
            **metrics,
            "rollout/episodes": float(self.tracker.finished),
            "rollout/steps_per_s": (self.env_steps - self._first_step) / max(seconds, 1e-9),
            "policy/updates": self._sums.get("updates", 0.0),
            "replay/rows": float(len(self.replay)),
            **self._session_metrics,
        }

    def evaluate_policy(self, film: bool = True) -> list[EpisodeResult]:
        """The evaluation episodes, always from the same random starts; the first few with pictures if `film`."""
        evaluation = self.settings.evaluation
        film_count, timeout = evaluation.film if film else 0, self.run_config.evaluation.timeout_s
        return self.sampler.evaluate(self._actor, evaluation_seeds(self.run_config), film_count, timeout)

    def progress(self) -> tuple[int, int, int]:
        return self.env_steps, self.settings.total_steps, self.settings.evaluation.every

    def held_out(self) -> dict[str, float]:
        metrics = evaluation_metrics(self.evaluate_policy(film=False))
        return {name: metrics[f"{name}/success"] for name in ("accuracy", "reward")}

    # Checkpoints.

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Tune's hook, and a run's; the folder holds safetensors, parquet, PNG and JSON, no pickle."""
        folder = Path(checkpoint_dir)
        save_file(self.learners.call(lambda learner: learner.snapshot()), folder / AGENT)
        save_arrays(self.replay.state(), folder / _REPLAY)
        if self.feedback is not None:
            self.feedback.model.save(folder / _REWARD_MODEL)
            link_tree(self.feedback.store.folder, folder / _LABELS)
        write_state(
            folder,
            {
                "step": self.env_steps,
                "last_session": -1 if self._reset_is_due else self.last_session,
                "rng": self._rng.bit_generator.state,
                "feedback": self.feedback.state() if self.feedback is not None else None,
                "tracker": self.tracker.state(),
                "collectors": self.sampler.states(),
                "episode_counts": self.sampler.episode_counts,
            },
        )

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Tune's hook, and `--resume`. Raises UserInputError when the checkpoint is incomplete or does not fit."""
        folder = Path(checkpoint_dir)
        state = read_state(folder)
        try:
            learner_state = load_file(folder / AGENT)
            replay = load_arrays(folder / _REPLAY)
        except (OSError, ValueError, SafetensorError) as error:
            raise UserInputError(f"The checkpoint {folder} is corrupt ({error}): use an older one.") from error
        self.learners.call(lambda learner: learner.restore(learner_state))
        self._remember_learner()
        self.replay.load(replay)
        if self.feedback is not None:
            self.feedback.store.restore(folder / _LABELS)
            self.feedback.load(state["feedback"], folder / _REWARD_MODEL)
        self.env_steps, self.last_session = int(state["step"]), int(state["last_session"])
        self._rng.bit_generator.state = state["rng"]
        self.tracker.load(state["tracker"])
        self.sampler.load_states(state["collectors"], state["episode_counts"])
