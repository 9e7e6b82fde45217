"""A run of the preference loop: its checks, iterations, evaluations, checkpoints, and the CSV files of RL-VLM-F."""

from __future__ import annotations

import io
import logging
import os
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from rl_vlm.algorithms.checkpoint import read_state
from rl_vlm.config import PreferenceConfig, PreferenceSection
from rl_vlm.files import clean_leftovers, write_atomic
from rl_vlm.labelling.query_log import StepCsv
from rl_vlm.labelling.store import label_cache
from rl_vlm.models.loading import resolve_model
from rl_vlm.monitoring.display import PREFERENCE_ROWS
from rl_vlm.preference.collector import Episode, make_run_env
from rl_vlm.preference.evaluation import EpisodeResult, evaluation_metrics
from rl_vlm.preference.schedule import first_session_step
from rl_vlm.runs.memory import memory_needs
from rl_vlm.runs.ray_run import RayRun
from rl_vlm.types import RLVLMError, UserInputError

if TYPE_CHECKING:
    from rl_vlm.algorithms.base import RunAlgorithm


logger = logging.getLogger(__name__)

_MS_PER_FRAME = 50  # of a GIF

# RL-VLM-F's columns of `train.csv` and `eval.csv`; `step` is the environment step, success is 0 or 1 in train.csv and
# percent in eval.csv. RL-VLM-F writes success under two names.
TRAIN_COLUMNS = (
    "episode", "step", "episode_reward", "true_episode_reward", "true_episode_success", "duration", "total_feedback",
    "labeled_feedback", "reward_learning_acc", "vlm_acc", "batch_reward", "critic_loss", "actor_loss", "actor_entropy",
    "actor_target_entropy", "alpha_loss", "alpha_value", "episode_success",
)  # fmt: skip
EVAL_COLUMNS = (
    "episode", "step", "episode_reward", "true_episode_reward", "success_rate",
    "success_rate_low", "success_rate_high", "success_last", "episodes", "true_episode_reward_std",
)  # fmt: skip


def inspect_preference_run(config: PreferenceConfig) -> dict[str, Any]:
    """Step the control environment once, look at its picture, and find the labeller. Raises UserInputError."""
    from rl_vlm.labelling.building import prompts_of
    from rl_vlm.preference.feedback import check_cache

    settings = config.preference
    with closing(make_run_env(config)) as env:
        env.reset(seed=0)
        env.step(env.action_space.sample())
        summary: dict[str, Any] = {
            "env": config.env.id,
            "observation_size": env.observation_space.shape[0],
            "action_size": env.action_space.shape[0],
            "horizon": env.horizon,
            "reward": settings.reward,
        }
        if settings.draws_frames or settings.evaluation.film:
            summary["frame"] = "×".join(map(str, env.frame().shape))
    if settings.learns_reward:
        cache = label_cache(settings.labels.cache)
        if cache is not None:
            check_cache(cache, settings, (summary["observation_size"], summary["action_size"]))
        summary["labels"] = settings.labels.source
        if settings.total_steps <= first_session_step(settings):
            logger.warning("%s", _no_session(settings))
    if settings.labels.source in ("clip", "itm") or "matching" in settings.reward:
        summary["similarity"] = str(resolve_model(settings.labels.similarity_model))
    if settings.learns_reward and settings.labels.source in ("vlm", "endpoint", "generate", "clip", "itm"):
        summary["goal"] = prompts_of(settings.labels, config.env.id).goal
    if settings.asks_served_model:
        try:
            folder = resolve_model(config.model.path)
        except UserInputError as error:
            if label_cache(settings.labels.cache) is None:
                raise
            raise UserInputError(
                f"{error} It labels what the label cache does not: set preference.labels.source=cache to do without."
            ) from error
        summary |= {"model": str(folder)} | memory_needs(config, folder)
    return summary


def _no_session(settings: PreferenceSection) -> str:
    return (
        f"Nothing is labelled: the first session comes after preference.random_steps + exploration_steps "
        f"({first_session_step(settings)}), and preference.total_steps is {settings.total_steps}."
    )


class PreferenceRun(RayRun):
    """A preference run. `iteration` of the recorded files counts environment steps."""

    config: PreferenceConfig

    _unit, _length, _rows = "step", "preference.total_steps", PREFERENCE_ROWS
    _checkpoint_name = "step-{:08d}"
    _read_checkpoint = staticmethod(read_state)

    def __init__(self, config: PreferenceConfig, folder: Path, resume: bool) -> None:
        self.settings = config.preference
        root = os.environ.get("ARTIFACT_ROOT")
        self.artifacts = Path(root) / config.name if root else None  # all checkpoints and videos stay there
        if self.artifacts is not None:
            self._history = self.artifacts / "checkpoints"
            clean_leftovers(self._history)
        super().__init__(config, folder, resume, self.settings.total_steps)
        self.train_csv = StepCsv(folder / "train.csv", TRAIN_COLUMNS)
        self.eval_csv = StepCsv(folder / "eval.csv", EVAL_COLUMNS)
        for table in (self.train_csv, self.eval_csv):
            table.rewind(self.saved_at)
        self.session_metrics: dict[str, float] = {}
        self.episode_started = time.monotonic()

    @staticmethod
    def algorithm_class(config: PreferenceConfig) -> type[RunAlgorithm]:
        from rl_vlm.algorithms.preference_sac import PreferenceSAC

        return PreferenceSAC

    def _train(self) -> None:
        self.algorithm.on_episode, self.algorithm.on_session = self._log_episode, self._log_session
        try:
            with self._timed():
                self._iterate()
        except BaseException:
            # Save the experience and the labels, whose collection was expensive; the original error is raised.
            with suppress(RLVLMError):
                self.checkpoint()
            raise
        self.checkpoint()
        if self.settings.learns_reward and self.settings.total_steps <= first_session_step(self.settings):
            self.display.message(_no_session(self.settings))

    def _iterate(self) -> None:
        from rl_vlm.algorithms.learners import LearnerLostError  # imports Ray

        algorithm, settings = self.algorithm, self.settings
        every, evaluations = self.config.logging.checkpoint_every, settings.evaluation.every
        if self._evaluation_is_missing():
            self._evaluate()
        before = algorithm.env_steps  # of the last row
        while before < settings.total_steps and self.goes_on:
            try:
                algorithm.train()
            except LearnerLostError as error:
                self._recover(error)
                continue  # to the end of the row
            step = algorithm.env_steps
            if step == before:
                continue
            self.recorder.log_iteration(step, algorithm.last_metrics)
            self.recorder.log_spans(step, algorithm.last_spans)
            self.display.update(step, algorithm.last_metrics)
            self._notify_callbacks("on_iteration", step, algorithm.last_metrics)
            # `checkpoint_every` counts rows of metrics, as everywhere.
            if _crosses_multiple(before, step, every * settings.steps_per_iteration):
                self.checkpoint()
            if step >= settings.total_steps or (evaluations and _crosses_multiple(before, step, evaluations)):
                self._evaluate()
            before = step

    def _evaluation_is_missing(self) -> bool:
        """Whether the evaluation that was due last is not recorded: an attempt ended during it."""
        step, every = self.algorithm.env_steps, self.settings.evaluation.every
        if step == 0 or step >= self.settings.total_steps:
            return not self.recorder.has_evaluation(step)
        due = step // every * every if every else 0
        return due > 0 and not any(due <= entry["iteration"] <= step for entry in self.recorder.evaluations())

    def _evaluate(self) -> None:
        algorithm = self.algorithm
        started = time.monotonic()
        results: list[EpisodeResult] = algorithm.evaluate_policy()
        metrics = {**evaluation_metrics(results), "seconds": time.monotonic() - started}
        with self._writing("eval.csv"):
            self.eval_csv.add(evaluation_row(metrics, algorithm.env_steps, algorithm.tracker.finished))
        self.recorder.log_evaluation(algorithm.env_steps, metrics)
        self.display.evaluation(algorithm.env_steps, metrics)
        self._save_videos(results)
        self._notify_callbacks("on_evaluation", algorithm.env_steps, metrics)

    def _save_videos(self, results: list[EpisodeResult]) -> None:
        folder = (self.artifacts or self.folder) / "videos"
        for number, result in enumerate(results):
            if result.frames is None:
                continue
            name = f"step{self.algorithm.env_steps:07}_episode{number:02}_{round(result.true_return, 2)}.gif"
            first, *others = map(Image.fromarray, result.frames)
            content = io.BytesIO()
            first.save(content, "GIF", save_all=True, append_images=others, duration=_MS_PER_FRAME, loop=0)
            with self._writing("a video"):
                folder.mkdir(parents=True, exist_ok=True)
                write_atomic(folder / name, content.getvalue())

    def _log_session(self, metrics: dict[str, float]) -> None:
        self.session_metrics = metrics
        if "labels/asked" in metrics:
            accuracy = metrics.get("labels/accuracy")
            agree = f", {accuracy:.0%} of the decided agree with the true reward" if accuracy is not None else ""
            fitted = metrics.get("reward_model/accuracy")  # none without pairs, or of scores
            model = f"; reward model accuracy {fitted:.2f}" if fitted is not None else ""
            self.display.message(
                f"Step {self.algorithm.env_steps}: {metrics['labels/asked']:.0f} labels in "
                f"{metrics['labels/seconds']:.1f} s, {metrics['labels/usable']:.0f} usable{agree}{model}."
            )
            if (stats := getattr(self.algorithm.feedback.labeller, "stats", None)) is not None:
                self.display.message(f"Labels so far: {stats.summary()}.")

    def _log_episode(self, episode: Episode) -> None:
        algorithm, now = self.algorithm, time.monotonic()
        feedback, session, updates = algorithm.feedback, self.session_metrics, algorithm.update_statistics()
        row = {
            "episode": episode.number,
            "step": algorithm.env_steps,
            "episode_reward": episode.learned_return,
            "true_episode_reward": episode.true_return,
            "episode_success": episode.success,
            "true_episode_success": episode.success,
            "duration": now - self.episode_started,
            "total_feedback": feedback.asked if feedback is not None else 0,
            "labeled_feedback": feedback.usable if feedback is not None else 0,
            "reward_learning_acc": session.get("reward_model/accuracy", ""),
            "vlm_acc": session.get("labels/accuracy", ""),
            "actor_target_entropy": algorithm.target_entropy,
            **updates,
        }
        self.episode_started = now
        with self._writing("train.csv"):
            self.train_csv.add([row.get(name, "") for name in TRAIN_COLUMNS])

    def _outcome(self) -> dict[str, Any]:
        feedback = getattr(self.algorithm, "feedback", None)
        counts = ("asked", "usable", "sessions")
        return {
            "unit": "steps",
            **self._before_and_after("accuracy", "accuracy/success"),
            **self._before_and_after("evaluation_reward", "reward/success"),
            "labels": {name: getattr(feedback, name) for name in counts} if feedback is not None else {},
            "restarts": dict(getattr(self.algorithm, "restarts", {})),
        }


def evaluation_row(metrics: dict[str, float], step: int, episode: int) -> list[float]:
    success = [100 * metrics[name] for name in ("accuracy/success", "accuracy_low/success", "accuracy_high/success")]
    last, reward = 100 * metrics["evaluation/success_last"], metrics["reward/success"]
    return [episode, step, reward, reward, *success, last, metrics["items/success"], metrics["evaluation/reward_std"]]


def _crosses_multiple(before: int, now: int, every: int) -> bool:
    """Whether a multiple of `every` lies in (before, now]."""
    return now // every > before // every
