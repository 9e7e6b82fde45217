"""The configuration of a run that trains the served policy, with GRPO or PPO."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field, ValidationInfo, field_validator

from rl_vlm.config.common import Actors, CommonConfig
from rl_vlm.config.learner import AlgorithmSection, CriticSection, LearnerSection
from rl_vlm.config.rollout import (
    CurriculumSection,
    EnvSection,
    EvaluationSection,
    RolloutSection,
    SightSection,
    StageSection,
)
from rl_vlm.config.section import LoggingSection
from rl_vlm.config.serving import VLLM_TEMPERATURES, ModelSection

_COMPARE_IN_GROUP = ("group", "rloo", "reinforce_pp_baseline", "gigpo")
_COMPARE_BEYOND_GROUP = ("gae", "gigpo", "reinforce_pp")  # with more than the rewards of the group
# `reward/<name>` and `accuracy/<name>` have other meanings for these.
_TAKEN_NAMES = ("mean", "std", "part", "zero_advantage_groups")


class PolicyConfig(CommonConfig):
    """The configuration of a run that trains the served policy."""

    model: ModelSection = ModelSection()
    env: EnvSection = EnvSection()
    curriculum: CurriculumSection = CurriculumSection()
    rollout: RolloutSection = RolloutSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    learner: LearnerSection = LearnerSection()
    critic: CriticSection | None = Field(None, validate_default=True, description="Of PPO alone; GRPO has none.")
    evaluation: EvaluationSection = EvaluationSection()
    sight: SightSection = SightSection()
    logging: LoggingSection = LoggingSection()

    @field_validator("critic")
    @classmethod
    def _belongs_to_ppo(cls, critic: CriticSection | None, info: ValidationInfo) -> CriticSection | None:
        algorithm = info.data.get("algorithm")  # absent if it is invalid itself
        if algorithm is not None and algorithm.name == "ppo":
            return critic or CriticSection()
        if algorithm is not None and critic is not None:
            raise ValueError("grpo has no critic: remove it, or set algorithm.name to ppo")
        return critic

    def problems(self) -> Iterator[str]:
        """Settings of different sections that contradict each other."""
        yield from super().problems()
        yield from self._serving_problems()
        yield from self._sampling_problems()
        yield from self._learning_problems()
        if self.model.train == "full":
            yield from self._full_problems()
        if self.serving.vllm.rest_while_learning:
            yield from self._rest_problems()
        yield from self._task_problems()

    def _serving_problems(self) -> Iterator[str]:
        uses_vllm = self.serving.expected_engine == "vllm"
        if self.deterministic and self.rollout.max_policy_lag:
            yield "deterministic: true needs rollout.max_policy_lag 0"
        if self.serving.shared and self.rollout.in_flight_updates:
            yield "serving.shared and rollout.in_flight_updates exclude each other: leave out one of the two"
        judged = [part.reward for part in self.env.parts.values() if "judge" in part.reward.weights]
        if self.deterministic and any(reward.judge.probabilities for reward in judged):
            # Which questions share a batch depends on time, and their last bits on the batch.
            yield "deterministic: true with a judge needs env.reward.judge.probabilities: false"
        coldest, hottest = VLLM_TEMPERATURES
        if uses_vllm and not coldest <= self.rollout.temperature <= hottest:
            yield (
                f"rollout.temperature {self.rollout.temperature:g}: vLLM samples at {coldest:g} to {hottest:g}; change "
                "it, or set serving.engine to transformers"
            )
        if uses_vllm and self.model.train != "full" and self.model.lora.target_modules == "vision":
            yield (
                "model.lora.target_modules vision needs serving.engine transformers, because vLLM would ignore the "
                "adapted vision tower: change the engine, or set target_modules to all"
            )

    def _sampling_problems(self) -> Iterator[str]:
        rollout, settings = self.rollout, self.algorithm
        if settings.minibatches > rollout.prompts_per_iteration:
            yield (
                f"algorithm.minibatches ({settings.minibatches}) exceeds rollout.prompts_per_iteration "
                f"({rollout.prompts_per_iteration}): a minibatch needs at least one group"
            )
        if rollout.group_size == 1 and settings.estimator in _COMPARE_IN_GROUP:
            yield (
                f"rollout.group_size 1 with algorithm.estimator {settings.estimator}: a group of one has nobody to be "
                "compared with, so nothing would be learned; use a larger group, algorithm.estimator=reinforce_pp, or "
                "algorithm.name=ppo"
            )
        if settings.max_refill and rollout.group_size == 1:
            yield (
                "algorithm.max_refill replaces groups whose rewards are all equal, and all groups of one are: set it "
                "to 0, or rollout.group_size to 2 or more"
            )
        elif settings.max_refill and (own := self._gradient_of_equal_rewards()):
            yield (
                f"algorithm.max_refill replaces groups whose rewards are all equal, and with {own} these have a "
                "gradient: set it to 0"
            )
        if not rollout.max_policy_lag:
            for key in rollout.changed("groups_per_runner", "late_groups", "partial_tokens", "in_flight_updates"):
                yield f"rollout.{key} has no effect with rollout.max_policy_lag 0: remove it, or allow a lag"
        if rollout.partial_tokens and rollout.in_flight_updates:
            yield (
                "rollout.partial_tokens and rollout.in_flight_updates both let a turn go on with newer weights, at the "
                "end of a piece and between any two tokens: set one of them"
            )
        if settings.overlong_buffer:
            yield from self._overlong_problems()

    def _gradient_of_equal_rewards(self) -> str | None:
        """What gives a group whose rewards are all equal an advantage that is not zero, if anything does."""
        if self.algorithm.kl_in_reward:
            return "algorithm.kl_in reward"
        estimator = self.algorithm.estimator
        return f"algorithm.estimator {estimator}" if estimator in _COMPARE_BEYOND_GROUP else None

    def _overlong_problems(self) -> Iterator[str]:
        rollout, buffer = self.rollout, self.algorithm.overlong_buffer
        begins, longest = rollout.max_new_tokens - buffer, rollout.max_turns * rollout.max_new_tokens_per_turn
        if begins < 0:
            yield (
                f"algorithm.overlong_buffer ({buffer}) exceeds rollout.max_new_tokens ({rollout.max_new_tokens}): it "
                "is the last part of that budget"
            )
        if begins >= longest:
            yield (
                f"algorithm.overlong_buffer has no effect: its penalty begins after {begins} tokens, and "
                f"rollout.max_turns x max_new_tokens_per_turn allows {longest}; lower rollout.max_new_tokens "
                f"({rollout.max_new_tokens})"
            )

    def _learning_problems(self) -> Iterator[str]:
        learner, critic = self.learner, self.critic
        if learner.zero_stage and critic is not None:
            yield (
                f"learner.strategy {learner.strategy} clips all gradients by one norm, and algorithm.name "
                f"{self.algorithm.name} clips the critic's by their own: use fsdp2 or all_reduce"
            )
        if learner.zero_stage and self.model.train != "full" and self.model.lora.target_modules == "vision":
            yield (
                f"learner.strategy {learner.strategy} adds up gradients while a backward pass runs, and the vision "
                "tower has some only where there are images: use fsdp2 or all_reduce with model.lora.target_modules "
                "vision"
            )
        if critic is not None and critic.warmup_iterations >= self.algorithm.iterations:
            yield (
                f"critic.warmup_iterations ({critic.warmup_iterations}) leave none of algorithm.iterations "
                f"({self.algorithm.iterations}) to the policy: lower them"
            )
        if self.evaluation.weights == "ema" and (learner.ema_decay is None or self.rollout.max_policy_lag):
            yield "evaluation.weights: ema needs learner.ema_decay (0.99, say) and rollout.max_policy_lag 0"

    def _full_problems(self) -> Iterator[str]:
        """What `model.train: full` cannot be combined with."""
        if self.model.adapter is not None:
            yield (
                "model.adapter belongs to model.train: lora: export it into its model with `rl-vlm export`, and give "
                "that folder as model.path"
            )
        if self.model.dtype == "float16":
            yield (
                "model.train: full computes gradients in the model's precision, and those of float16 underflow: set "
                "model.dtype to bfloat16 or float32"
            )
        if self.serving.shared:
            yield (
                "serving.shared serves several policies on one set of weights, which model.train: full changes: leave "
                "it out, or set model.train to lora"
            )
        if self.serving.quantization != "none":
            yield (
                f"serving.quantization {self.serving.quantization} is computed when a model is loaded, and "
                "model.train: full sends new weights after every update: set it to none, or model.train to lora"
            )
        if self.learner.in_step:
            yield (
                f"learner.strategy {self.learner.strategy} shards frozen weights, of which model.train: full has none: "
                "use all_reduce (every learner holds the whole model), or set model.train to lora"
            )
        if self.critic is not None and self.critic.kind == "adapter":
            yield "critic.kind adapter needs frozen weights, of which model.train: full has none: use critic.kind head"
        if self.serving.expected_engine == "vllm":
            yield from self._full_vllm_problems()

    def _full_vllm_problems(self) -> Iterator[str]:
        if self.rollout.in_flight_updates == "keep":
            yield (
                "rollout.in_flight_updates keep would mix image features and cached prompts of several versions with "
                "model.train: full and vLLM: set it to recompute"
            )
        if any(
            "judge" in part.reward.weights
            and (part.reward.judge.endpoint is None or part.reward.judge.against == "start")
            for part in self.env.parts.values()
        ):
            yield (
                "env.reward.judge asks the base model, which replicas of vLLM no longer hold with model.train: full: "
                "give it an endpoint and against: reference, or set serving.engine to transformers"
            )

    def _rest_problems(self) -> Iterator[str]:
        """What `serving.vllm.rest_while_learning`, where sampling and learning take turns on one GPU, cannot be
        combined with."""
        key, serving, learner = "serving.vllm.rest_while_learning", self.serving, self.learner
        if self.rollout.max_policy_lag:
            yield (
                f"{key} stops sampling while the learner works, and rollout.max_policy_lag "
                f"{self.rollout.max_policy_lag} samples then: remove one of them"
            )
        if serving.shared:
            yield f"{key} would stop the other runs of serving.shared: remove it, or give the run its own replicas"
        shares = (serving.gpus_per_replica, learner.gpus_per_learner)
        one_pair = serving.num_replicas == 1 and serving.autoscaling is None and learner.num_learners <= 1
        # Without a GPU they take the same turns, to try them out; a CPU's memory stays where it is.
        if shares[0] and not (one_pair and all(0 < share < 1 for share in shares) and sum(shares) <= 1):
            yield (
                f"{key} is for one replica and one learner on one GPU: set serving.gpus_per_replica and "
                "learner.gpus_per_learner to 0.5 and serving.num_replicas to 1, or remove it"
            )

    def _task_problems(self) -> Iterator[str]:
        """Mixture, curriculum and variants that do not fit together."""
        weights = {part.name: part.weight for part in self.env.mixture}
        for name in weights:
            if name in _TAKEN_NAMES or name in self.evaluation.variants:
                yield f"env.mixture: the name {name} belongs to another metric: choose another one"
        changes = {f"evaluation.variants.{name}": value for name, value in self.evaluation.variants.items()}
        changes |= {f"curriculum.stages.{number}.env": stage.env for number, stage in enumerate(self.curriculum.stages)}
        for key, arguments in changes.items() if weights else ():
            yield from _argument_problems(key, arguments, list(weights))
        for number, stage in enumerate(self.curriculum.stages):
            yield from _weight_problems(f"curriculum.stages.{number}.mixture", stage, weights)

    def variant_arguments(self, variant: str, env: str) -> dict[str, Any]:
        """What an evaluation variant changes in the arguments of an environment, which `env.parts` names."""
        arguments = self.evaluation.variants.get(variant, {})
        return dict(arguments.get(env, {})) if self.env.mixture else arguments

    @property
    def serves(self) -> bool:
        """The policy is always served."""
        return True

    @property
    def samplers(self) -> Actors:
        """The env runners."""
        return Actors("env runners", self.rollout.num_env_runners, self.rollout.cpus_per_env_runner, 0.0)

    @property
    def trains_full(self) -> bool:
        """`model.train: full`."""
        return self.model.train == "full"

    @property
    def lora_slots(self) -> int:
        """Adapter versions that a replica may sample with at the same time (engine vllm)."""
        if self.serving.shared:
            return super().lora_slots
        # Samples of older versions may still run when a new one comes, unless they take it.
        return 1 if self.rollout.in_flight_updates else self.rollout.max_policy_lag + 2

    @property
    def lora_rank(self) -> int:
        """`model.lora.rank`."""
        return self.model.lora.rank

    @property
    def samples_per_round(self) -> int:
        """Samples of a round, of all replicas: what they can be asked for at once."""
        return self.rollout.prompts_per_iteration * self.rollout.group_size * max(self.rollout.max_policy_lag, 1)

    @property
    def held_out_at_once(self) -> int | None:
        """Held-out items that an evaluation in training plays at a time; None: all, where no environment is a process
        of its own."""
        return self.evaluation.at_once if self.env.isolation == "process" else None

    @property
    def published_dtype(self) -> str:
        """The precision of what is published: vLLM rounds adapters to that of the model, and the learner itself
        computes with full weights in it; checkpoints keep float32."""
        return self.model.dtype if self.serving.expected_engine == "vllm" or self.model.train == "full" else "float32"


def _argument_problems(key: str, arguments: dict[str, Any], names: list[str]) -> Iterator[str]:
    for name, inner in arguments.items():
        if name not in names:
            yield (
                f"{key}: with env.mixture it maps names ({', '.join(names)}) to arguments, such as {names[0]}: {{seed: "
                f"1}}; {name} is not one of them"
            )
        elif not isinstance(inner, dict):
            yield f"{key}.{name}: arguments are a mapping, such as {{seed: 1}}, not {inner!r}"


def _weight_problems(key: str, stage: StageSection, weights: dict[str, float]) -> Iterator[str]:
    for name, weight in stage.mixture.items():
        if name not in weights:
            known = f"env.mixture has {', '.join(weights)}" if weights else "env.mixture is empty"
            yield f"{key} names {name}, and {known}"
        if weight < 0:
            yield f"{key}.{name}: a weight is at least 0, not {weight}"
    if weights and not any((weights | stage.mixture).values()):
        yield f"{key}: all weights are 0, so that no environment would ever be chosen"
