"""What every run under `rl-vlm train` has: its name, a served model, learners, and what Ray gives them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from rl_vlm.config.learner import LearnerActors
from rl_vlm.config.logging import TrainLogging
from rl_vlm.config.resources import ResourcesSection
from rl_vlm.config.section import Name, Plugin, Section
from rl_vlm.config.serving import HTTPSection, ServedModelSection, ServingSection


@dataclass(frozen=True, slots=True)
class ActorGroup:
    """Actors of one kind that a run holds together, and the logical CPUs and GPUs of each."""

    kind: str
    count: int
    cpus: float
    gpus: float


class CommonConfig(Section, ABC):
    """The configuration of a run that serves a model and has learners. Each kind of run derives its own class."""

    name: Name = "run"  # Names the run folder and the served application.
    # Modules, or files by path, that register your environments, losses, estimators and rewards.
    plugins: tuple[Plugin, ...] = ()
    seed: int = Field(0, ge=0, lt=2**31)  # Of weights, items and samples.
    deterministic: bool = False  # Lock-step sampling: k + k iterations equal 2k byte for byte.
    model: ServedModelSection = ServedModelSection()
    serving: ServingSection = ServingSection()
    learner: LearnerActors = LearnerActors()
    logging: TrainLogging = TrainLogging()
    resources: ResourcesSection = ResourcesSection()
    http: HTTPSection = HTTPSection()

    def problems(self) -> Iterator[str]:
        uses_vllm, quantization = self.serving.expected_engine == "vllm", self.serving.quantization
        if (quantization == "nf4" and uses_vllm) or (quantization == "fp8" and not uses_vllm):
            yield "serving.quantization: nf4 needs serving.engine transformers, and fp8 needs vllm on a GPU"
        if self.deterministic and (uses_vllm or self.model.dtype != "float32"):
            yield "deterministic: true needs serving.engine transformers and model.dtype float32"
        if self.serving.shared and self.deterministic:
            yield "serving.shared: replicas that several runs share are not deterministic: leave out one of the two"
        share = self.learner.gpus_per_learner
        if self.learner.num_learners >= 2 and 0 < share <= 0.5 and not self.in_pairs:
            yield (
                f"learner.gpus_per_learner {share:g} would put two learners on one GPU, which NCCL rejects: set it, or "
                "num_learners, to 1, or resources.placement to pairs"
            )

    @property
    @abstractmethod
    def collection(self) -> Any:
        """The section of the env runners, which has `num_env_runners` and `cpus_per_env_runner`."""

    @property
    def serves(self) -> bool:
        """Whether the run has replicas of the model."""
        return True

    @property
    def trains_full(self) -> bool:
        """Whether all weights are trained."""
        return False

    @property
    def takes_turns(self) -> bool:
        """Whether a replica gives its memory of keys and values to the learner while that works."""
        return False

    @property
    def in_pairs(self) -> bool:
        """Whether each GPU has one replica and one learner."""
        return self.resources.placement == "pairs"

    @property
    def gpu_shares(self) -> tuple[float, float]:
        """What Ray is asked for by a replica and by a learner. Of pairs replicas come first and take more than half, so
        that no two are on one GPU. Then a learner fits beside each: Ray takes the GPU that is left with least. (Serve's
        replicas join no placement group, and one of their own would end the learner with a replica that dies.)"""
        shares = self.serving.gpus_per_replica, self.learner.gpus_per_learner
        return (0.51, 0.49) if self.in_pairs and all(shares) else shares

    @property
    def lora_rank(self) -> int:
        """Of the adapters that the run publishes."""
        return 1

    @property
    def many_policies(self) -> bool:
        """Whether replicas serve the adapters of several runs, or such as clients load."""
        return bool(self.serving.shared or self.http.adapter_root)

    @property
    def max_lora_rank(self) -> int:
        """Of the adapters that the replicas serve."""
        return (self.serving.sharing.max_lora_rank if self.many_policies else None) or self.lora_rank

    @property
    def lora_slots(self) -> int:
        """Adapter versions that a replica may sample with at the same time (engine vllm)."""
        # Samples of the version before may still run when a new one comes.
        return self.serving.sharing.lora_slots if self.many_policies else 2

    @property
    def samples_per_round(self) -> int:
        """Samples that all replicas together are asked for at once, at most."""
        return self.serving.max_rows * self.serving.num_replicas

    @property
    def actors(self) -> list[ActorGroup]:
        """All actors of a run; a learner inside the driver counts where it needs a GPU."""
        serving, learner, runners = self.serving, self.learner, self.collection
        of_replica, of_learner = self.gpu_shares
        replicas = serving.num_replicas if self.serves else 0
        return [
            ActorGroup("replicas", replicas, serving.cpus_per_replica, of_replica),
            ActorGroup("env runners", runners.num_env_runners, runners.cpus_per_env_runner, 0.0),
            ActorGroup("learners", learner.num_learners, learner.cpus_per_learner, of_learner),
            ActorGroup("learner in the driver", int(learner.num_learners == 0), 0.0, of_learner),
        ]

    @property
    def needed_cpus(self) -> float:
        return sum(actors.count * actors.cpus for actors in self.actors)

    @property
    def needed_gpus(self) -> float:
        return sum(actors.count * actors.gpus for actors in self.actors)
