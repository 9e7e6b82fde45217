"""How the learners of a group share an optimiser step, and the optimiser's state by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from rl_vlm.batches import in_batches
from rl_vlm.learning.policy_model import PolicyModel
from rl_vlm.types import UserInputError

POLICY_GROUP, CRITIC_GROUP = 0, 1  # of the optimiser's parameter groups
BUCKET = 50_000_000  # elements of gradients that are sent at once; DeepSpeed allocates as many


class Strategy:
    """An optimiser step of a single learner: `backward` for each micro-batch, then `step`."""

    def __init__(self, policy: PolicyModel, optimizer: torch.optim.Optimizer) -> None:
        self._policy, self._optimizer = policy, optimizer
        optimizer.zero_grad(set_to_none=True)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of one micro-batch, whose loss weights are normalised over all learners."""
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, max_grad_norm: float, groups: Sequence[int] | None = None) -> float | None:
        """Clip each parameter group (None: all) to the norm, step them, forget the gradients.

        Returns the policy's norm before clipping (0 for a step of the critic alone); None: not finite, not stepped.
        """
        every = [group["params"] for group in self._optimizer.param_groups]
        stepped = every if groups is None else [every[k] for k in groups]
        self._sum_gradients([parameter for parameters in stepped for parameter in parameters])
        # Each group by itself: large gradients of a critic must not shrink the policy's.
        norms = [self._clip(parameters, max_grad_norm) for parameters in stepped]
        finite = all(map(math.isfinite, norms))
        if finite:
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if not finite:
            return None
        return norms[0] if groups is None or POLICY_GROUP in groups else 0.0

    def _sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Replace gradients by their sum over all learners; one learner has nothing to add."""

    def _clip(self, parameters: Sequence[torch.nn.Parameter], max_grad_norm: float) -> float:
        """Scale gradients down to that norm; returns the norm before."""
        return float(torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm))

    def state(self) -> dict[str, Tensor]:
        """The optimiser's state as CPU tensors by name (`exp_avg.3`), whatever the number of learners."""
        state = self._optimizer.state_dict()["state"]
        return {f"{name}.{k}": tensor.cpu() for k, fields in state.items() for name, tensor in fields.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state` returned, also for another number of learners."""
        fields: dict[int, dict[str, Any]] = {}
        for name, tensor in state.items():
            kind, _, number = name.rpartition(".")
            fields.setdefault(int(number), {})[kind] = tensor
        kinds = {kind for tensors in fields.values() for kind in tensors}
        if kinds and ("exp_avg" in kinds) == isinstance(self._optimizer, torch.optim.Adafactor):
            raise UserInputError("The checkpoint was written with another optimiser: keep learner.optimizer as it was.")
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": fields, "param_groups": groups})


class AllReduce(Strategy):
    """One sum of the gradients over all learners per step, which equals the step of one process.

    Learners without a micro-batch take part with zeros. A parameter that has a gradient in no learner, such as a vision
    tower's in a step without images, gets none: the optimiser would move it by its momentum and decay it.
    """

    def _sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        holders = torch.tensor([int(one.grad is not None) for one in parameters], device=parameters[0].device)
        torch.distributed.all_reduce(holders)
        held = [parameter for parameter, count in zip(parameters, holders.tolist(), strict=True) if count]
        for parameter in held:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        # All gradients of a model as one vector would be a second copy of them.
        for bucket in in_batches(held, lambda few, one: sum(each.numel() for each in few) + one.numel() <= BUCKET):
            gradients = [parameter.grad for parameter in bucket if parameter.grad is not None]
            vector = parameters_to_vector(gradients)
            torch.distributed.all_reduce(vector)
            vector_to_parameters(vector, gradients)


def missing_passes(counts: Sequence[int], device: torch.device) -> list[int]:
    """How many micro-batches this learner has fewer than any, by optimiser step. All learners call this together."""
    own = torch.tensor(counts, dtype=torch.int64, device=device)
    most: Tensor = own.clone()
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    return (most - own).tolist()  # type: ignore[no-any-return]
