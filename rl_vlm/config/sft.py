"""`sft`: supervised fine-tuning on conversations, and the configuration of `rl-vlm sft`, which has no environment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from rl_vlm.config.learner import OptimizerSection
from rl_vlm.config.section import PlainLogging, Section
from rl_vlm.config.serving import FLOAT16_UNTRAINABLE, TrainedModelSection


class SFTSection(Section):
    """Supervised fine-tuning: which conversations, for how long, and how progress is measured."""

    data: str = Field(
        "shapes",
        description="A .jsonl or .parquet file, a folder of them or of images with metadata.jsonl, a hub data set that "
        "was fetched before, or `shapes`; `@[a:b]` takes some of its rows.",
    )
    eval_data: str | None = Field(
        None, description="Held-out conversations; null: the test split of `data`, if there is one."
    )
    eval_fraction: float = Field(
        0.0, ge=0, lt=1, description="Share of `data` that is held out, for data without held-out conversations."
    )
    batch_size: int = Field(16, ge=1, description="Conversations per optimiser step.")
    epochs: float = Field(1.0, gt=0)
    steps: int | None = Field(None, ge=1, description="Optimiser steps in place of epochs.")
    warmup_steps: int = Field(0, ge=0, description="Steps in which the learning rate rises to learner.lr.")
    max_length: int = Field(4096, ge=2, description="Tokens of a conversation, images included.")
    too_long: Literal["leave_out", "truncate"] = Field(
        "leave_out", description="What happens to longer conversations; truncate cuts them off at the end."
    )
    eval_every: int = Field(
        0, ge=0, description="Steps between evaluations; 0: before the first and after the last step."
    )
    eval_items: int = Field(512, ge=1, description="Held-out conversations of an evaluation, at most.")
    eval_answers: int = Field(
        64, ge=0, description="Of these, how many are answered greedily and compared with the last turn word for word."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: the GPU where there is one.")

    def problems(self) -> Iterator[str]:
        """Two held-out sets."""
        if self.eval_data is not None and self.eval_fraction:
            yield "sft.eval_data and sft.eval_fraction both name held-out conversations: give one of them"


class SFTConfig(Section):
    """The configuration of `rl-vlm sft`."""

    name: str = Field("sft", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$")
    seed: int = Field(0, ge=0, lt=2**31)
    model: TrainedModelSection = TrainedModelSection()
    sft: SFTSection = SFTSection()
    learner: OptimizerSection = OptimizerSection()
    logging: PlainLogging = PlainLogging()

    def problems(self) -> Iterator[str]:
        """Settings of the model that leave nothing to train."""
        if self.model.train == "full":
            yield "model.train: full is for reinforcement learning; `rl-vlm sft` trains adapters: use model.train: lora"
        if self.model.lora.target_modules == "none":
            yield "model.lora.target_modules none leaves nothing to train: choose attn, mlp, all or vision"
        if self.model.dtype == "float16":
            yield FLOAT16_UNTRAINABLE
