"""LoRA layers that compute by two thin products: peft's values and gradients, at the precision of the activations."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model

from rl_vlm.models.lora_layer import FastLora, use_fast_lora


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 0.01)])
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_are_those_of_peft(dtype: torch.dtype, tolerance: float, bias: bool) -> None:
    torch.manual_seed(0)
    layers = (torch.nn.Linear(64, 96, bias), torch.nn.GELU(), torch.nn.Linear(96, 32, bias))
    theirs = torch.nn.Sequential(*layers).to(dtype).requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=8, lora_alpha=16, target_modules=["0", "2"]), theirs)
    trained = [name for name, _ in theirs.named_parameters() if "lora_" in name]
    for name in trained:
        parameter = theirs.get_parameter(name)
        parameter.data = torch.randn_like(parameter, dtype=torch.float32) * 0.1
        parameter.requires_grad_(True)
    ours = copy.deepcopy(theirs)
    use_fast_lora(ours)
    assert isinstance(ours[0], FastLora)
    x = torch.randn(3, 5, 64).to(dtype)
    found = []
    for model in (theirs, ours):
        given = x.clone().requires_grad_()
        out = model(given)
        out.float().square().sum().backward()
        gradients = [model.get_parameter(name).grad for name in trained]
        assert all(gradient is not None and gradient.dtype == torch.float32 for gradient in gradients)
        found.append([out.detach(), given.grad, *gradients])
    for expected, one in zip(*found, strict=True):
        assert float((one - expected).float().norm() / expected.float().norm()) < tolerance
    assert (ours(x) - ours[2].base_layer(ours[1](ours[0].base_layer(x)))).abs().max() > 0.1  # the update counts
