"""The matrix product of a CPU: torch's own (MKL) or oneDNN's, whichever this machine computes faster.

On AMD processors with AVX-512, MKL uses AVX2 only. The choice is measured once and kept in the cache folder, so that every
process of a machine, and a run that is resumed on it, rounds in the same way.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from rl_vlm.files import cache_folder, locked, write_atomic
from rl_vlm.types import UserInputError

ProductName: TypeAlias = Literal["torch", "onednn"]
Use: TypeAlias = Literal["layers", "updates"]
# (x [..., in], weight [out, in], bias [out] or None) to [..., out]; without a gradient.
Product: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Products(Protocol):
    """x [n, B, in], weight [n, out, in], bias [n, 1, out] or None to [n, B, out], in `out` where that is given."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """n products at once, without a gradient."""
        ...


_SIZES = ((512, 256, 2048), (512, 2048, 256), (1024, 512, 512))  # rows, in, out
_ROUNDS = 12
_MARGIN = 0.95  # the other product must take less than this share of the time of torch's
# Multiplications below which torch's product is used in any case: oneDNN's takes 10 to 15 µs to start.
_SMALL = 2**23

# oneDNN, and torch's binding of it, keep what they prepared for a shape: by default for 1,024 shapes each, up to a MiB apiece. Packed
# micro-batches have shapes of their own, so that learners grew by hundreds of MiB for nothing; layers of one pass have these few. Both
# look when they are first used. The third variable names those that are ours, for an engine that is better off with the defaults.
_CAPACITIES, _OURS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"), "RL_VLM_CAPACITIES"
if _unset := [name for name in _CAPACITIES if name not in os.environ]:
    os.environ.update(dict.fromkeys(_unset, "16"), **{_OURS: ",".join(_unset)})

log = logging.getLogger(__name__)


def default_capacities() -> dict[str, str]:
    """Variables that give a child process the libraries' own capacities again, but for those that the user has set."""
    return {name: "1024" for name in os.environ.get(_OURS, "").split(",") if name}


def torch_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x · weightᵀ + bias by torch, of any type and device."""
    return functional.linear(x, weight, bias)


def onednn_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x · weightᵀ + bias by oneDNN, or by torch where that is little: float32 on a CPU, without a gradient."""
    if x.numel() * weight.shape[0] < _SMALL:
        return functional.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


def torch_products(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """`Products` by torch, of any type and device, with a gradient where there is no `out`."""
    transposed = weight.transpose(1, 2)
    return torch.bmm(x, transposed, out=out) if bias is None else torch.baddbmm(bias, x, transposed, out=out)


def onednn_products(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """`Products` by oneDNN, or by torch where they are small: float32 on a CPU."""
    if x[0].numel() * weight.shape[1] < _SMALL:
        return torch_products(x, weight, bias, out)
    biases = [None] * len(x) if bias is None else bias[:, 0]
    found = [onednn_product(*operands) for operands in zip(x, weight, biases, strict=True)]
    return torch.stack(found, out=out)


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [N, in] · weightᵀ [in, out] as float32, of operands of 16 bits; with a gradient."""
    if x.is_cuda:
        return _WideProduct.apply(x, weight)  # type: ignore[no-any-return]
    return functional.linear(x.float(), weight.float())


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
        return (
            rounded @ weight if ctx.needs_input_grad[0] else None,
            rounded.t() @ x if ctx.needs_input_grad[1] else None,
        )


_PRODUCTS: dict[ProductName, Product] = {"torch": torch_product, "onednn": onednn_product}
_BATCHED: dict[ProductName, Products] = {"torch": torch_products, "onednn": onednn_products}


def product_of(name: ProductName, weight: Tensor) -> Product:
    """The named product where it can multiply with `weight`, else torch's."""
    return _PRODUCTS[name] if weight.device.type == "cpu" and weight.dtype == torch.float32 else torch_product


def products_of(name: ProductName) -> Products:
    """The named product of several matrices at once."""
    return _BATCHED[name]


def choose_product(
    wanted: Literal["auto", "torch", "onednn"], deterministic: bool = False, use: Use = "layers"
) -> ProductName:
    """What the setting `learner.cpu_product` means on this machine for the layers of a model, or for SAC's updates.

    `auto` in a deterministic run is torch's: its bytes must not depend on a measurement, which a lost cache repeats.
    Raises UserInputError for oneDNN in a torch without it.
    """
    if wanted == "onednn" and not torch.backends.mkldnn.is_available():
        raise UserInputError("learner.cpu_product onednn: this build of torch has no oneDNN: use torch or auto.")
    if wanted != "auto":
        return wanted
    return "torch" if deterministic or not torch.backends.mkldnn.is_available() else _fastest(use)


@cache
def _fastest(use: Use = "layers") -> ProductName:
    """The faster product, from the cache folder or measured; torch's where none can be kept."""
    try:
        path = cache_folder() / f"{'product' if use == 'layers' else 'products'}-{_machine()}.json"
        with locked(path.with_suffix(".lock")):
            known = _read(path)
            if known is None:
                seconds = measure_products() if use == "layers" else measure_updates()
                known = "onednn" if seconds["onednn"] < _MARGIN * seconds["torch"] else "torch"
                write_atomic(path, json.dumps({"product": known, "seconds": seconds}) + "\n")
            return known
    except (OSError, UserInputError) as error:
        # Measured anew each time, the choice could change between the parts of a run.
        log.warning("The choice of the CPU's matrix product cannot be kept (%s): torch's is used.", error)
        return "torch"


def measure_products() -> dict[ProductName, float]:
    """CPU seconds by product, of layers of a model."""
    generator = torch.Generator().manual_seed(0)
    cases = [[torch.randn(n, width, generator=generator) for n in (rows, out)] for rows, width, out in _SIZES]
    return _measure(
        {name: [partial(product, x, weight, None) for x, weight in cases] for name, product in _PRODUCTS.items()}
    )


def measure_updates() -> dict[ProductName, float]:
    """CPU seconds by product, of what an update of SAC multiplies: forward, to the inputs, and to the weights.

    Their strides differ, and so does what each library makes of them.
    """
    generator = torch.Generator().manual_seed(0)
    x, gradient, weight, out = (torch.randn(2, 256, 256, generator=generator) for _ in range(4))
    bias, turned = torch.zeros(2, 1, 256), [tensor.transpose(1, 2) for tensor in (x, gradient, weight)]
    cases = [(x, weight, bias), (gradient, turned[2], None), (turned[1], turned[0], None)]
    return _measure({name: [partial(products, *case, out) for case in cases] for name, products in _BATCHED.items()})


def _measure(calls: dict[ProductName, list[Callable[[], Tensor]]]) -> dict[ProductName, float]:
    """The least of each call, added.

    Of one thread, which another load on the machine does not slow down; and they take turns.
    """
    total = dict.fromkeys(calls, 0.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            for case in zip(*calls.values(), strict=True):
                best = dict.fromkeys(calls, float("inf"))
                for _ in range(_ROUNDS):
                    for name, call in zip(calls, case, strict=True):
                        started = time.thread_time()
                        call()
                        best[name] = min(best[name], time.thread_time() - started)
                for name, seconds in best.items():
                    total[name] += seconds
    finally:
        torch.set_num_threads(threads)
    return total


def _read(path: Path) -> ProductName | None:
    try:
        found = json.loads(path.read_text())["product"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return cast(ProductName, found) if found in _PRODUCTS else None


def _machine() -> str:
    """What the speed depends on; no host name, since a container gets another one with every start."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    processor = sorted({line for line in lines if line.startswith(("model name", "CPU part"))})
    facts = [*processor, torch.__version__, torch.backends.cpu.get_cpu_capability()]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


class _FrozenProduct(torch.autograd.Function):
    """oneDNN's product with weights that have no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return onednn_product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return onednn_product(gradients[0], weight.t()), None, None


class FrozenLinear(nn.Linear):
    """A linear layer whose weights are frozen: float32 on a CPU, by oneDNN."""

    def forward(self, input: Tensor) -> Tensor:
        """As nn.Linear, without a gradient for the weights."""
        # Each looked up once, and the size first: a decoding step asks dozens of small layers.
        weight, bias = self.weight, self.bias
        if (
            input.numel() * self.out_features < _SMALL
            or input.dtype != torch.float32
            or weight.dtype != torch.float32
            or weight.requires_grad
            or (bias is not None and bias.requires_grad)
        ):
            return functional.linear(input, weight, bias)
        if not (torch.is_grad_enabled() and input.requires_grad):
            return onednn_product(input, weight, bias)
        # Rows outside the function: what it returns must be no view, or nobody could change it in place.
        rows = _FrozenProduct.apply(input.reshape(-1, self.in_features), weight, bias)
        return rows.view(*input.shape[:-1], self.out_features)  # type: ignore[no-any-return]


def use_onednn(model: nn.Module, smallest: int = 0) -> int:
    """Let the frozen float32 linear layers of a model on a CPU, of `smallest` weights or more, compute by oneDNN.

    Returns how many there are.
    """
    changed = 0
    for module in model.modules():
        # Only torch's own layer: a subclass may compute something else.
        if type(module) is not nn.Linear or module.weight.requires_grad or module.weight.numel() < smallest:
            continue
        if product_of("onednn", module.weight) is onednn_product:
            module.__class__ = FrozenLinear
            changed += 1
    return changed
