"""Log-probabilities of given tokens: chunks and recomputation change nothing, suppressed tokens harm nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_vlm.learning import logprobs as module
from rl_vlm.learning.logprobs import token_logprobs
from rl_vlm.models.backbone import Backbone

VOCABULARY, WIDTH, COUNT = 50, 16, 23
SUPPRESSED = [0, 7, 8, 49]


class Head:
    """The part of a backbone that makes logits, with a trainable projection so that its gradient can be compared too."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False).to(dtype)
        self.token_bias = torch.zeros(VOCABULARY)
        self.token_bias[SUPPRESSED] = float("-inf")
        self.widest = 0

    def logits(self, hidden: Tensor) -> Tensor:
        self.widest = max(self.widest, len(hidden))
        return Backbone.logits(self, hidden)  # type: ignore[arg-type]


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    allowed = torch.tensor([i for i in range(VOCABULARY) if i not in SUPPRESSED])
    hidden = torch.randn(COUNT, WIDTH, generator=generator)
    return hidden, allowed[torch.randint(len(allowed), (COUNT,), generator=generator)]


def direct(head: Head, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Both by a categorical distribution over the allowed tokens alone."""
    allowed = [i for i in range(VOCABULARY) if i not in SUPPRESSED]
    logits = (hidden @ head.lm_head.weight.float().T)[:, allowed] / temperature
    distribution = torch.distributions.Categorical(logits=logits)
    place = torch.tensor([allowed.index(int(target)) for target in targets])
    return distribution.log_prob(place), distribution.entropy()


def gradients(head: Head, values: tuple[Tensor, Tensor], hidden: Tensor) -> tuple[Tensor, ...]:
    """Of a random mixture of log-probabilities and entropies."""
    generator = torch.Generator().manual_seed(2)
    mixture = torch.randn(2, COUNT, generator=generator)
    return torch.autograd.grad((torch.stack(values) * mixture).sum(), [hidden, head.lm_head.weight])


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
@pytest.mark.parametrize("chunk_size", [None, 1, 5, COUNT, 100])
def test_values_and_gradients_equal_the_direct_computation(
    monkeypatch: pytest.MonkeyPatch, temperature: float, chunk_size: int | None
) -> None:
    head = Head()
    hidden, targets = inputs()
    hidden.requires_grad_()
    if chunk_size is not None:
        monkeypatch.setattr(module, "_KEEP_LOGITS", 0)
    backbone: Any = head
    ours = token_logprobs(backbone, hidden, targets, temperature, chunk_size or 256)
    assert head.widest == min(chunk_size or COUNT, COUNT)
    expected = direct(head, hidden, targets, temperature)
    for one, other in zip(ours, expected, strict=True):
        assert one.shape == (COUNT,)
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)
    for one, other in zip(gradients(head, ours, hidden), gradients(head, expected, hidden), strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def test_chunks_are_recomputed_instead_of_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEEP_LOGITS", 0)
    head = Head()
    hidden, targets = inputs()
    hidden.requires_grad_()
    calls = 0
    logits = head.logits

    def counted(rows: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return logits(rows)

    backbone: Any = SimpleNamespace(token_bias=head.token_bias, logits=counted)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        values, _ = token_logprobs(backbone, hidden, targets, 1.0, chunk_size=8)
    assert calls == 3
    assert VOCABULARY * 8 not in saved  # no chunk of logits waits for the backward pass
    values.sum().backward()
    assert calls == 6


def test_suppressed_tokens_bring_no_nan_into_entropies_or_gradients() -> None:
    head = Head()
    hidden, targets = inputs()
    hidden = (100 * hidden).requires_grad_()  # nearly one-hot distributions too
    backbone: Any = head
    values, entropies = token_logprobs(backbone, hidden, targets, 0.5)
    assert torch.isfinite(values).all()
    assert torch.isfinite(entropies).all()
    assert (entropies >= -1e-6).all()
    for gradient in torch.autograd.grad(100 * entropies.sum() + values.sum(), [hidden, head.lm_head.weight]):
        assert torch.isfinite(gradient).all()


def test_the_entropy_of_equal_logits_counts_the_allowed_tokens_only() -> None:
    backbone: Any = Head()
    _, entropies = token_logprobs(backbone, torch.zeros(3, WIDTH), torch.tensor([1, 2, 3]), 1.0)
    expected = torch.tensor(float(VOCABULARY - len(SUPPRESSED))).log()
    assert torch.allclose(entropies, expected.expand(3))


def test_low_precision_hidden_states_give_float32_logprobs() -> None:
    head = Head(torch.bfloat16)
    hidden, targets = inputs()
    backbone: Any = head
    values, entropies = token_logprobs(backbone, hidden.bfloat16(), targets, 1.0)
    assert values.dtype == entropies.dtype == torch.float32
