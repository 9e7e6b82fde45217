"""The critic of PPO: values of states, and their loss."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from rl_vlm.config import CriticSection
from rl_vlm.learning.returns import Rescaling
from rl_vlm.models.lora import ExtraLora
from rl_vlm.types import UserInputError

HEAD = "head."  # names of the head's tensors, among those of the critic's adapter


class Critic:
    """A value head on hidden states [N, width] of the policy (`kind: head`) or of a second LoRA `adapter`.

    Values are of normalised returns. The head's last layer starts at zero: every state is worth the mean return.
    """

    def __init__(self, model: nn.Module, section: CriticSection, width: int, adapter: ExtraLora | None = None) -> None:
        self.loss_coef, self.clip = section.loss_coef, section.clip
        device = next(model.parameters()).device
        self.last = nn.Linear(section.hidden or width, 1, device=device)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)
        before = [nn.Linear(width, section.hidden, device=device), nn.GELU()] if section.hidden else []
        self.head = nn.Sequential(*before, self.last)
        self._adapter = adapter

    @property
    def shares_policy(self) -> bool:
        """Whether one forward pass serves both."""
        return self._adapter is None

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [*(self._adapter.parameters.values() if self._adapter else ()), *self.head.parameters()]

    def active(self) -> AbstractContextManager[None]:
        """Inside, the model computes with the critic's adapter where it has one."""
        return self._adapter.active() if self._adapter else nullcontext()

    def values(self, hidden: Tensor) -> Tensor:
        """float32 [N] of hidden states [N, D]."""
        return self.head(hidden.float())[:, 0]  # type: ignore[no-any-return]

    @torch.no_grad()
    def rescale(self, change: Rescaling) -> None:
        """Change the normalisation and keep every value as it is in returns (PopArt, arXiv 1602.07714, equation 5)."""
        self.last.weight *= change.factor
        self.last.bias.copy_(self.last.bias * change.factor + change.shift)

    def _tensors(self) -> dict[str, Tensor]:
        head: dict[str, Tensor] = {HEAD + name: tensor for name, tensor in self.head.state_dict().items()}
        return head | (self._adapter.parameters if self._adapter else {})

    def state(self) -> dict[str, Tensor]:
        """All tensors by name, on the CPU."""
        return {name: tensor.detach().cpu().clone() for name, tensor in self._tensors().items()}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state` returned. Raises UserInputError for tensors of another critic."""
        try:
            for name, tensor in self._tensors().items():
                tensor.copy_(state[name])
        except (KeyError, RuntimeError) as error:
            raise UserInputError(
                f"The checkpoint has no critic of this kind ({error}): keep algorithm.name and critic as they were."
            ) from error


def value_loss(new: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """½ (V - R)², or with `clip` the larger of that and the same with V at most `clip` from the old value: float32 [N].

    As in PPO's original implementation (openai/baselines, ppo2).
    """
    loss = (new - returns) ** 2
    if clip is not None:
        bounded = old + (new - old).clamp(-clip, clip)
        loss = torch.maximum(loss, (bounded - returns) ** 2)
    return 0.5 * loss
