"""The configuration of a run that trains the served policy: with GRPO, PPO or distillation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field, ValidationInfo, field_validator

from rl_vlm.config.common import ActorGroup, CommonConfig
from rl_vlm.config.env import CurriculumSection, EnvSection
from rl_vlm.config.judges import JudgeSection
from rl_vlm.config.learner import AlgorithmSection, CriticSection, LearnerSection
from rl_vlm.config.logging import LoggingSection
from rl_vlm.config.rollout import EvaluationSection, RolloutSection, SightSection
from rl_vlm.config.serving import VLLM_TEMPERATURES, ModelSection
from rl_vlm.config.teacher import TeacherModelSection

_COMPARE_IN_GROUP = ("group", "rloo", "reinforce_pp_baseline", "gigpo")
_JUDGED = {"judge", "rubric", "group_judge", "progress"}  # parts of a reward that ask a model
_HINT_TOKENS = 256  # that a teacher has room for beside serving.max_context
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
    critic: CriticSection | None = Field(None, validate_default=True)  # Of PPO alone; GRPO has none.
    teacher: TeacherModelSection | None = None  # Of distill alone.
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
            raise ValueError(f"{algorithm.name} has no critic: remove it, or set algorithm.name to ppo")
        return critic

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from self._sampling_problems()
        yield from self._teacher_problems()
        if self.trains_full:
            yield from self._full_problems()
        yield from self._task_problems()

    def _sampling_problems(self) -> Iterator[str]:
        serving, rollout, settings, learner = self.serving, self.rollout, self.algorithm, self.learner
        uses_vllm, (coldest, hottest) = serving.expected_engine == "vllm", VLLM_TEMPERATURES
        if self.deterministic and rollout.max_policy_lag:
            yield "deterministic: true needs rollout.max_policy_lag 0"
        if self.deterministic and any(judge.probabilities for judge in self._judges):
            # Which questions share a batch depends on time, and their last bits on the batch.
            yield "deterministic: true with a judge needs env.reward.judge.probabilities: false"
        if serving.shared and rollout.in_flight_updates:
            yield "serving.shared and rollout.in_flight_updates exclude each other: leave out one of the two"
        if rollout.partial_tokens and rollout.in_flight_updates:
            yield "rollout.partial_tokens and rollout.in_flight_updates exclude each other: set one of them"
        if rollout.partial_tokens and rollout.format:
            yield "rollout.partial_tokens would begin rollout.format anew with each piece: leave out one of the two"
        if uses_vllm and not coldest <= rollout.temperature <= hottest:
            yield f"rollout.temperature {rollout.temperature:g}: vLLM samples at {coldest:g} to {hottest:g}"
        if uses_vllm and self._adapts_vision:
            yield "model.lora.target_modules vision needs serving.engine transformers: vLLM ignores an adapted tower"
        if settings.minibatches > rollout.prompts_per_iteration:
            yield (
                f"algorithm.minibatches ({settings.minibatches}) exceeds rollout.prompts_per_iteration "
                f"({rollout.prompts_per_iteration}): a minibatch needs at least one group"
            )
        if rollout.group_size == 1 and settings.estimator in _COMPARE_IN_GROUP and self.learns_from_rewards:
            yield (
                f"rollout.group_size 1 with algorithm.estimator {settings.estimator}: a group of one has no other to "
                "be compared with; use a larger group, algorithm.estimator=reinforce_pp, or algorithm.name=ppo"
            )
        if settings.max_refill and (
            rollout.group_size == 1 or settings.kl_in_reward or settings.estimator in _COMPARE_BEYOND_GROUP
        ):
            yield (
                "algorithm.max_refill replaces groups whose rewards are all equal: it needs groups of 2 or more, an "
                "estimator that compares these rewards alone, and no algorithm.kl_in reward; set it to 0"
            )
        begins = rollout.max_new_tokens - settings.overlong_buffer
        if settings.overlong_buffer and not 0 <= begins < rollout.max_turns * rollout.max_new_tokens_per_turn:
            yield (
                f"algorithm.overlong_buffer ({settings.overlong_buffer}) is the last part of rollout.max_new_tokens "
                f"({rollout.max_new_tokens}), and answers end before it at max_turns x max_new_tokens_per_turn"
            )
        if self.in_pairs and not self.takes_turns:
            yield (
                "resources.placement pairs needs as many learners as replicas: set serving.num_replicas and "
                "learner.num_learners to the number of GPUs, serving.gpus_per_replica and learner.gpus_per_learner to "
                "0.5 (0 without GPUs) and rollout.max_policy_lag to 0, and leave out serving.shared and "
                "serving.vllm.rest_while_learning"
            )
        elif serving.vllm.rest_while_learning and not self._may_take_turns:
            yield (
                "serving.vllm.rest_while_learning is for one replica and one learner on one GPU: set num_replicas to "
                "1, serving.gpus_per_replica and learner.gpus_per_learner to 0.5, rollout.max_policy_lag to 0, and "
                "leave out serving.shared"
            )
        if learner.zero_stage and (self.critic is not None or self._adapts_vision):
            yield (
                f"learner.strategy {learner.strategy} trains neither a critic, whose gradients have their own norm, "
                "nor the vision tower, which has none without images: use fsdp2 or all_reduce"
            )
        if self.evaluation.weights == "ema" and (learner.ema_decay is None or rollout.max_policy_lag):
            yield "evaluation.weights: ema needs learner.ema_decay (0.99, say) and rollout.max_policy_lag 0"

    def _teacher_problems(self) -> Iterator[str]:
        distills, rollout = self.algorithm.name == "distill", self.rollout
        if distills != (self.teacher is not None):
            yield "teacher and algorithm.name distill belong together: set both, or leave out both"
        if distills and (rollout.temperature != 1 or rollout.format):
            yield (
                "algorithm.name distill compares the models' own distributions: set rollout.temperature to 1 and leave "
                "out rollout.format"
            )
        if distills and self.trains_full and self.teacher is not None and self.teacher.path is None:
            yield "teacher.path null would be a second copy of what model.train full changes: name the model"

    @property
    def learns_from_rewards(self) -> bool:
        """Whether rewards make advantages; a teacher may be all that a policy learns from."""
        return self.teacher is None or self.teacher.reward_weight > 0

    @property
    def learns_without_advantage(self) -> bool:
        """Whether a KL penalty, an entropy bonus or a teacher gives samples with zero advantage a gradient."""
        has_divergence = self.teacher is not None and self.teacher.divergence != "reverse"
        return has_divergence or bool(self.algorithm.kl_loss_coef or self.algorithm.entropy_coef)

    @property
    def served_teacher(self) -> PolicyConfig:
        """The configuration of the teacher's replicas."""
        teacher, serving = self.teacher, self.serving
        assert teacher is not None
        model: dict[str, Any] = {"path": teacher.path or self.model.path, "adapter": teacher.adapter, "train": "lora"}
        if teacher.max_pixels is not None:
            model["max_pixels"] = teacher.max_pixels
        own = {name: getattr(teacher, name) for name in ("num_replicas", "cpus_per_replica", "gpus_per_replica")}
        own["max_context"] = teacher.max_context or serving.max_context + _HINT_TOKENS
        own |= {"shared": None, "autoscaling": None}
        own["vllm"] = serving.vllm.model_copy(update={"rest_while_learning": False})
        changes = {
            "name": f"{self.name}-teacher",
            "model": self.model.model_copy(update=model),
            "serving": serving.model_copy(update=own),
            "resources": self.resources.model_copy(update={"placement": None}),
            "algorithm": AlgorithmSection(),
            "teacher": None,
        }
        return self.model_copy(update=changes)

    @property
    def actors(self) -> list[ActorGroup]:
        replicas, *others = super().actors
        if (teacher := self.teacher) is None:
            return [replicas, *others]
        kind = ActorGroup("teachers", teacher.num_replicas, teacher.cpus_per_replica, teacher.gpus_per_replica)
        return [replicas, kind, *others]

    @property
    def _judges(self) -> list[JudgeSection]:
        return [part.reward.judge for part in self.env.parts.values() if _JUDGED & part.reward.all_weights.keys()]

    @property
    def takes_turns(self) -> bool:
        serving, vllm = self.serving, self.serving.vllm
        if vllm.rest_while_learning is not None:
            return vllm.rest_while_learning
        if self.in_pairs:
            return self._may_take_turns
        on_gpu = serving.expected_engine == "vllm" and serving.gpus_per_replica > 0
        return on_gpu and vllm.gpu_memory_utilization is None and self._may_take_turns

    @property
    def _may_take_turns(self) -> bool:
        """Whether one replica and one learner share each GPU, or try it without one."""
        serving, learner = self.serving, self.learner
        shares = (serving.gpus_per_replica, learner.gpus_per_learner)
        pairs = max(learner.num_learners, 1) if self.in_pairs else 1
        paired = serving.num_replicas == pairs and serving.autoscaling is None and learner.num_learners <= pairs
        share_gpu = all(0 < share < 1 for share in shares) and sum(shares) <= 1
        fit = (paired and share_gpu) if any(shares) else (paired or not self.in_pairs)
        return fit and not serving.shared and not self.rollout.max_policy_lag

    def _full_problems(self) -> Iterator[str]:
        model, serving, full = self.model, self.serving, "model.train: full"
        if model.adapter is not None:
            yield "model.adapter belongs to model.train: lora: `rl-vlm export` it, and give the result as model.path"
        if model.dtype == "float16":
            yield f"{full} in float16 would lose small gradients: set model.dtype to bfloat16 or float32"
        if serving.shared:
            yield f"serving.shared serves several policies on one set of weights, which {full} changes: leave it out"
        if serving.quantization != "none":
            yield f"serving.quantization {serving.quantization} would be undone by {full}: set it to none"
        if self.learner.zero_stage:
            yield f"learner.strategy {self.learner.strategy} shards frozen weights, and {full} has none: use fsdp2"
        if self.learner.strategy == "fsdp2" and (self.learner.optimizer == "adafactor" or self.learner.ema_decay):
            yield f"{full} with learner.strategy fsdp2 has neither adafactor nor learner.ema_decay: leave them out"
        if self.critic is not None and self.critic.kind == "adapter":
            yield f"critic.kind adapter needs frozen weights, of which {full} has none: use critic.kind head"
        if serving.expected_engine == "vllm" and self.rollout.in_flight_updates == "keep":
            yield f"rollout.in_flight_updates keep would mix versions with {full} and vLLM: set it to recompute"
        if serving.expected_engine == "vllm" and any(
            judge.endpoint is None or judge.against == "start" for judge in self._judges
        ):
            yield (
                f"env.reward.judge asks the base model, which vLLM does not keep with {full}: give it an endpoint and "
                "against: reference, or set serving.engine to transformers"
            )

    @property
    def _adapts_vision(self) -> bool:
        return self.model.train != "full" and self.model.lora.target_modules == "vision"

    def _task_problems(self) -> Iterator[str]:
        names, stages = [part.name for part in self.env.mixture], self.curriculum.stages
        for name in names:
            if name in _TAKEN_NAMES or name in self.evaluation.variants:
                yield f"env.mixture: the name {name} belongs to another metric: choose another one"
        changes = {f"evaluation.variants.{name}": value for name, value in self.evaluation.variants.items()}
        changes |= {f"curriculum.stages.{number}.env": stage.env for number, stage in enumerate(stages)}
        for key, arguments in changes.items() if names else ():
            if not all(name in names and isinstance(inner, dict) for name, inner in arguments.items()):
                yield (
                    f"{key}: with env.mixture it maps names ({', '.join(names)}) to arguments, such as {names[0]}: "
                    "{seed: 1}"
                )
        weights = {part.name: part.weight for part in self.env.mixture}
        for number, stage in enumerate(stages):
            key = f"curriculum.stages.{number}.mixture"
            if unknown := sorted(stage.mixture.keys() - weights.keys()):
                yield f"{key} names {', '.join(unknown)}, and env.mixture has {', '.join(names) or 'none'}"
            elif names and not any((weights | stage.mixture).values()):
                yield f"{key}: all weights are 0, so that no environment would ever be chosen"

    def variant_arguments(self, variant: str, env: str) -> dict[str, Any]:
        """What an evaluation variant changes in the arguments of an environment, which `env.parts` names."""
        arguments = self.evaluation.variants.get(variant, {})
        return dict(arguments.get(env, {})) if self.env.mixture else arguments

    @property
    def collection(self) -> RolloutSection:
        return self.rollout

    @property
    def trains_full(self) -> bool:
        return self.model.train == "full"

    @property
    def lora_slots(self) -> int:
        if self.many_policies:
            return super().lora_slots
        # Samples of older versions may still run when a new one comes, unless they take it.
        return 1 if self.rollout.in_flight_updates else self.rollout.max_policy_lag + 2

    @property
    def lora_rank(self) -> int:
        return self.model.lora.rank

    @property
    def samples_per_round(self) -> int:
        return self.rollout.prompts_per_iteration * self.rollout.group_size * max(self.rollout.max_policy_lag, 1)

    @property
    def published_dtype(self) -> str:
        """The precision of published weights; checkpoints keep float32."""
        return self.model.dtype if self.serving.expected_engine == "vllm" or self.model.train == "full" else "float32"
