"""MLPs side by side: equal to torch's own, gradients as autograd's, with and without memory of their own."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from rl_vlm.preference.adam import adam_step, moments_of
from rl_vlm.preference.mlp import backward, forward, input_gradient, layers_of, num_weights

B = 37


def made(sizes: tuple[int, ...], count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights, and inputs [count, B, in]."""
    generator = torch.Generator().manual_seed(len(sizes) + count)
    vector = torch.randn(count * num_weights(sizes), generator=generator) * 0.3
    return vector, torch.randn(count, B, sizes[0], generator=generator)


CASES = pytest.mark.parametrize(
    ("sizes", "count"),
    [((4, 16, 1), 2), ((5, 16, 16, 4), 1), ((40, 24, 24, 24, 20), 1), ((33, 12, 9), 3), ((3, 8, 1), 4)],
)


@CASES
def test_each_is_the_network_of_its_own_weights(sizes: tuple[int, ...], count: int) -> None:
    vector, inputs = made(sizes, count)
    found, activations = forward(layers_of(vector, sizes, count), inputs)
    for k, weights in enumerate(vector.view(count, -1)):
        linears = [nn.Linear(before, after) for before, after in itertools.pairwise(sizes)]
        nn.utils.vector_to_parameters(weights, [p for linear in linears for p in (linear.weight, linear.bias)])
        network = nn.Sequential(*[part for linear in linears for part in (linear, nn.ReLU())][:-1])
        assert torch.allclose(found[k], network(inputs[k]), atol=1e-5)
    assert [tuple(layer.shape) for layer in activations] == [(count, B, size) for size in sizes[:-1]]


@CASES
@pytest.mark.parametrize("own_memory", [False, True])
def test_gradients_are_those_of_autograd(sizes: tuple[int, ...], count: int, own_memory: bool) -> None:
    vector, inputs = made(sizes, count)
    gradient = torch.randn(count, B, sizes[-1], generator=torch.Generator().manual_seed(1))
    vector.requires_grad_()
    inputs.requires_grad_()
    output, _ = forward(layers_of(vector, sizes, count), inputs)
    of_weights, of_inputs = torch.autograd.grad((output * gradient).sum(), [vector, inputs])
    assert of_weights.abs().max() > 1

    plain, result = layers_of(vector.data, sizes, count), torch.full_like(vector.data, torch.nan)
    widest = max(sizes[1:-1])
    assert all(size == widest for size in sizes[1:-1])
    outputs = [torch.full((count, B, widest), torch.nan) for _ in sizes[1:-1]] if own_memory else None
    scratch = [torch.full((count, B, widest), torch.nan) for _ in range(2)] if own_memory else None
    _, activations = forward(plain, inputs.data, outputs=outputs)
    assert outputs is None or all(kept is layer for kept, layer in zip(outputs, activations[1:], strict=True))
    slopes = input_gradient(plain, activations, gradient, 2, scratch=scratch)
    assert torch.allclose(slopes, of_inputs[:, :, 2:], atol=1e-5)
    into = layers_of(result, sizes, count) if own_memory else None
    found = backward(plain, activations, gradient, scratch=scratch, into=into)
    flat = torch.cat([part.reshape(count, -1) for layer in found for part in layer], dim=1).view(-1)
    assert torch.allclose(flat, of_weights, atol=2e-5)
    assert not own_memory or torch.allclose(result, of_weights, atol=2e-5)


def test_a_step_is_that_of_torchs_adam() -> None:
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (nn.Parameter(torch.ones(50)) for _ in range(2))
    options = {"lr": 0.01, "betas": (0.8, 0.95)}
    holder, optimizer = torch.optim.Adam([ours], **options), torch.optim.Adam([theirs], **options)
    for number in range(6):
        theirs.grad = torch.randn(50, generator=generator)
        adam_step(ours.data, theirs.grad, moments_of(holder), **options)
        optimizer.step()
        assert torch.allclose(ours, theirs, rtol=1e-6, atol=0)
        if number == 3:  # what is saved is loaded
            holder.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert holder.state[ours]["step"] == 6
