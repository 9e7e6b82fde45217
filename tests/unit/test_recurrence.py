"""Linear attention in packed rows equals that of each sample alone: values, and gradients of inputs and weights."""

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from rl_vlm.models.attention import SegmentLayout
from rl_vlm.models.recurrence import attend_segments

WIDTH = 24


@pytest.fixture
def layer() -> Qwen3_5GatedDeltaNet:
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        hidden_size=WIDTH, num_hidden_layers=1, layer_types=["linear_attention"], linear_num_value_heads=4,
        linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=6, linear_conv_kernel_dim=4,
    )  # fmt: skip
    return Qwen3_5GatedDeltaNet(config, 0)


def alone(layer: Qwen3_5GatedDeltaNet, row: Tensor, segments: np.ndarray) -> Tensor:
    """Each continuation after a prompt of its own, computed by transformers; zeros for padding."""
    found = torch.zeros_like(row)
    prompt = torch.from_numpy(segments == 0)
    for number in set(segments.tolist()) - {-1, 0}:
        own = torch.from_numpy(segments == number)
        mixed = Qwen3_5GatedDeltaNet.forward(layer, torch.cat([row[prompt], row[own]])[None])[0]
        found[prompt], found[own] = mixed[: int(prompt.sum())], mixed[int(prompt.sum()) :]
    return found


@pytest.mark.parametrize("sizes", [
    [(9, 5, 1, 70)],  # prompt and continuations
    [(2, 3, 4)],  # a prompt shorter than the convolution
    [(0, 3, 4, 1)],  # none
    [(7, 6), (70, 1, 3, 3), (5,) * 3],  # one continuation; several rows, of which two are padded
])  # fmt: skip
def test_packed_rows_are_samples_alone(layer: Qwen3_5GatedDeltaNet, sizes: list[tuple[int, ...]]) -> None:
    longest = max(map(sum, sizes))
    segments = np.full((len(sizes), longest), -1)
    for row, lengths in zip(segments, sizes, strict=True):
        row[: sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths)
    hidden = torch.randn(len(sizes), longest, WIDTH, requires_grad=True)
    real = torch.from_numpy(segments >= 0)
    weight = torch.randn(len(sizes), longest, WIDTH)

    def with_gradients(mixed: Tensor) -> list[Tensor]:
        wanted = [hidden, *layer.parameters()]
        return [mixed[real], *torch.autograd.grad((mixed * weight)[real].sum(), wanted)]

    found = attend_segments(layer, hidden, SegmentLayout.of(segments), cache_params=None)
    expected = torch.stack([alone(layer, row, kinds) for row, kinds in zip(hidden, segments, strict=True)])
    for ours, theirs in zip(with_gradients(found), with_gradients(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)  # the state is kept in float32
    assert torch.isfinite(found).all()
