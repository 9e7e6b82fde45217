"""A run that trains the served policy: its checks, iterations, evaluations, checkpoints, and the final adapter."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rl_vlm.config import PolicyConfig
from rl_vlm.config.learner import BUILTIN_LOSSES
from rl_vlm.config.serving import FLOAT16_UNTRAINABLE
from rl_vlm.engines.grammars import format_matcher
from rl_vlm.envs.base import VisionEnv
from rl_vlm.envs.errors import describe_error
from rl_vlm.envs.isolation import check_plain
from rl_vlm.envs.registry import make_part, portable_id, train_size
from rl_vlm.evaluation.sight_faults import Fault, SightError, raise_or_warn
from rl_vlm.learning.plan import ESTIMATORS
from rl_vlm.models.images import TextSide
from rl_vlm.models.loading import load_text_side, quiet_libraries, resolve_model
from rl_vlm.models.trained import check_initial_adapter
from rl_vlm.monitoring.display import episode_line
from rl_vlm.rollout.curriculum import Stages
from rl_vlm.rollout.scoring import try_functions, try_parts
from rl_vlm.runs.memory import memory_needs
from rl_vlm.runs.ray_run import RayRun
from rl_vlm.types import RLVLMError, Split, UserInputError

if TYPE_CHECKING:
    from rl_vlm.algorithms.base import RunAlgorithm


# Sentences about metrics that usually mean a mistake in the environment, the prompt or the reward.

_NEEDS_IMAGES = 0.1  # a smaller gain in accuracy over blank images gives a warning
_FIRST = 5  # iterations at the start
_SKIPPED = 10  # steps in a row that end a run
_NOT_FINITE = "because their gradients were not finite"


def blind(results: Mapping[str, float]) -> str:
    """A warning if answers are as good with blank images."""
    if results.get("sight/accuracy_gap_high", 1.0) >= _NEEDS_IMAGES:
        return ""
    unseen, gap = results["sight/accuracy_blank"], results["sight/accuracy_gap"]
    if unseen == 0 and gap == 0:  # nothing is known of images by answers that are all wrong
        return ""
    return (
        f"Answers do not need the images: {unseen:.2f} are right with blank ones, {gap:+.2f} with the true ones "
        "[sight/accuracy_gap]. Either the questions need none, or the policy has collapsed to one answer (see "
        "policy/entropy; a smaller learner.lr helps)."
    )


def equal_rewards(without_advantage: Sequence[float], reward: float) -> str:
    """A warning after the first iterations if in no group of them the rewards differ. `without_advantage`: the share of
    such groups in each iteration so far; `reward`: the mean of the last one."""
    if len(without_advantage) != _FIRST or min(without_advantage) < 1.0:
        return ""
    return (
        f"Nothing was learned: in each group of the first {_FIRST} iterations all answers had the same reward "
        f"(mean reward {reward:.3f}) [reward/zero_advantage_groups]. `rl-vlm rollout` shows answers and their rewards."
    )


class NotFiniteError(RLVLMError):
    """Optimiser steps were skipped, one after the other, because their gradients were not finite.

    Do: lower `learner.lr`, or mend your loss.
    """


class SkippedSteps:
    """Counts optimiser steps that were skipped because their gradient was not finite, in this process."""

    skipped = taken = in_a_row = 0

    def look(self, iteration: int, metrics: Mapping[str, float]) -> str:
        """A sentence when the first one was skipped, otherwise an empty one. Raises NotFiniteError for ten in a row."""
        skipped, taken = (int(metrics.get(f"policy/{name}_steps", 0)) for name in ("skipped", "optimizer"))
        is_first = skipped > 0 and not self.skipped
        self.skipped, self.taken = self.skipped + skipped, self.taken + taken
        self.in_a_row = skipped + (0 if taken else self.in_a_row)
        if self.in_a_row >= _SKIPPED:
            self.fail()
        return f"Iteration {iteration}: {skipped} optimiser steps were skipped, {_NOT_FINITE}." if is_first else ""

    def check(self) -> None:
        """Raise NotFiniteError where steps were skipped and none was taken."""
        if self.skipped and not self.taken:
            self.fail()

    def fail(self) -> NoReturn:
        raise NotFiniteError(
            f"The last {self.in_a_row} optimiser steps were skipped, {_NOT_FINITE}, so nothing is learned: look at "
            "policy/loss, policy/kl and mismatch/kl, and lower learner.lr (or mend the loss)."
        )


def inspect_policy_run(config: PolicyConfig) -> dict[str, Any]:
    """Open one item of each split and encode it, and look up what learns from it."""
    if config.model.train == "lora" and config.model.lora.target_modules == "none":
        raise UserInputError(
            "model.lora.target_modules none leaves nothing to train: choose attn, mlp, all or vision; `rl-vlm eval` "
            "and `rl-vlm serve` take it."
        )
    if config.model.dtype == "float16":
        raise UserInputError(f"{FLOAT16_UNTRAINABLE}.")
    if config.learner.zero_stage and importlib.util.find_spec("deepspeed") is None:
        raise UserInputError(
            f"learner.strategy {config.learner.strategy} needs the package deepspeed: pip install 'rl-vlm[deepspeed]'."
        )
    _ = ESTIMATORS[config.algorithm.estimator]  # raises for an unknown one
    if config.algorithm.loss not in BUILTIN_LOSSES:
        from rl_vlm.learning.losses import LOSSES  # imports torch

        _ = LOSSES[config.algorithm.loss]
    quiet_libraries()
    folder = resolve_model(config.model.path)
    text = load_text_side(folder, config.model.pixels)
    try_parts(config.env.reward, text)
    format_matcher(text, config.rollout.grammar)
    summary: dict[str, Any] = {"model": str(folder), "env": config.env.title} | check_initial_adapter(config.model)
    sizes: dict[str, int | None] = {}
    for name, part in config.env.parts.items():
        inspected = _inspect_part(config, name, text)
        sizes[name] = train_size(part, inspected["train_items"])
        summary |= {f"{name}_{key}" if name else key: value for key, value in inspected.items()}
        for variant in config.evaluation.variants:
            changes = config.variant_arguments(variant, name)
            _open_changed(config, name, f"evaluation.variants.{variant}", config.evaluation.split, changes)
    if config.curriculum.stages:
        for where, name, arguments in Stages(config.curriculum, config.env).all_arguments():
            _open_changed(config, name, where, "train", arguments, sizes[name])
        summary["stages"] = ", ".join(config.curriculum.names)
    return summary | memory_needs(config, folder)


@contextmanager
def _opened(
    config: PolicyConfig, name: str, changes: Mapping[str, Any] | None = None, where: str = ""
) -> Iterator[VisionEnv]:
    """An environment, closed at the end; what its code raises inside is a UserInputError that begins with `where`."""
    part = config.env.parts[name]
    try:
        if config.env.isolation == "process":
            portable_id(part.id)
            check_plain(part.id, part.make_kwargs(changes))
        env = make_part(config.env, name, changes)
        try:
            yield env
        finally:
            with suppress(Exception, SystemExit):  # a run does not mind how it closes
                env.close()
    except UserInputError as error:
        raise UserInputError(f"{where}: {error}" if where else str(error)) from error
    except (Exception, SystemExit) as error:  # it is a user's code, which may raise anything
        raise UserInputError(
            f"{where or f'The environment {part.id} does not open'}: {describe_error(error)}"
        ) from error


def _inspect_part(config: PolicyConfig, name: str, text: TextSide) -> dict[str, Any]:
    env_id, summary = config.env.parts[name].id, dict[str, Any]()
    with _opened(config, name) as env:
        for split in ("train", config.evaluation.split):
            validate = getattr(env, "validate", None)
            if callable(validate):
                validate(split)
            size = env.num_items(split)  # type: ignore[arg-type]
            if size == 0:
                raise UserInputError(f"The {split} split of {env_id} is empty: check env.data.")
            observation, info = env.reset(seed=0, options={"index": 0, "split": split})
            try_functions(config.env.parts[name].reward, info)
            span = text.codec.encode_prompt(observation.messages)
            length = len(text.expand(span.token_ids, span.images))
            if length >= config.serving.max_context:
                raise UserInputError(
                    f"The first {split} prompt has {length} tokens and serving.max_context is "
                    f"{config.serving.max_context}: raise it, or shrink the images."
                )
            summary |= {
                f"{split}_items": size,
                f"{split}_prompt_tokens": length,
                f"{split}_image_tokens": length - len(span.token_ids) + len(span.images),
            }
    return summary


def _open_changed(
    config: PolicyConfig, name: str, where: str, split: Split, changes: Mapping[str, Any], items: int | None = None
) -> None:
    """Open an environment with the arguments that the key `where` changes; a run draws from `items` of it."""
    with _opened(config, name, changes, where) as env:
        size = env.num_items(split)
        if items is not None and size is not None and size < items:
            raise UserInputError(
                f"the {split} split has {size} items and the run draws from {items}: set env.num_items."
            )
        env.reset(seed=0, options={"index": 0, "split": split})


class PolicyRun(RayRun):
    config: PolicyConfig

    def __init__(self, config: PolicyConfig, folder: Path, resume: bool) -> None:
        super().__init__(config, folder, resume, config.algorithm.iterations)
        self.last_iteration = self.start
        self._skipped_steps = SkippedSteps()

    @staticmethod
    def algorithm_class(config: PolicyConfig) -> type[RunAlgorithm]:
        from rl_vlm.algorithms.grpo import GRPO
        from rl_vlm.algorithms.ppo import PPO

        return PPO if config.algorithm.name == "ppo" else GRPO

    def _train(self) -> None:
        for _ in self.iterations():
            pass
        self.finish()

    def iterations(self) -> Iterator[int]:
        """Train to the end, a number per iteration that was learned from. Whatever loses a learner, the way back is
        here."""
        from rl_vlm.algorithms.learners import LearnerLostError

        while True:
            try:
                return (yield from self._to_the_end())
            except LearnerLostError as error:
                self._recover(error)

    def _recover(self, error: Exception) -> None:
        super()._recover(error)
        if self.algorithm.updates < self.last_iteration:
            self._forget_after(self.algorithm.updates)

    def _to_the_end(self) -> Iterator[int]:
        from rl_vlm.rollout.rollouts import TooManyFailuresError
        from rl_vlm.rollout.sampler import RoundAbandonedError, SamplingError

        algorithm = self.algorithm
        try:
            # A signal during sampling ends the round, of which nothing has been learned yet.
            with suppress(RoundAbandonedError):
                self._check_sight()
                if not self.recorder.has_evaluation(algorithm.updates):
                    self.evaluate()
                with self._timed():
                    while algorithm.updates < self.config.algorithm.iterations and self.goes_on:
                        self._iterate()
                        yield self.last_iteration
        except (SamplingError, TooManyFailuresError, SightError):
            self._report_failures()
            # The learners are there: a resume, with `sight.gate: warn` perhaps, need not repeat what these have
            # learned.
            if algorithm.updates > max(self.saved_at, 0):
                with suppress(RLVLMError):
                    self.checkpoint()
            raise

    def finish(self) -> None:
        """Save what was trained, also if a learner dies meanwhile."""
        from rl_vlm.algorithms.learners import LearnerLostError

        self._skipped_steps.check()
        reached = self.algorithm.updates
        while True:
            try:
                while self.algorithm.updates < reached:  # what new learners have lost
                    self._iterate()
                return self._save_all()
            except LearnerLostError as error:
                self._recover(error)

    def _save_all(self) -> None:
        self.checkpoint()
        self._save_trained(self.algorithm.checkpoint().adapter)
        if self.config.learner.ema_decay is not None:
            self._save_trained(self.algorithm.averaged_adapter(), "-ema")

    def _check_sight(self) -> None:
        if self.config.sight.gate == "off":
            return
        sight = self.algorithm.sight
        self._report_faults(sight.gate())
        if sight.needed:
            self.display.message(
                f"Sight: engine and learner agree within {sight.agreement:.1e} nats per token; a blank image changes "
                f"answers by {sight.effect:.2g}."
            )

    def _report_faults(self, faults: Sequence[Fault]) -> None:
        for sentence in raise_or_warn(faults, self.config.sight.gate):
            self.display.message(sentence)

    def _iterate(self) -> None:
        algorithm, config = self.algorithm, self.config
        algorithm.train()
        iteration, metrics = algorithm.updates, algorithm.last_metrics
        self.last_iteration = iteration
        self.recorder.log_iteration(iteration, metrics)
        self.recorder.log_spans(iteration, algorithm.last_spans)
        self._report_failures()
        self.display.update(iteration, metrics)
        if algorithm.sight_faults and config.sight.gate != "off":
            self._report_faults(algorithm.sight_faults)
        hints = [self._skipped_steps.look(iteration, metrics)]
        if iteration == _FIRST and "reward/mean" in metrics:
            hints.append(equal_rewards(self.recorder.column("reward/zero_advantage_groups"), metrics["reward/mean"]))
        for hint in filter(None, hints):
            self.display.message(hint)
        # Groups of a round that is recorded carry their conversations; with lag, rounds and iterations differ.
        recorded = [group for group in algorithm.last_groups if group.recorded]
        if recorded:
            self.recorder.dump_trajectories(iteration, recorded, algorithm.last_tokens, algorithm.text)
            if config.logging.show_episodes:
                shown = recorded[iteration % len(recorded)].trajectories
                self.display.line(episode_line(shown[iteration % len(shown)]))
        if iteration % config.logging.checkpoint_every == 0:
            self.checkpoint()
        self._notify_callbacks("on_iteration", iteration, metrics)
        last = iteration >= config.algorithm.iterations or self.stopped_by
        if last or (config.evaluation.every and iteration % config.evaluation.every == 0):
            self.evaluate()

    def _report_failures(self) -> None:
        for reason in self.recorder.log_failures(self.algorithm.updates, self.algorithm.rollouts.take_failures()):
            self.display.message(f"A group was lost: {reason} (failures.jsonl keeps all reasons)")

    def _forget_after(self, iteration: int) -> None:
        metrics = self.recorder.ray
        self.recorder.close()
        self.recorder = self._new_recorder(iteration)
        self.recorder.ray, self.last_iteration = metrics, iteration
        self.saved_at = min(self.saved_at, iteration)

    def evaluate(self) -> dict[str, Any]:
        results, kept = self.algorithm.evaluate_policy(self.config.logging.kept_items)
        self.recorder.log_evaluation(self.algorithm.updates, results)
        if kept:
            self.recorder.dump_evaluation(self.algorithm.updates, kept, self.algorithm.text)
        self.display.evaluation(self.algorithm.updates, results)
        if self.algorithm.updates > self.start and (hint := blind(results)):
            self.display.message(hint)
        self._notify_callbacks("on_evaluation", self.algorithm.updates, results)
        return results

    def _save(self, position: int) -> Path:
        self.algorithm.last_checkpoint = saved = super()._save(position)
        return saved

    def _outcome(self) -> dict[str, Any]:
        variant, algorithm = next(iter(self.config.evaluation.variants)), self.algorithm
        rollouts = getattr(algorithm, "rollouts", None)
        return {
            **self._before_and_after("accuracy", f"accuracy/{variant}"),
            "policy_version": getattr(algorithm, "version", 0),
            "dropped": dict(getattr(rollouts, "dropped", {})),
            "restarts": dict(getattr(algorithm, "restarts", {})),
            "requests_by_replica": dict(getattr(rollouts, "requests_by_replica", {})),
            "trajectories": getattr(rollouts, "trajectories", 0),
            "skipped_steps": int(sum(self.recorder.column("policy/skipped_steps"))),
        }
