"""`learner`: the learner group and its optimiser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

from pydantic import Field

from rl_vlm.config.section import Beta, Section

StrategyName: TypeAlias = Literal["single", "all_reduce", "fsdp2", "zero1", "zero2", "zero3"]


class ComputeSection(Section):
    """How a learner computes on a CPU."""

    num_threads: int = Field(1, ge=1)
    cpu_product: Literal["auto", "torch", "onednn"] = Field(
        "auto",
        description="What multiplies float32 matrices on a CPU, in the transformers engine too. auto: the faster one, measured once "
        "per machine and kept in the cache folder; torch's where deterministic: true.",
    )


class LearnerActors(ComputeSection):
    """The learner group: where learners run, and when one counts as lost."""

    num_learners: int = Field(0, ge=0, description="0: inside the driver; more: actors that share each optimiser step.")
    cpus_per_learner: float = Field(0.5, ge=0)
    gpus_per_learner: float = Field(0.0, ge=0, le=1, description="A learner computes on one GPU, or on a share of it.")
    max_restarts: int = Field(3, ge=0, description="How often a dead learner is replaced from the last checkpoint.")
    update_timeout_s: float = Field(
        1800.0,
        gt=0,
        description="A learner that has not answered its first update within this counts as dead. Later updates get ten times the "
        "longest one so far, at least two minutes and at most this.",
    )

    def problems(self) -> Iterator[str]:
        """Several learners on one GPU."""
        yield from super().problems()
        if self.num_learners >= 2 and 0 < self.gpus_per_learner <= 0.5:
            yield (
                f"learner.gpus_per_learner {self.gpus_per_learner:g} with num_learners {self.num_learners}: Ray would put two learners on "
                'one GPU, which NCCL refuses ("Duplicate GPU detected"); set gpus_per_learner to 1, or num_learners to 1'
            )

    @property
    def in_step(self) -> bool:
        """Whether passes wait for those of the other learners, so that all make as many, and all read and restore state together."""
        return False


class OptimizerSection(ComputeSection):
    """How the model is optimised: of reinforcement learning and of supervised fine-tuning."""

    lr: float = Field(1e-5, gt=0)
    lr_schedule: Literal["constant", "linear"] = "constant"
    lr_final_fraction: float = Field(
        0.1, ge=0, le=1, description="Of a linear schedule, reached at the last iteration."
    )
    optimizer: Literal["adamw", "adafactor"] = Field(
        "adamw", description="adafactor keeps row and column sums instead of moments, and has no betas."
    )
    betas: tuple[Beta, Beta] = (0.9, 0.98)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    micro_batch_tokens: int = Field(8192, ge=1)
    share_prompts: bool = True
    attention: Literal["auto", "segments", "dense"] = Field(
        "auto",
        description="Of packed rows. dense: one mask over whole rows, the reference; segments: each continuation by itself, "
        "which pays for what is seen; auto: segments where that is cheaper.",
    )
    gradient_checkpointing: bool = False

    def problems(self) -> Iterator[str]:
        """Keys that another choice reads."""
        yield from super().problems()
        for key, chooser, value in (("lr_final_fraction", "lr_schedule", "linear"), ("betas", "optimizer", "adamw")):
            if getattr(self, chooser) != value and any(self.changed(key)):
                yield (
                    f"learner.{key} has no effect with learner.{chooser} {getattr(self, chooser)}: remove it, or set "
                    f"learner.{chooser} to {value}"
                )


class LearnerSection(LearnerActors, OptimizerSection):
    """The learner group that trains the policy."""

    strategy: StrategyName | None = Field(
        None,
        description="How learners share a step. single: one learner; all_reduce: each holds all and gradients are added; fsdp2: "
        "the frozen layers are sharded; zero1, zero2, zero3: DeepSpeed shards optimiser, gradients, frozen layers. null: single "
        "or all_reduce, by num_learners.",
    )
    offload_optimizer: bool = Field(
        False, description="Keep the optimiser's state in host memory and step there; zero1, zero2 and zero3."
    )
    offload_params: bool = Field(
        False, description="Keep the shards of the frozen layers in host memory; fsdp2 and zero3."
    )
    ema_decay: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Per optimiser step, of an average of the weights that is kept beside them; evaluation.weights uses it.",
    )
    log_entropy: bool = Field(
        True,
        description="Measure policy/entropy, about 6 % of the time of a large head on a CPU. A bonus measures it anyway.",
    )

    def problems(self) -> Iterator[str]:
        """What the strategy cannot do."""
        yield from super().problems()
        name = self.strategy
        if name == "single" and self.num_learners > 1:
            yield f"learner.strategy single with num_learners {self.num_learners}: use all_reduce, or set num_learners to 1"
        if name not in (None, "single") and self.num_learners == 0:
            yield f"learner.strategy {name} needs learners that are actors: set num_learners to 2 or more"
        if self.offload_optimizer and not self.zero_stage:
            yield f"learner.offload_optimizer has no effect with strategy {name or 'null'}: use zero1, zero2 or zero3"
        if self.offload_params and not self.shards_layers:
            yield f"learner.offload_params has no effect with strategy {name or 'null'}: use fsdp2 or zero3"
        if self.zero_stage and self.optimizer == "adafactor":
            yield (
                f"learner.strategy {name} cuts the optimiser's tensors into flat shards, which have no rows and columns for adafactor: "
                "use adamw, or strategy fsdp2"
            )

    @property
    def zero_stage(self) -> int:
        """What DeepSpeed shards: 1 the optimiser's state, 2 gradients too, 3 frozen layers too; 0: nothing."""
        return int(self.strategy[-1]) if self.strategy in ("zero1", "zero2", "zero3") else 0

    @property
    def shards_layers(self) -> bool:
        """Whether each learner holds a part of the decoder's layers, so that forward passes wait for each other."""
        return self.strategy in ("fsdp2", "zero3")

    @property
    def in_step(self) -> bool:
        """See LearnerActors."""
        return self.strategy == "fsdp2" or bool(self.zero_stage)
