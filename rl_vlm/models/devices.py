"""What a process computes on: its device, the precision of its matrix products, and which library computes them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rl_vlm.config import CommonConfig
from rl_vlm.models.memory.needs import driver_gpu, learner_fraction


def choose_precision(dtype: str, device: str) -> None:
    """On a GPU let matrices in float32 be multiplied in TF32, unless the model itself is in float32 (`dtype`).

    These are LoRA's, which vLLM rounds to bfloat16, of fewer digits than TF32, and a critic's head. Learner and engine
    call this, so that both round alike.
    """
    if device.startswith("cuda"):
        # In both cases: an earlier model of this process may have been of the other kind.
        torch.set_float32_matmul_precision("highest" if dtype == "float32" else "high")


def choose_order(device: str) -> None:
    """On a GPU let torch take kernels that add up in one order, so that bytes repeat, or raise."""
    if device.startswith("cuda"):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
        torch.use_deterministic_algorithms(True)
        # Else a pass over memory that is written anyway.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


# Matrix products: float32 on a CPU by the faster library, and operands of 16 bits with float32 sums.

# torch's default library, MKL, uses no AVX-512 on AMD's processors. oneDNN does, and takes about half the time there.
USE_ONEDNN = (
    torch.backends.mkldnn.is_available()
    and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    and "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
)
_SMALL = 2**23  # multiplications below which torch's product is used: a call of oneDNN takes 10 to 15 µs to start


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] · weight [out, in]ᵀ + bias [out]: [..., out], of any type and device."""
    # The size first, because a decoding step calls dozens of small layers. torch.compile cannot trace oneDNN's product.
    is_plain = x.numel() * weight.shape[0] < _SMALL or not USE_ONEDNN or torch.compiler.is_compiling()
    if is_plain or not (_is_float32_on_cpu(x) and _is_float32_on_cpu(weight)):
        return functional.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        return _onednn(x, weight, bias)
    # The view outside the function: autograd forbids changing a view that a function returns in place.
    return _Linear.apply(x.reshape(-1, weight.shape[1]), weight, bias).view(*x.shape[:-1], weight.shape[0])  # type: ignore[no-any-return]


def _is_float32_on_cpu(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu"


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


class _Linear(torch.autograd.Function):
    """oneDNN's product, which torch cannot differentiate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        return _onednn(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x = linear(gradient, weight.t()) if ctx.needs_input_grad[0] else None
        of_weight = linear(gradient.t(), x.t()) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, gradient.sum(0) if ctx.needs_input_grad[2] else None


class FastLinear(nn.Linear):
    """`nn.Linear` by `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def use_fast_products(model: nn.Module, smallest: int = 0) -> None:
    """Let the frozen float32 linear layers of a model on a CPU, of `smallest` weights or more, compute by `linear`."""
    for module in model.modules() if USE_ONEDNN else ():
        # Only torch's own layer: a subclass may compute something else.
        if type(module) is not nn.Linear or module.weight.requires_grad or module.weight.numel() < smallest:
            continue
        if _is_float32_on_cpu(module.weight):
            module.__class__ = FastLinear


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [N, in] · weightᵀ [in, out] as float32, of operands of 16 bits; with a gradient."""
    return _WideProduct.apply(x, weight) if x.is_cuda else functional.linear(x.float(), weight.float())


class _WideProduct(torch.autograd.Function):
    """Sums in float32 without a float32 copy of the weight, which cuBLAS can and autograd cannot differentiate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight.t(), out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rounded = gradient.to(weight.dtype)
        of_x = rounded @ weight if ctx.needs_input_grad[0] else None
        return of_x, rounded.t() @ x if ctx.needs_input_grad[1] else None


# Where a learner computes, and how much of a GPU that others use too it may take.


def learner_device(config: CommonConfig) -> str:
    """The device of a learner in this process: Ray shows an actor its own GPU alone, and a driver all of them."""
    device = driver_device(config)
    return "cuda" if config.learner.num_learners and device != "cpu" else device


def driver_device(config: CommonConfig) -> str:
    """The device of what computes in the driver: the learners' first GPU, where they have one."""
    if config.learner.gpus_per_learner <= 0 or not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{min(driver_gpu(config), torch.cuda.device_count() - 1)}"


def give_back(config: CommonConfig) -> None:
    """Free what torch keeps for later updates, where a replica takes turns with this learner."""
    if config.serving.vllm.rest_while_learning and learner_device(config) != "cpu":
        torch.cuda.empty_cache()


def limit_memory(config: CommonConfig, device: str) -> None:
    """Keep torch in this process to the learner's share of a GPU that a replica uses too: an allocation beyond it fails
    here, with a sentence, instead of in the replica."""
    if not device.startswith("cuda"):
        return
    index = torch.device(device).index
    number = torch.cuda.current_device() if index is None else index  # torch wants one here
    fraction = learner_fraction(config, torch.cuda.get_device_properties(number).total_memory)
    if fraction is not None:
        torch.cuda.set_per_process_memory_fraction(fraction, number)
