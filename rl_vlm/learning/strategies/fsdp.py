"""FSDP2: each learner holds a shard of the decoder's frozen layers, and a layer is whole only while it computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from rl_vlm.learning.strategies.replicated import AllReduce

if TYPE_CHECKING:
    from rl_vlm.learning.policy_model import PolicyModel  # with peft and all of transformers, for env runners too


class FSDP2(AllReduce):
    """`torch.distributed.fsdp.fully_shard` over the layers of the language model.

    What is trained (LoRA, a critic) is whole in every learner, in float32 beside frozen weights of any type, and its gradients
    are added once per step. So is what a pass may leave out, because a learner that gathers alone would wait for ever: the
    vision tower (images are cached) and the embedding with the head (tied in small models; the head is read tile by tile).

    Args:
        offload: keep the shards in host memory.
    """

    def __init__(self, offload: bool = False) -> None:
        self._offload = offload

    def prepare(self, policy: PolicyModel, optimizer: torch.optim.Optimizer) -> None:
        """See Strategy."""
        super().prepare(policy, optimizer)
        decoder = policy.model.model.language_model
        device = policy.backbone.device.type
        mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
        offload = CPUOffloadPolicy(pin_memory=device == "cuda") if self._offload else OffloadPolicy()
        whole = {parameter for parameter in policy.model.parameters() if parameter.requires_grad}
        for layer in decoder.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=whole, offload_policy=offload)
        # The root owns no parameter; it lets the layers share streams and gather ahead of each other.
        whole.update(parameter for parameter in decoder.parameters() if not _is_shard(parameter))
        fully_shard(decoder, mesh=mesh, ignored_params=whole)


def _is_shard(parameter: torch.nn.Parameter) -> bool:
    return isinstance(parameter, torch.distributed.tensor.DTensor)
