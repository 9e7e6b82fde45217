"""Training of all weights in which each learner holds a shard of them, with its masters, gradients and moments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor

from rl_vlm.learning.policy_model import PolicyModel
from rl_vlm.learning.sharded import shard_layers
from rl_vlm.learning.strategies import AllReduce
from rl_vlm.learning.training import FullTraining
from rl_vlm.models.modules import text_model
from rl_vlm.models.shared_memory import VersionRoom
from rl_vlm.models.tensor_bytes import take_part_in_packing
from rl_vlm.models.weights import FullPayload, WeightPayload


class ShardedTraining(FullTraining):
    """As `FullTraining`, with the decoder's layers divided among all learners by FSDP2.

    A learner holds a shard of their float32 weights, which are their own masters: FSDP2 gathers a layer rounded to the
    model's type, and adds the gradients of all learners in float32. `parameters` holds the shards as plain tensors, so
    that the optimiser is the same as that of one process. Vision tower, embedding and head stay whole, as in `FSDP2`.
    """

    def __init__(
        self,
        model: nn.Module,
        base: str,
        reload: Callable[[], dict[str, Tensor]],
        keep_base: bool,
        device: str,
        offload: bool,
    ) -> None:
        model.requires_grad_(True)
        names = [name for name, _ in model.named_parameters()]  # FSDP2 changes their order
        dtype = next(text_model(model).layers.parameters()).dtype
        precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        shard_layers(model, device, offload, set(), precision)
        for layer in text_model(model).layers:
            # Weights of losses are normalised over all learners: gradients are added, not averaged.
            layer.set_gradient_divide_factor(1.0)
            layer.set_force_sum_reduction_for_comms(True)
        super().__init__(model, base, reload, keep_base)
        self.shards: dict[nn.Parameter, DTensor] = {}  # by the plain tensor that the optimiser steps
        self._masters = {name: self._masters[name] for name in names}
        self.parameters = [self._plain(master) for master in self._masters.values()]

    def _plain(self, master: nn.Parameter) -> nn.Parameter:
        if not isinstance(master, DTensor):
            return master
        shard = nn.Parameter(master.to_local().detach())
        self.shards[shard] = master
        return shard

    def payload(
        self, version: int, weights: Mapping[str, Tensor], dtype: str | None = None, room: VersionRoom | None = None
    ) -> WeightPayload:
        """All learners call this together, and the first one's holds the tensors."""
        if torch.distributed.get_rank() == 0:
            return super().payload(version, weights, dtype, room)
        take_part_in_packing(weights, dtype)
        return FullPayload(version, b"", "", "")

    def _put(self, master: Tensor, value: Tensor) -> None:
        master.copy_(share_of(value, master) if isinstance(master, DTensor) else value)

    def _swap(self, own: Tensor, value: Tensor) -> Tensor:
        if not isinstance(own, DTensor):
            return super()._swap(own, value)
        before = own.detach().clone()
        own.copy_(share_of(value, own))  # in place, where FSDP2 gathers from
        return before

    def collect_gradients(self) -> None:
        """Give the optimiser's tensors their gradients."""
        for shard, master in self.shards.items():
            shard.data = master.to_local().detach()  # which FSDP2 moves before the first pass
            shard.grad = None if master.grad is None else master.grad.to_local()  # type: ignore[attr-defined]
            master.grad = None


def share_of(tensor: Tensor, like: DTensor) -> DTensor:
    """What this process holds of a whole tensor that is divided as `like`."""
    if isinstance(tensor, DTensor):
        return tensor
    return distribute_tensor(tensor.to(like.dtype), like.device_mesh, like.placements, src_data_rank=None)


class FullFSDP2(AllReduce):
    """The step of a `ShardedTraining`: an optimiser of its shards, and of what is whole in every learner."""

    def __init__(self, policy: PolicyModel, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(policy, optimizer)
        assert isinstance(policy.trained, ShardedTraining)
        self._trained = policy.trained

    def _sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        self._trained.collect_gradients()
        super()._sum_gradients([one for one in parameters if one not in self._trained.shards])

    def _clip(self, parameters: Sequence[nn.Parameter], max_grad_norm: float) -> float:
        shards = [one.grad for one in parameters if one in self._trained.shards and one.grad is not None]
        others = [one.grad for one in parameters if one not in self._trained.shards and one.grad is not None]
        squared = torch.nn.utils.get_total_norm(shards).to(self._policy.backbone.device) ** 2
        torch.distributed.all_reduce(squared)
        norm = (squared + torch.nn.utils.get_total_norm(others).to(squared.device) ** 2).sqrt()
        torch.nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
        return float(norm)

    def state(self) -> dict[str, Tensor]:
        """All learners call this together, and the first one's is complete."""
        first, found = torch.distributed.get_rank() == 0, {}
        for name, tensor in super().state().items():
            if (master := self._master(name, tensor)) is not None:
                shape, stride = master.shape, master.stride()
                shard = tensor.to(master.device_mesh.device_type)
                tensor = DTensor.from_local(
                    shard, master.device_mesh, master.placements, shape=shape, stride=stride
                ).full_tensor()
            if first:
                found[name] = tensor.cpu()
        return found

    def restore(self, state: Mapping[str, Tensor]) -> None:
        own = dict(state)
        for name, tensor in state.items():
            if (master := self._master(name, tensor)) is not None:
                own[name] = share_of(tensor, master).to_local()
        super().restore(own)

    def _master(self, name: str, tensor: Tensor) -> DTensor | None:
        """What a tensor of the optimiser's state (`exp_avg.3`) is divided as; None: it is whole."""
        number = int(name.rpartition(".")[2])
        parameters = self._trained.parameters  # a critic's come behind them
        return self._trained.shards.get(parameters[number]) if tensor.dim() and number < len(parameters) else None
