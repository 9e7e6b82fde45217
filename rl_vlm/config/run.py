"""Everything about a run: all sections, and what must agree between them."""

from __future__ import annotations

from typing import Any

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from rl_vlm.config.algorithm import AlgorithmSection
from rl_vlm.config.applies import READS, refuse_unread
from rl_vlm.config.env import EnvSection
from rl_vlm.config.evaluation import EvaluationSection
from rl_vlm.config.http import HTTPSection
from rl_vlm.config.learner import LearnerSection
from rl_vlm.config.logging import LoggingSection
from rl_vlm.config.model import ModelSection
from rl_vlm.config.preference import PreferenceSection
from rl_vlm.config.resources import ResourcesSection
from rl_vlm.config.rollout import RolloutSection
from rl_vlm.config.section import Section
from rl_vlm.config.serving import ServingSection


class RunConfig(Section):
    """Everything about a run."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$")
    seed: int = Field(0, ge=0, lt=2**31)
    deterministic: bool = Field(False, description="Lock-step sampling: k + k iterations equal 2k byte for byte.")
    model: ModelSection = ModelSection()
    serving: ServingSection = ServingSection()
    env: EnvSection = EnvSection()
    rollout: RolloutSection = RolloutSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    learner: LearnerSection = LearnerSection()
    evaluation: EvaluationSection = EvaluationSection()
    preference: PreferenceSection = PreferenceSection()
    logging: LoggingSection = LoggingSection()
    resources: ResourcesSection = ResourcesSection()
    http: HTTPSection = HTTPSection()

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        rollout = self.rollout
        if self.algorithm.minibatches > rollout.prompts_per_iteration:
            raise ValueError(
                f"algorithm.minibatches ({self.algorithm.minibatches}) exceeds rollout.prompts_per_iteration "
                f"({rollout.prompts_per_iteration}): a minibatch needs at least one group"
            )
        uses_vllm = self.serving.expected_engine == "vllm"
        refuse_unread(self, self.algorithm.name, self.serving.expected_engine)
        quantization = self.serving.quantization
        if (quantization == "nf4" and uses_vllm) or (quantization == "fp8" and not uses_vllm):
            raise ValueError(
                "serving.quantization: nf4 needs serving.engine transformers (vLLM has no NF4), fp8 needs vllm on a GPU"
            )
        if self.deterministic and (uses_vllm or self.model.dtype != "float32" or rollout.max_policy_lag):
            raise ValueError(
                "deterministic: true needs serving.engine transformers, model.dtype float32 and rollout.max_policy_lag 0"
            )
        if self.algorithm.name == "preference_sac" and self.learner.num_learners > 1:
            raise ValueError("learner.num_learners must be 0 or 1 for preference_sac: its networks are small")
        if self.model.train == "full":
            raise ValueError(
                "model.train: full is not available yet, because full weights cannot be sent to running replicas: "
                "use model.train: lora"
            )
        return self

    @model_serializer(mode="wrap")
    def _without_unread(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What is written can be read again: keys that the algorithm ignores are left out."""
        return READS[self.algorithm.name].only(handler(self))

    @property
    def needed_cpus(self) -> float:
        """Logical CPUs that all actors of the run hold together."""
        if self.algorithm.name == "preference_sac":
            collection = self.preference.collection
            replicas = self.serving.num_replicas if self.preference.asks_served_model else 0
            return (
                replicas * self.serving.cpus_per_replica
                + collection.num_env_runners * collection.cpus_per_env_runner
                + self.learner.num_learners * self.learner.cpus_per_learner
            )
        return (
            self.serving.num_replicas * self.serving.cpus_per_replica
            + self.rollout.num_env_runners * self.rollout.cpus_per_env_runner
            + self.learner.num_learners * self.learner.cpus_per_learner
        )

    @property
    def needed_gpus(self) -> float:
        """GPUs that all actors of the run hold together; a learner inside the driver counts as one actor."""
        learners = max(self.learner.num_learners, 1 if self.learner.gpus_per_learner else 0)
        if self.algorithm.name == "preference_sac" and not self.preference.asks_served_model:
            return learners * self.learner.gpus_per_learner
        return self.serving.num_replicas * self.serving.gpus_per_replica + learners * self.learner.gpus_per_learner
