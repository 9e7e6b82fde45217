"""The configuration of a run: all sections, and checks between them."""

from __future__ import annotations

from typing import Any

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from rl_vlm.config.algorithm import AlgorithmSection
from rl_vlm.config.applies import refuse_unread
from rl_vlm.config.critic import CriticSection
from rl_vlm.config.curriculum import CurriculumSection, check_tasks
from rl_vlm.config.env import EnvSection
from rl_vlm.config.evaluation import EvaluationSection
from rl_vlm.config.full import check_full
from rl_vlm.config.http import HTTPSection
from rl_vlm.config.learner import LearnerSection
from rl_vlm.config.logging import LoggingSection
from rl_vlm.config.model import ModelSection
from rl_vlm.config.preference import PreferenceSection
from rl_vlm.config.resources import ResourcesSection
from rl_vlm.config.rest import check_rest
from rl_vlm.config.rollout import RolloutSection
from rl_vlm.config.section import Section
from rl_vlm.config.serving import VLLM_TEMPERATURES, ServingSection
from rl_vlm.config.sight import SightSection
from rl_vlm.config.specs import ALGORITHMS, AlgorithmSpec
from rl_vlm.files import resolved


class RunConfig(Section):
    """The configuration of a run."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$")
    plugins: tuple[str, ...] = Field(
        (), description="Modules, or files by path, that register your environments, losses, estimators and rewards."
    )
    seed: int = Field(0, ge=0, lt=2**31)
    deterministic: bool = Field(False, description="Lock-step sampling: k + k iterations equal 2k byte for byte.")
    model: ModelSection = ModelSection()
    serving: ServingSection = ServingSection()
    env: EnvSection = EnvSection()
    curriculum: CurriculumSection = CurriculumSection()
    rollout: RolloutSection = RolloutSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    learner: LearnerSection = LearnerSection()
    critic: CriticSection = CriticSection()
    evaluation: EvaluationSection = EvaluationSection()
    sight: SightSection = SightSection()
    preference: PreferenceSection = PreferenceSection()
    logging: LoggingSection = LoggingSection()
    resources: ResourcesSection = ResourcesSection()
    http: HTTPSection = HTTPSection()

    @field_validator("plugins")
    @classmethod
    def _absolute_paths(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        # Other processes have other working directories.
        return tuple(str(resolved(name)) if name.endswith(".py") else name for name in names)

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        rollout = self.rollout
        uses_vllm = self.serving.expected_engine == "vllm"
        quantization = self.serving.quantization
        if (quantization == "nf4" and uses_vllm) or (quantization == "fp8" and not uses_vllm):
            raise ValueError(
                "serving.quantization: nf4 needs serving.engine transformers (vLLM has no NF4), fp8 needs vllm on a GPU"
            )
        if self.deterministic and (uses_vllm or self.model.dtype != "float32" or rollout.max_policy_lag):
            raise ValueError(
                "deterministic: true needs serving.engine transformers, model.dtype float32 and rollout.max_policy_lag 0"
            )
        judged = [part.reward for part in self.env.parts.values() if "judge" in part.reward.weights]
        if self.deterministic and any(reward.judge.probabilities for reward in judged):
            # Which questions share a batch depends on time, and their last bits on the batch.
            raise ValueError("deterministic: true with a judge needs env.reward.judge.probabilities: false")
        coldest, hottest = VLLM_TEMPERATURES
        if uses_vllm and self.spec.publishes_adapters and not coldest <= rollout.temperature <= hottest:
            raise ValueError(
                f"rollout.temperature {rollout.temperature:g}: vLLM samples at {coldest:g} to {hottest:g}; change it, or set "
                "serving.engine to transformers"
            )
        if self.serving.shared and (self.deterministic or rollout.in_flight_updates):
            raise ValueError(
                "serving.shared: replicas that several runs share know neither deterministic: true nor rollout.in_flight_updates: "
                "leave these out, or give the run its own replicas"
            )
        if uses_vllm and self.model.train == "lora" and self.model.lora.target_modules == "vision":
            raise ValueError(
                "model.lora.target_modules vision needs serving.engine transformers, because vLLM would ignore the adapted "
                "vision tower: change the engine, or set target_modules to all"
            )
        if self.model.train == "full":
            check_full(self)
        if self.serving.vllm.rest_while_learning:
            check_rest(self)
        if self.evaluation.weights == "ema" and (self.learner.ema_decay is None or rollout.max_policy_lag):
            raise ValueError("evaluation.weights: ema needs learner.ema_decay (0.99, say) and rollout.max_policy_lag 0")
        where = f"with algorithm.name {self.algorithm.name}"
        refuse_unread(self, where, self.spec.reads, self.serving.expected_engine)
        check_tasks(self)
        self.spec.check(self)
        return self

    @model_serializer(mode="wrap")
    def _without_unread(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out keys that the algorithm ignores, because reading them again would be an error."""
        return self.spec.reads.only(handler(self))

    @property
    def without_effect(self) -> list[str]:
        """A sentence on each setting that nothing of this run reads, where it is told and not refused."""
        told = self.algorithm.without_effect
        for name, part in self.env.parts.items():
            told += part.reward.without_effect(f"env.mixture.{name}.reward" if name else "env.reward")
        return told

    @property
    def spec(self) -> AlgorithmSpec:
        """The classes and checks of the run's algorithm."""
        return ALGORITHMS.get(self.algorithm.name)

    def variant_arguments(self, variant: str, env: str) -> dict[str, Any]:
        """What an evaluation variant changes in the arguments of an environment, which `env.parts` names."""
        arguments = self.evaluation.variants.get(variant, {})
        return dict(arguments.get(env, {})) if self.env.mixture else arguments

    @property
    def held_out_at_once(self) -> int | None:
        """Held-out items that an evaluation in training plays at a time; None: all, where no environment is a process of its own."""
        return self.evaluation.at_once if self.env.isolation == "process" else None

    @property
    def lora_slots(self) -> int:
        """Adapter versions that a replica may sample with at the same time (engine vllm)."""
        if self.serving.shared:
            return self.serving.sharing.lora_slots
        # Samples of older versions may still run when a new one comes, unless they take it.
        return 1 if self.rollout.in_flight_updates else self.rollout.max_policy_lag + 2

    @property
    def max_lora_rank(self) -> int:
        """The highest rank of an adapter that the replicas serve."""
        return (self.serving.sharing.max_lora_rank if self.serving.shared else None) or self.model.lora.rank

    @property
    def published_dtype(self) -> str:
        """The precision of what is published: vLLM rounds adapters to that of the model, and the learner itself computes with full
        weights in it; checkpoints keep float32."""
        return self.model.dtype if self.serving.expected_engine == "vllm" or self.model.train == "full" else "float32"

    @property
    def samples_per_round(self) -> int:
        """Samples of a round, of all replicas: what they can be asked for at once."""
        return self.rollout.prompts_per_iteration * self.rollout.group_size * max(self.rollout.max_policy_lag, 1)

    @property
    def needed_cpus(self) -> float:
        """Logical CPUs that all actors of the run hold together."""
        return sum(actors.count * actors.cpus for actors in self.spec.actors(self))

    @property
    def needed_gpus(self) -> float:
        """GPUs that all actors of the run hold together; a learner inside the driver counts as one actor."""
        return sum(actors.count * actors.gpus for actors in self.spec.actors(self))
