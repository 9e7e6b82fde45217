"""Strategies in which each learner holds a shard of the model or of the optimiser's state."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rl_vlm.config import LearnerSection
from rl_vlm.learning.policy_model import PolicyModel
from rl_vlm.learning.strategies import BUCKET, AllReduce, Strategy
from rl_vlm.models.modules import text_model


class FSDP2(AllReduce):
    """`torch.distributed.fsdp.fully_shard` over the layers of the language model.

    What is trained (LoRA, a critic) is whole in every learner, and its gradients are added once per step. Whole, too,
    is what some passes leave out, because a learner that gathers alone would wait for ever: the vision tower (images
    are cached) and the embedding with the head (which is read tile by tile).
    """

    def __init__(self, policy: PolicyModel, optimizer: torch.optim.Optimizer, learner: LearnerSection) -> None:
        super().__init__(policy, optimizer)
        whole = {parameter for parameter in policy.model.parameters() if parameter.requires_grad}
        shard_layers(policy.model, policy.backbone.device.type, learner.offload_params, whole)


def shard_layers(
    model: nn.Module,
    device: str,
    offload: bool,
    whole: set[nn.Parameter],
    precision: MixedPrecisionPolicy | None = None,
) -> None:
    """Divide the decoder's layers among all learners, without the parameters that stay `whole`."""
    decoder, mesh = text_model(model), init_device_mesh(device, (torch.distributed.get_world_size(),))
    settings: dict[str, Any] = {"mesh": mesh, "mp_policy": precision or MixedPrecisionPolicy()}
    settings["offload_policy"] = CPUOffloadPolicy(pin_memory=device == "cuda") if offload else OffloadPolicy()
    for layer in decoder.layers:
        if precision is not None:
            layer.float()
        fully_shard(layer, reshard_after_forward=True, ignored_params=whole, **settings)
    # The root owns no parameter; it lets the layers share streams and gather ahead of each other.
    whole.update(parameter for parameter in decoder.parameters() if not isinstance(parameter, DTensor))
    fully_shard(decoder, mesh=mesh, ignored_params=whole)


_MOMENTS = ("exp_avg", "exp_avg_sq")


class Zero(Strategy):
    """DeepSpeed's ZeRO of stage 1, 2 or 3.

    One engine trains the LoRA weights, which stay whole, in float32. At stage 3 another one, without an optimiser,
    holds the frozen layers of the language model; vision tower, embedding and head stay whole as in FSDP2.
    """

    def __init__(self, policy: PolicyModel, optimizer: torch.optim.Optimizer, learner: LearnerSection) -> None:
        device = policy.backbone.device.type
        self._policy, self._optimizer, self._parameters = policy, optimizer, list(policy.parameters)
        offload = {"device": "cpu", "pin_memory": device == "cuda"}
        bucket = min(sum(parameter.numel() for parameter in self._parameters), BUCKET)
        zero: dict[str, Any] = {"stage": min(learner.zero_stage, 2), "overlap_comm": False}
        zero |= {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
        if learner.offload_optimizer:
            zero["offload_optimizer"] = offload
        # torch's AdamW everywhere: DeepSpeed's own are compiled on first use, which needs nvcc.
        trained = {
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            # Weights of losses are normalised over all learners, and each decides when its step is.
            "gradient_allreduce_op": "sum",
            "managed_gradient_accumulation": False,
            "gradient_clipping": 1.0,  # see step
        }
        self._engine = _initialize(device, nn.ParameterList(self._parameters), optimizer, trained)
        self._frozen: Any = None
        if learner.zero_stage == 3:
            decoder = text_model(policy.model)
            # Its layers are in host memory until they are sharded.
            settings = _layers_config(decoder, offload if learner.offload_params else None, on_gpu=device == "cuda")
            with _without(decoder, self._parameters):
                self._frozen = _initialize(device, decoder, None, settings)

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss)
        if self._frozen is not None:
            # Layers whose input has no gradient, such as the first one's, are not released by the backward pass.
            self._frozen.optimizer.release_backward_leftovers()

    def step(self, max_grad_norm: float, groups: Sequence[int] | None = None) -> float | None:
        self._engine.optimizer.clip_grad = max_grad_norm
        self._engine.step()
        norm = float(self._engine.get_global_grad_norm())
        return norm if self._engine.was_step_applied() and math.isfinite(norm) else None

    def state(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_optimizer_state

        steps = [fields["step"] for fields in self._optimizer.state.values()]
        if not steps:
            return {}
        found: dict[str, Tensor] = {}
        for k, parameter in enumerate(self._parameters):
            found[f"step.{k}"] = steps[0].detach().cpu().clone()
            for name in _MOMENTS:
                whole = safe_get_full_optimizer_state(parameter, name)
                found[f"{name}.{k}"] = whole.detach().cpu().clone()
        return found

    def restore(self, state: Mapping[str, Tensor]) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        sharded = self._engine.optimizer
        sharded.refresh_fp32_params()  # the adapter was loaded before
        if not state:
            self._optimizer.state.clear()
            sharded._hp_optimizer_states_linked = False
            return
        for group in self._optimizer.param_groups:
            for shard in group["params"]:
                fields = self._optimizer.state[shard]
                for name in _MOMENTS:
                    fields.setdefault(name, torch.zeros_like(shard))
                fields["step"] = state["step.0"].to(shard.device, copy=True)
        sharded._lazy_init_hp_params_optimizer_state()
        for k, parameter in enumerate(self._parameters):
            for name in _MOMENTS:
                safe_set_full_optimizer_state(parameter, state[f"{name}.{k}"].to(parameter.device), name)


def _initialize(
    device: str, module: nn.Module, optimizer: torch.optim.Optimizer | None, settings: dict[str, Any]
) -> Any:
    """A DeepSpeed engine of a module on that kind of device; without an optimiser its weights are sharded."""
    os.environ["DS_ACCELERATOR"] = device
    os.environ["LOCAL_RANK"] = "0"  # Ray shows a learner its own GPU alone
    import deepspeed
    from deepspeed.utils import logger

    # Compiled on first use, behind a lock that a killed process leaves closed. torch.distributed does the same.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logger.setLevel(logging.WARNING)
    batch = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "steps_per_print": None}
    config = {**batch, **settings}
    if optimizer is None:  # weight by weight; the engine would bring the whole module to the device before
        deepspeed.zero.Init(module=module, config_dict_or_path=config)
    return deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]


def _layers_config(decoder: Any, offload: dict[str, Any] | None, on_gpu: bool) -> dict[str, Any]:
    """Settings of the engine of the frozen layers, of which two are whole at a time, and vectors always."""
    parameters = list(decoder.layers.parameters())
    layer = sum(parameter.numel() for parameter in decoder.layers[0].parameters())
    zero: dict[str, Any] = {
        "stage": 3,
        "overlap_comm": on_gpu,
        "stage3_param_persistence_threshold": max(p.numel() for p in parameters if p.dim() == 1),
        "stage3_prefetch_bucket_size": layer,
        "stage3_max_live_parameters": 2 * layer,
        "stage3_max_reuse_distance": 0,
    }
    if offload is not None:
        zero["offload_param"] = offload
    return {"zero_optimization": zero, "bf16": {"enabled": parameters[0].dtype == torch.bfloat16}}


@contextmanager
def _without(decoder: nn.Module, trained: Sequence[nn.Parameter]) -> Iterator[None]:
    """Inside, the decoder has no modules with trained parameters, and beside its layers none with any."""
    mine = {id(parameter) for parameter in trained}
    removed: list[tuple[nn.Module, dict[str, nn.Module | None]]] = []
    for module in decoder.modules():
        kept = dict(module._modules)
        for name, child in kept.items():
            parameters = [] if child is None else list(child.parameters())
            outside = module is decoder and name != "layers"
            if parameters and (outside or all(id(parameter) in mine for parameter in parameters)):
                del module._modules[name]
        if len(module._modules) < len(kept):
            removed.append((module, kept))
    try:
        yield
    finally:
        for module, kept in removed:
            module._modules.clear()
            module._modules.update(kept)
