"""Products and attention for models of all families, where torch's own way costs more time or memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

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


def lora_sum(out: Tensor, x: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """out + scale · x · Aᵀ · Bᵀ (LoRA, arXiv 2106.09685, equation 3), in the type of x: out [..., out], x [..., in],
    A [r, in], B [out, r]. Learner and engine compute the same bits."""
    return _LoraSum.apply(out.flatten(0, -2), x.flatten(0, -2), down, up, scale).view(out.shape)  # type: ignore[no-any-return]


class _LoraSum(torch.autograd.Function):
    """Without a float32 copy of its input and of its output, whose passes over memory took longer than the products.

    The gradients of A and B are summed in float32.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, x: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
        inner = x @ down.to(x.dtype).t()
        ctx.save_for_backward(x, down, up, inner)
        ctx.scale = scale
        return torch.addmm(out, inner, up.to(x.dtype).t(), alpha=scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, down, up, inner = ctx.saved_tensors
        of_inner = (gradient @ up.to(x.dtype)) * ctx.scale
        of_x = of_inner @ down.to(x.dtype) if ctx.needs_input_grad[1] else None
        of_down = wide_product(of_inner.t(), x.t()) if ctx.needs_input_grad[2] else None
        of_up = wide_product(gradient.t(), inner.t()) * ctx.scale if ctx.needs_input_grad[3] else None
        return gradient, of_x, of_down, of_up, None


def rms_norm(module: Any, x: Tensor) -> Tensor:
    """What transformers' module computes in six passes over x [..., width], in one."""
    return functional.rms_norm(x, (x.shape[-1],), module.weight, module.variance_epsilon)
