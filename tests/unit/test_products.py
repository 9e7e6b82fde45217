"""The CPU's matrix products: both libraries agree, in values and gradients, and so do an engine and a policy that use them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_support import adapted_policy
from torch import nn

from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.models import kernels
from rl_vlm.models.kernels import FastLinear, linear, use_fast_products
from rl_vlm.types import GenerationRequest, SamplingParams

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@pytest.fixture(autouse=True)
def onednn_for_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "USE_ONEDNN", True)
    monkeypatch.setattr(kernels, "_SMALL", 1)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of x that oneDNN multiplies."""
    shapes: list[torch.Size] = []
    plain = kernels._onednn

    def counted(x: torch.Tensor, *rest: Any) -> Any:
        shapes.append(x.shape)
        return plain(x, *rest)

    monkeypatch.setattr(kernels, "_onednn", counted)
    return shapes


@pytest.mark.parametrize("shape", [(7, 5), (0, 5), (2, 3, 5), (1, 5)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_both_products_have_the_same_values_and_gradients(
    shape: tuple[int, ...], has_bias: bool, calls: list[torch.Size]
) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=generator).requires_grad_() for size in (shape, (4, 5), (4,))]
    tensors = tensors if has_bias else tensors[:2]
    found, expected = linear(*tensors), nn.functional.linear(*tensors)
    assert torch.allclose(found, expected, atol=1e-5)
    slopes = torch.randn(expected.shape, generator=generator)
    for one, other in zip(
        *(torch.autograd.grad((out * slopes).sum(), tensors) for out in (found, expected)), strict=True
    ):
        assert torch.allclose(one, other, atol=1e-5)
    assert bool(calls) == bool(found.numel())


def test_frozen_layers_give_the_same_values_and_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3, bias=False), nn.Linear(3, 2))
    model.requires_grad_(False)
    model[3].requires_grad_(True)
    x = torch.randn(2, 4, 6, requires_grad=True)
    expected = model(x)
    (wanted,) = torch.autograd.grad(expected.sum(), x)
    use_fast_products(model, smallest=15)
    assert [type(model[k]) for k in (0, 2, 3)] == [FastLinear, FastLinear, nn.Linear]
    found = model(x)
    assert torch.allclose(found, expected, atol=1e-6)
    assert torch.allclose(torch.autograd.grad(found.sum(), x)[0], wanted, atol=1e-6)
    with torch.no_grad():
        assert torch.allclose(model(x), expected, atol=1e-6)
    model(x)[..., 0] = 0.0  # an output may be changed in place, as that of nn.Linear
    model[0](x)[0] = 0.0


def test_the_engine_samples_the_same_by_either_product(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, calls: list[torch.Size]
) -> None:
    monkeypatch.setattr("rl_vlm.engines.transformers_engine._SMALLEST_LAYER", 0)
    payload = adapted_policy(tiny_folder).payload(1)
    prompt = np.arange(40, dtype=np.int32)
    found = []
    for use_onednn in (False, True):
        monkeypatch.setattr(kernels, "USE_ONEDNN", use_onednn)
        calls.clear()
        engine = TransformersEngine(tiny_folder, max_context=128, lockstep=True)
        asyncio.run(engine.load_adapter(payload))
        sampling = SamplingParams(n=4, max_new_tokens=12, seeds=(1, 2, 3, 4))
        (answer,) = asyncio.run(engine.generate([GenerationRequest("r", prompt, sampling, min_version=1)]))
        asyncio.run(engine.close())
        assert (len(calls) > 100) == use_onednn  # layers times steps
        found.append(answer.samples)
    for one, other in zip(*found, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert np.allclose(one.logprobs, other.logprobs, atol=1e-5)
