"""Equal ReLU MLPs side by side: their layers as views of one vector, and forward and backward as matrix products. Plain torch.

One vector means one optimiser kernel, one target update and one copy; side by side means one call for all. Gradients are written
out, without those that autograd computes and SAC does not use.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from rl_vlm.models.products import Products, torch_products

Layer: TypeAlias = tuple[Tensor, Tensor]  # of n MLPs: weight [n, out, in], bias [n, 1, out]

# Products with a side below these take a fraction of the time when the transposed product is computed (MKL, one core).
_NARROW_INPUTS, _NARROW_OUTPUTS = 32, 8


def num_weights(sizes: Sequence[int]) -> int:
    """Weights and biases of an MLP with these layer sizes."""
    return sum((before + 1) * after for before, after in itertools.pairwise(sizes))


def layers_of(vector: Tensor, sizes: Sequence[int], count: int = 1) -> list[Layer]:
    """The layers of `count` MLPs, which follow one another in `vector`, as views of it."""
    rows, layers, start = vector.view(count, -1), [], 0
    for before, after in itertools.pairwise(sizes):
        middle, end = start + before * after, start + (before + 1) * after
        layers.append((rows[:, start:middle].view(count, after, before), rows[:, middle:end].unsqueeze(1)))
        start = end
    return layers


def forward(
    layers: Sequence[Layer],
    inputs: Tensor,
    products: Products = torch_products,
    outputs: Sequence[Tensor] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Output [n, B, out] for inputs [n, B, in], and the input of every layer, which `backward` needs.

    `outputs` is memory for the hidden layers, [n, B, hidden] each.
    """
    activations = [inputs]
    for place, (weight, bias) in enumerate(layers[:-1]):
        out = None if outputs is None else outputs[place]
        activations.append(products(activations[-1], weight, bias, out).relu_())
    weight, bias = layers[-1]
    if weight.shape[1] <= _NARROW_OUTPUTS:
        flipped = torch.baddbmm(bias.transpose(1, 2), weight, activations[-1].transpose(1, 2))
        return flipped.transpose(1, 2), activations
    return products(activations[-1], weight, bias), activations


def backward(
    layers: Sequence[Layer],
    activations: Sequence[Tensor],
    gradient: Tensor,
    products: Products = torch_products,
    scratch: Sequence[Tensor] | None = None,
    into: Sequence[Layer] | None = None,
) -> list[Layer]:
    """Gradients by layer of a loss with `gradient` [n, B, out] at the output.

    `scratch` is memory for the gradients of two hidden layers, [n, B, hidden] each, and `into` that of the result.
    """
    found: list[Layer] = []
    for place in range(len(layers) - 1, -1, -1):
        weight_out, bias_out = (None, None) if into is None else into[place]
        bias = torch.sum(gradient, 1, keepdim=True, out=bias_out)
        found.insert(0, (_weight_gradient(gradient, activations[place], products, weight_out), bias))
        if place:
            gradient = _through(layers[place], activations[place], gradient, products, scratch, place)
    return found


def input_gradient(
    layers: Sequence[Layer],
    activations: Sequence[Tensor],
    gradient: Tensor,
    first: int,
    products: Products = torch_products,
    scratch: Sequence[Tensor] | None = None,
) -> Tensor:
    """As `backward`, of inputs[:, :, first:] in place of the weights: [n, B, in - first]."""
    for place in range(len(layers) - 1, 0, -1):
        gradient = _through(layers[place], activations[place], gradient, products, scratch, place)
    return torch.bmm(gradient, layers[0][0][:, :, first:])


def _through(
    layer: Layer,
    inputs: Tensor,
    gradient: Tensor,
    products: Products,
    scratch: Sequence[Tensor] | None,
    place: int,
) -> Tensor:
    """From the gradient of a layer's output to that of the output of the layer before, whose ReLU gave `inputs`."""
    weight, out = layer[0], None if scratch is None else scratch[place % 2]
    if weight.shape[1] == 1:
        before = torch.mul(gradient, weight, out=out)
    else:
        before = products(gradient, weight.transpose(1, 2), None, out)
    return torch.ops.aten.threshold_backward.grad_input(before, inputs, 0, grad_input=before)  # type: ignore[no-any-return]


def _weight_gradient(gradient: Tensor, inputs: Tensor, products: Products, out: Tensor | None) -> Tensor:
    """gradientᵀ [n, out, B] · inputs [n, B, in]."""
    if inputs.shape[2] < _NARROW_INPUTS:
        flipped = torch.bmm(inputs.transpose(1, 2), gradient).transpose(1, 2)
        return flipped if out is None else out.copy_(flipped)
    return products(gradient.transpose(1, 2), inputs.transpose(1, 2), None, out)
