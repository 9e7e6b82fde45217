"""Adam's step (arXiv 1412.6980) of one tensor, of which torch.optim.Adam holds the moments."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam

_EPSILON = 1e-8


class Moments(NamedTuple):
    """Running means of gradient and square, as the weights, and the number of steps, a float32 scalar."""

    mean: Tensor
    square: Tensor
    steps: Tensor


def moments_of(optimizer: torch.optim.Adam) -> Moments:
    """Those of an optimiser of one parameter: zeros where it has made no step."""
    (parameter,) = optimizer.param_groups[0]["params"]
    state = optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros((), device=parameter.device)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter.data), torch.zeros_like(parameter.data)
    return Moments(state["exp_avg"], state["exp_avg_sq"], state["step"])


def adam_step(parameter: Tensor, gradient: Tensor, moments: Moments, lr: float, betas: tuple[float, float]) -> None:
    """Change `parameter` and `moments` in place.

    Adam.step does the same and takes twice the time of its kernel for a small network. What is compiled cannot call that kernel.
    """
    mean, square, steps = moments
    first, second = betas
    if torch.compiler.is_compiling():
        steps.add_(1)
        mean.lerp_(gradient, 1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        rate, scale = lr / (1 - first**steps), 1 - second**steps
        parameter.sub_(rate * mean / ((square / scale).sqrt() + _EPSILON))
        return
    adam(
        [parameter], [gradient], [mean], [square], [], [steps], fused=True, amsgrad=False, beta1=first, beta2=second, lr=lr,
        weight_decay=0.0, eps=_EPSILON, maximize=False,
    )  # fmt: skip
