"""`sft`: supervised fine-tuning on conversations, and the configuration of `rl-vlm sft`, which has no environment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from rl_vlm.config.learner import OptimizerSection
from rl_vlm.config.logging import PlainLogging
from rl_vlm.config.section import Count, Name, Natural, Positive, Section
from rl_vlm.config.serving import FLOAT16_UNTRAINABLE, TrainedModelSection


class SFTSection(Section):
    # A .jsonl or .parquet file, a folder of them or of images, a fetched hub data set, or `shapes`; `@[a:b]` slices it.
    data: str = "shapes"
    eval_data: str | None = None  # Held-out conversations; null: the test split of `data`, if there is one.
    # Share of `data` that is held out, for data without held-out conversations.
    eval_fraction: float = Field(0.0, ge=0, lt=1)
    batch_size: Count = 16  # Conversations per optimiser step.
    epochs: Positive = 1.0  # Passes over the conversations.
    steps: Count | None = None  # Optimiser steps in place of epochs.
    warmup_steps: Natural = 0  # Steps in which the learning rate rises to learner.lr.
    max_length: int = Field(4096, ge=2)  # Tokens of a conversation, images included.
    # What happens to longer conversations; truncate cuts them off at the end.
    too_long: Literal["leave_out", "truncate"] = "leave_out"
    eval_every: Natural = 0  # Steps between evaluations; 0: before the first and after the last step.
    eval_items: Count = 512  # Held-out conversations of an evaluation, at most.
    # Of these, how many are answered greedily and compared with the last turn word for word.
    eval_answers: Natural = 64
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: the GPU where there is one.

    def problems(self) -> Iterator[str]:
        if self.eval_data is not None and self.eval_fraction:
            yield "sft.eval_data and sft.eval_fraction both name held-out conversations: give one of them"


class SFTConfig(Section):
    name: Name = "sft"  # Names the run folder.
    seed: int = Field(0, ge=0, lt=2**31)  # Of weights and the order of conversations.
    model: TrainedModelSection = TrainedModelSection()
    sft: SFTSection = SFTSection()
    learner: OptimizerSection = OptimizerSection()
    logging: PlainLogging = PlainLogging()

    def problems(self) -> Iterator[str]:
        if self.model.train == "full":
            yield "model.train: full is for reinforcement learning; `rl-vlm sft` trains adapters: use model.train: lora"
        if self.model.lora.target_modules == "none":
            yield "model.lora.target_modules none leaves nothing to train: choose attn, mlp, all or vision"
        if self.model.dtype == "float16":
            yield FLOAT16_UNTRAINABLE
