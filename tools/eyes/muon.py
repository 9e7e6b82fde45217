"""Muon for the matrices within layers, AdamW for the other weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_QUINTIC = (3.4445, -4.7750, 2.0315)  # coefficients of Jordan et al., "Muon" (2024)
_STEPS = 5
DECAY = 0.02


class Muon(torch.optim.Optimizer):
    """Momentum whose singular values are all set to about one, scaled to the size of an AdamW step."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            rate, momentum = group["lr"], group["momentum"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                mean = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                mean.lerp_(weight.grad, 1 - momentum)
                update = orthogonal(weight.grad.lerp(mean, momentum))
                weight.mul_(1 - rate * DECAY).add_(update, alpha=-rate * 0.2 * max(weight.shape) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """The matrix with singular values near one, by Newton-Schulz steps."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix).bfloat16()  # as its authors do
    x = x / (x.norm() + 1e-7)
    a, b, c = _QUINTIC
    for _ in range(_STEPS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return (x.T if tall else x).float()


class Optimizer:
    def __init__(self, model: Any, rate: float) -> None:
        named = dict(model.named_parameters())
        inner = [
            name for name, weight in named.items() if weight.ndim == 2 and ("layers." in name or "blocks." in name)
        ]
        rest = [weight for name, weight in named.items() if name not in inner]
        groups = [
            {"params": [weight for weight in rest if weight.ndim > 1], "weight_decay": DECAY},
            {"params": [weight for weight in rest if weight.ndim <= 1], "weight_decay": 0.0},
        ]
        self._parts = (
            torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=True),
            Muon([named[name] for name in sorted(inner)], rate),
        )

    def step(self, rate: float) -> None:
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        return [part.state_dict() for part in self._parts]

    def load_state_dict(self, saved: list[dict[str, Any]]) -> None:
        for part, state in zip(self._parts, saved, strict=True):
            part.load_state_dict(state)
