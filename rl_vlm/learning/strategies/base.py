"""Strategy: how the learners compute, share and apply gradients, and store the optimiser's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from rl_vlm.models.payload import WeightPayload

if TYPE_CHECKING:
    from rl_vlm.learning.policy_model import PolicyModel  # with peft and all of transformers, for env runners too


class Strategy(Protocol):
    """One optimiser step is: `backward` for each micro-batch, then `step`."""

    def prepare(self, policy: PolicyModel, optimizer: torch.optim.Optimizer) -> None:
        """Set the policy and its optimiser, once, before the first step."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of one micro-batch; loss weights are already normalised over all learners."""
        ...

    def step(self, max_grad_norm: float, groups: Sequence[int] | None = None) -> float | None:
        """Clip each of the optimiser's parameter groups to the norm, step them (None: all), forget the gradients.

        Returns the norm of the first one before clipping; None: not finite, not stepped.
        """
        ...

    def state(self) -> dict[str, Tensor]:
        """The optimiser's state as CPU tensors by name (`exp_avg.3`), the same whatever the number of learners."""
        ...

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state` returned, also for another number of learners."""
        ...

    def gather_adapter(self, version: int, dtype: str | None = None) -> WeightPayload:
        """The adapter as it is, or rounded to `dtype`, as an immutable version."""
        ...
