"""`teacher`: whom the policy learns from, with algorithm.name distill."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from rl_vlm.config.section import Count, FilePath, NonNegative, OnlyWith, Positive, Section


class TeacherModelSection(Section):
    """A model that scores the policy's own samples (on-policy distillation). It has replicas of its own."""

    place: ClassVar[str] = "teacher."
    conditional: ClassVar[tuple[OnlyWith, ...]] = (OnlyWith(("top_k",), "divergence", ("forward", "jsd")),)

    path: str | None = None  # A model with the tokenizer of the policy's; null: model.path.
    adapter: FilePath | None = None  # A run folder or peft adapter folder of that model.
    # What it reads before the conversation and the policy does not. {truth} and so on are of the episode's info.
    hint: str = ""
    max_pixels: Count | None = None  # As model.max_pixels: it may see larger pictures. null: the same.
    # Of its pictures. blank: none, in effect; swapped: those of another item, a control.
    view: Literal["true", "blank", "swapped"] = "true"
    # Per token from the policy to the teacher. reverse: KL(policy || teacher) of the sampled tokens, as an advantage.
    # forward: KL(teacher || policy) over the teacher's top_k tokens; jsd: Jensen-Shannon, both as a loss.
    divergence: Literal["reverse", "forward", "jsd"] = "reverse"
    top_k: int = Field(20, ge=1, le=20)  # The teacher's most likely tokens, as if it had no others.
    weight: Positive = 1.0  # Of the divergence.
    reward_weight: NonNegative = 0.0  # Of the advantage that algorithm.estimator makes of the rewards; 0: none.
    num_replicas: Count = 1  # The other settings of its replicas are those of `serving`.
    cpus_per_replica: NonNegative = 0.5  # CPUs that Ray reserves for each.
    gpus_per_replica: NonNegative = 0.0  # GPUs that Ray reserves for each.
    max_context: int | None = Field(None, ge=16)  # null: serving.max_context and 256 tokens for a hint.

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.path is None and self.adapter is None and not self.hint and self.max_pixels is None:
            yield "teacher is the model that the policy began as: set its path, adapter, hint or max_pixels"
