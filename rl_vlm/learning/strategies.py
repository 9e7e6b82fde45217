"""How the learners of a group share one optimiser step: compute, add up and apply gradients, and store the optimiser's
state."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from rl_vlm.config import LearnerSection
from rl_vlm.learning.policy_model import PolicyModel
from rl_vlm.models.weights import WeightPayload
from rl_vlm.types import UserInputError

POLICY_GROUP, CRITIC_GROUP = 0, 1  # of the optimiser's parameter groups
_BUCKET = 50_000_000  # elements that are added at once


class Strategy:
    """How one learner makes an optimiser step of a policy: `backward` for each micro-batch, then `step`.

    Several learners derive theirs from it.
    """

    def __init__(self, policy: PolicyModel, optimizer: torch.optim.Optimizer) -> None:
        self._policy, self._optimizer = policy, optimizer
        optimizer.zero_grad(set_to_none=True)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of one micro-batch; loss weights are already normalised over all learners."""
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, max_grad_norm: float, groups: Sequence[int] | None = None) -> float | None:
        """Clip each of the optimiser's parameter groups to the norm, step them (None: all), forget the gradients.

        Returns the norm of the first one before clipping; None: not finite, not stepped.
        """
        every = [group["params"] for group in self._optimizer.param_groups]
        stepped = every if groups is None else [every[k] for k in groups]
        self._sum_gradients([parameter for parameters in stepped for parameter in parameters])
        # Each group by itself: large gradients of a critic must not shrink the policy's.
        norms = [float(torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)) for parameters in stepped]
        finite = all(map(math.isfinite, norms))
        if finite:
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if not finite:
            return None
        return norms[0] if groups is None or POLICY_GROUP in groups else 0.0

    def _sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """One process has nothing to add."""

    def state(self) -> dict[str, Tensor]:
        """The optimiser's state as CPU tensors by name (`exp_avg.3`), the same whatever the number of learners."""
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

    def gather_adapter(self, version: int, dtype: str | None = None) -> WeightPayload:
        """The adapter as it is, or rounded to `dtype`, as an immutable version."""
        return self._policy.payload(version, dtype=dtype)


class AllReduce(Strategy):
    """One sum of the gradients over all learners per step.

    The loss weights are normalised over all learners already, so this equals one process, whatever the number of
    micro-batches of each learner; learners without a micro-batch take part with zeros. What has a gradient in none of
    them, such as a vision tower in a step without images, has none here either: the optimiser would move it by its
    momentum and decay it.
    """

    def _sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        holders = torch.tensor([int(one.grad is not None) for one in parameters], device=parameters[0].device)
        torch.distributed.all_reduce(holders)
        held = [parameter for parameter, count in zip(parameters, holders.tolist(), strict=True) if count]
        for parameter in held:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for bucket in _buckets(held):
            gradients = [parameter.grad for parameter in bucket if parameter.grad is not None]
            vector = parameters_to_vector(gradients)
            torch.distributed.all_reduce(vector)
            vector_to_parameters(vector, gradients)


def _buckets(parameters: Sequence[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    """In their order, each of bounded size: all gradients of a whole model as one vector would be a second copy of
    them."""
    bucket: list[torch.nn.Parameter] = []
    for parameter in parameters:
        if bucket and sum(one.numel() for one in bucket) + parameter.numel() > _BUCKET:
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket


def make_strategy(learner: LearnerSection, policy: PolicyModel, optimizer: torch.optim.Optimizer) -> Strategy:
    """The strategy of a learner group, before the first step; the larger ones are imported where they are used."""
    if learner.strategy == "fsdp2":
        from rl_vlm.learning.sharded import FSDP2

        return FSDP2(policy, optimizer, learner)
    if learner.zero_stage:
        from rl_vlm.learning.sharded import Zero

        return Zero(policy, optimizer, learner)
    name = learner.strategy or ("all_reduce" if learner.num_learners > 1 else "single")
    return (AllReduce if name == "all_reduce" else Strategy)(policy, optimizer)
