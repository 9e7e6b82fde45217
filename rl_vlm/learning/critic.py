"""The critic: values of the states before sampled tokens, and what they are learned from.

Shapes: N sampled tokens of a micro-batch, D the width of the language model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from rl_vlm.config.critic import CriticSection
from rl_vlm.learning.returns import Rescaling
from rl_vlm.types import UserInputError

HEAD = "head."  # names of the head's tensors, among those of the critic's adapter


class SecondAdapter(Protocol):
    """Another LoRA adapter in the model's layers."""

    parameters: dict[str, nn.Parameter]

    def active(self) -> AbstractContextManager[None]:
        """Inside, the model computes with this adapter instead of the policy's."""
        ...


class Critic:
    """A value head on the hidden states of the policy (`kind: head`) or of a second LoRA adapter (`adapter`).

    Values are of normalised returns. The head's last layer starts at zero: every state is worth the mean return.

    Args:
        model: the model, with the policy's LoRA layers injected.
        section: the critic's settings.
        width: D.
        adapter: for `kind: adapter`.
    """

    def __init__(
        self, model: nn.Module, section: CriticSection, width: int, adapter: SecondAdapter | None = None
    ) -> None:
        self.loss_coef, self.clip, self.stop_gradient = section.loss_coef, section.clip, section.stop_gradient
        device = next(model.parameters()).device
        self.last = nn.Linear(section.hidden or width, 1, device=device)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)
        before = [nn.Linear(width, section.hidden, device=device), nn.GELU()] if section.hidden else []
        self.head = nn.Sequential(*before, self.last)
        self._adapter = adapter

    @property
    def shares_policy(self) -> bool:
        """Whether the policy's hidden states are the critic's too, so that one forward pass serves both."""
        return self._adapter is None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What the critic's optimiser steps change."""
        return [*(self._adapter.parameters.values() if self._adapter else ()), *self.head.parameters()]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, the model computes with the critic's adapter where it has one."""
        if self._adapter is None:
            yield
        else:
            with self._adapter.active():
                yield

    def values(self, hidden: Tensor) -> Tensor:
        """float32 [N] of hidden states [N, D]."""
        return self.head(hidden.float())[:, 0]  # type: ignore[no-any-return]

    @torch.no_grad()
    def rescale(self, change: Rescaling) -> None:
        """Keep every value as it is, in returns, while mean and standard deviation of the normalisation change.

        PopArt, arXiv 1602.07714, equation 5.
        """
        self.last.weight *= change.factor
        self.last.bias.copy_(self.last.bias * change.factor + change.shift)

    def state(self) -> dict[str, Tensor]:
        """All tensors by name, on the CPU."""
        tensors: dict[str, Tensor] = {HEAD + name: tensor for name, tensor in self.head.state_dict().items()}
        if self._adapter is not None:
            tensors |= self._adapter.parameters
        return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state` returned. Raises UserInputError for tensors of another critic."""
        try:
            self.head.load_state_dict({name: state[HEAD + name] for name in self.head.state_dict()})
            for name, parameter in (self._adapter.parameters if self._adapter else {}).items():
                parameter.copy_(state[name])
        except (KeyError, RuntimeError) as error:
            raise UserInputError(
                f"The checkpoint has no critic of this kind ({error}): keep algorithm.name and critic as they were."
            ) from error


def value_loss(new: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """Per token ½ (V - R)², or with `clip` the larger of that and the same with V moved at most `clip` from the old value.

    As PPO's original implementation has it (openai/baselines, ppo2); all float32 [N].
    """
    loss = (new - returns) ** 2
    if clip is not None:
        bounded = old + (new - old).clamp(-clip, clip)
        loss = torch.maximum(loss, (bounded - returns) ** 2)
    return 0.5 * loss
