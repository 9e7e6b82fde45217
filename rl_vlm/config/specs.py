"""AlgorithmSpec: what a run of each algorithm is made of. No other code asks for an algorithm's name.

Parts above the configuration are named as "module:attribute" and imported when they are used.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rl_vlm.config.algorithm import WITHOUT_CRITIC, AlgorithmSection
from rl_vlm.config.applies import Reads
from rl_vlm.registry import Registry

if TYPE_CHECKING:
    from rl_vlm.config.run import RunConfig

_OF_SEVERAL = ("group", "rloo", "reinforce_pp_baseline", "gigpo")  # estimators that compare the members of a group
_BEYOND_THE_GROUP = ("gae", "gigpo", "reinforce_pp")  # estimators that compare with more than the rewards of the group


@dataclass(frozen=True, slots=True)
class Actors:
    """Actors of one kind that a run holds together, and the logical CPUs and GPUs of each."""

    kind: str
    count: int
    cpus: float
    gpus: float


@dataclass(frozen=True, slots=True)
class AlgorithmSpec:
    """One algorithm.

    config, run: the RLlib configuration's class and the run's class. preflight(run) -> figures for people, raises
    UserInputError. evaluate(run, adapter=, run_dir=, out=, options=) -> results. samplers(run): the actors beside replicas
    and learners. serves(run): whether it has replicas. check(run) raises ValueError where sections contradict each other.
    reads: the keys that it reads; others are refused where they are set. has_critic: whether learners hold a value function.
    publishes_adapters: whether learners train the served policy's adapter.
    """

    config: str
    run: str
    preflight: str
    evaluate: str
    samplers: Callable[[RunConfig], Actors]
    serves: Callable[[RunConfig], bool]
    check: Callable[[RunConfig], None]
    reads: Reads
    has_critic: bool = False
    publishes_adapters: bool = True

    def load(self, part: str) -> Any:
        """The object that `config`, `run`, `preflight` or `evaluate` names."""
        module, _, attribute = getattr(self, part).partition(":")
        return getattr(importlib.import_module(module), attribute)

    def actors(self, run: RunConfig) -> list[Actors]:
        """All actors of a run; a learner inside the driver counts where it needs a GPU."""
        serving, learner = run.serving, run.learner
        return [
            Actors(
                "replicas",
                serving.num_replicas if self.serves(run) else 0,
                serving.cpus_per_replica,
                serving.gpus_per_replica,
            ),
            self.samplers(run),
            Actors("learners", learner.num_learners, learner.cpus_per_learner, learner.gpus_per_learner),
            Actors("learner in the driver", int(learner.num_learners == 0), 0.0, learner.gpus_per_learner),
        ]


ALGORITHMS: Registry[AlgorithmSpec] = Registry("algorithm.name")


def _check_policy(run: RunConfig) -> None:
    if run.algorithm.minibatches > run.rollout.prompts_per_iteration:
        raise ValueError(
            f"algorithm.minibatches ({run.algorithm.minibatches}) exceeds rollout.prompts_per_iteration "
            f"({run.rollout.prompts_per_iteration}): a minibatch needs at least one group"
        )
    if run.algorithm.overlong_buffer:
        begins = run.rollout.max_new_tokens - run.algorithm.overlong_buffer
        longest = run.rollout.max_turns * run.rollout.max_new_tokens_per_turn
        if begins < 0:
            raise ValueError(
                f"algorithm.overlong_buffer ({run.algorithm.overlong_buffer}) exceeds rollout.max_new_tokens "
                f"({run.rollout.max_new_tokens}): it is the last part of that budget"
            )
        if begins >= longest:
            raise ValueError(
                f"algorithm.overlong_buffer has no effect: its penalty begins after {begins} tokens, and rollout.max_turns x "
                f"max_new_tokens_per_turn allows {longest}; lower rollout.max_new_tokens ({run.rollout.max_new_tokens})"
            )
    _check_strategy(run)
    settings = run.algorithm
    if run.rollout.group_size == 1 and settings.estimator in _OF_SEVERAL:
        raise ValueError(
            f"rollout.group_size 1 with algorithm.estimator {settings.estimator}: a group of one has nobody to be compared with, so "
            "nothing would be learned; use a larger group, algorithm.estimator=reinforce_pp, or algorithm.name=ppo"
        )
    if settings.max_refill and run.rollout.group_size == 1:
        raise ValueError(
            "algorithm.max_refill replaces groups whose rewards are all equal, and all groups of one are: set it to 0, or "
            "rollout.group_size to 2 or more"
        )
    if settings.max_refill and (own := _gradient_of_equal_rewards(settings)):
        raise ValueError(
            f"algorithm.max_refill replaces groups whose rewards are all equal, and with {own} these have a gradient: set it to 0"
        )
    if settings.kl_target and settings.kl_in != "reward":
        raise ValueError("algorithm.kl_target adapts a penalty in the reward: set algorithm.kl_in to reward")
    if run.spec.has_critic and run.critic.warmup_iterations >= settings.iterations:
        raise ValueError(
            f"critic.warmup_iterations ({run.critic.warmup_iterations}) leave none of algorithm.iterations ({settings.iterations}) "
            "to the policy: lower them"
        )
    if settings.kl_min > settings.kl_max:
        raise ValueError(f"algorithm.kl_min ({settings.kl_min}) exceeds algorithm.kl_max ({settings.kl_max})")
    if settings.estimator == "gae" and not run.spec.has_critic:
        raise ValueError("algorithm.estimator gae needs a critic: set algorithm.name to ppo")
    if settings.estimator in WITHOUT_CRITIC and run.spec.has_critic:
        raise ValueError(f"algorithm.estimator {settings.estimator} needs no critic: use gae, or algorithm.name grpo")
    needing_lag = (
        ("groups_per_runner", None),
        ("late_groups", "wait"),
        ("partial_tokens", None),
        ("in_flight_updates", None),
    )
    for key, default in needing_lag:
        if not run.rollout.max_policy_lag and getattr(run.rollout, key) != default:
            raise ValueError(f"rollout.{key} has no effect with rollout.max_policy_lag 0: remove it, or allow a lag")
    if run.rollout.partial_tokens and run.rollout.in_flight_updates:
        raise ValueError(
            "rollout.partial_tokens and rollout.in_flight_updates both let a turn go on with newer weights, at the end of a piece "
            "and between any two tokens: set one of them"
        )


def _gradient_of_equal_rewards(settings: AlgorithmSection) -> str | None:
    """What gives a group whose rewards are all equal an advantage that is not zero, if anything does."""
    if settings.kl_in_reward:
        return "algorithm.kl_in reward"
    return f"algorithm.estimator {settings.estimator}" if settings.estimator in _BEYOND_THE_GROUP else None


def _check_strategy(run: RunConfig) -> None:
    name = run.learner.strategy
    if run.learner.zero_stage and run.spec.has_critic:
        raise ValueError(
            f"learner.strategy {name} clips all gradients by one norm, and algorithm.name {run.algorithm.name} clips the critic's "
            "by their own: use fsdp2 or all_reduce"
        )
    if run.learner.zero_stage and run.model.train == "lora" and run.model.lora.target_modules == "vision":
        raise ValueError(
            f"learner.strategy {name} adds up gradients while a backward pass runs, and the vision tower has some only where there "
            "are images: use fsdp2 or all_reduce with model.lora.target_modules vision"
        )


def _check_preference(run: RunConfig) -> None:
    if run.learner.num_learners > 1:
        raise ValueError("learner.num_learners must be 0 or 1 for preference_sac: its networks are small")


def _rollout_actors(run: RunConfig) -> Actors:
    return Actors("env runners", run.rollout.num_env_runners, run.rollout.cpus_per_env_runner, 0.0)


def _collection_actors(run: RunConfig) -> Actors:
    collection = run.preference.collection
    return Actors("env runners", collection.num_env_runners, collection.cpus_per_env_runner, 0.0)


_POLICY_READS = Reads(
    ("model", "serving", "env", "curriculum", "rollout", "algorithm", "learner", "evaluation", "sight", "logging"),
    {
        "preference.total_steps": "algorithm.iterations",
        "preference.sac.lr": "learner.lr",
        "preference.collection.num_env_runners": "rollout.num_env_runners",
        "preference.evaluation.every": "evaluation.every",
    },
)
_PPO_READS = Reads((*_POLICY_READS.keys, "critic"), _POLICY_READS.instead)
_PREFERENCE_READS = Reads(
    (
        "preference",
        "serving",
        *(
            f"model.{key}"
            for key in ("path", "dtype", "head_dtype", "min_pixels", "max_pixels", "image_cache_mib", "gpu_memory_gib")
        ),
        *(f"env.{key}" for key in ("id", "kwargs")),
        "algorithm.name",
        *(
            f"learner.{key}"
            for key in (
                "num_learners",
                "cpus_per_learner",
                "gpus_per_learner",
                "num_threads",
                "max_restarts",
                "update_timeout_s",
            )
        ),
        "evaluation.timeout_s",
        *(
            f"logging.{key}"
            for key in (
                "checkpoint_every",
                "keep_checkpoints",
                "tensorboard",
                "wandb_project",
                "ray_metrics",
                "traces",
            )
        ),
    ),
    {
        "algorithm.iterations": "preference.total_steps",
        "learner.lr": "preference.sac.lr",
        "learner.betas": "preference.sac.betas",
        "env.data": "env.kwargs",
        "env.isolation": "preference.collection.num_env_runners",
        "rollout.num_env_runners": "preference.collection.num_env_runners",
        "rollout.cpus_per_env_runner": "preference.collection.cpus_per_env_runner",
        "rollout.timeout_s": "preference.collection.timeout_s",
        "evaluation.every": "preference.evaluation.every",
        "evaluation.num_items": "preference.evaluation.episodes",
    },
)

_GRPO = AlgorithmSpec(
    config="rl_vlm.algorithms.grpo:GRPOConfig",
    run="rl_vlm.runs.policy_run:PolicyRun",
    preflight="rl_vlm.runs.preflight:inspect_policy_run",
    evaluate="rl_vlm.runs.evaluate:evaluate_policy_run",
    samplers=_rollout_actors,
    serves=lambda run: True,
    check=_check_policy,
    reads=_POLICY_READS,
)
ALGORITHMS.register("grpo")(_GRPO)
ALGORITHMS.register("ppo")(replace(_GRPO, config="rl_vlm.algorithms.ppo:PPOConfig", reads=_PPO_READS, has_critic=True))
ALGORITHMS.register("preference_sac")(
    AlgorithmSpec(
        config="rl_vlm.algorithms.preference_sac:PreferenceSACConfig",
        run="rl_vlm.runs.preference_run:PreferenceRun",
        preflight="rl_vlm.runs.preflight:inspect_preference_run",
        evaluate="rl_vlm.runs.preference_evaluation:evaluate_preference_run",
        samplers=_collection_actors,
        serves=lambda run: run.preference.asks_served_model,
        check=_check_preference,
        reads=_PREFERENCE_READS,
        publishes_adapters=False,
    )
)
