"""Log-probabilities of given tokens: tiles change nothing, the written gradient is right, suppressed tokens harm nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rl_vlm.learning.logprobs import Allowed, Tile, token_logprobs
from rl_vlm.models import kernels
from rl_vlm.models.families.qwen_fast import QwenBackbone

VOCABULARY, WIDTH, COUNT = 50, 16, 23
SUPPRESSED = [0, 7, 8, 49]


class Head:
    """The part of a backbone that makes logits, with a trainable projection so that its gradient can be compared too."""

    def __init__(self, dtype: torch.dtype = torch.float32, wide: bool = False, softcap: float | None = None) -> None:
        torch.manual_seed(0)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False).to(dtype)
        self.token_bias = torch.zeros(VOCABULARY)
        self.token_bias[SUPPRESSED] = float("-inf")
        self.wide_head, self.softcap = wide, softcap

    def logits(self, hidden: Tensor) -> Tensor:
        return QwenBackbone.logits(self, hidden)  # type: ignore[arg-type]


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    allowed = torch.tensor([i for i in range(VOCABULARY) if i not in SUPPRESSED])
    hidden = torch.randn(COUNT, WIDTH, generator=generator)
    return hidden, allowed[torch.randint(len(allowed), (COUNT,), generator=generator)]


def direct(head: Head, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Both by a categorical distribution over the allowed tokens alone."""
    allowed = [i for i in range(VOCABULARY) if i not in SUPPRESSED]
    logits = (hidden @ head.lm_head.weight.to(hidden.dtype).T)[:, allowed] / temperature
    distribution = torch.distributions.Categorical(logits=logits)
    place = torch.tensor([allowed.index(int(target)) for target in targets])
    return distribution.log_prob(place), distribution.entropy()


def gradients(head: Head, values: tuple[Tensor, Tensor], hidden: Tensor) -> tuple[Tensor, ...]:
    """Of a random mixture of log-probabilities and entropies."""
    generator = torch.Generator().manual_seed(2)
    mixture = torch.randn(2, COUNT, generator=generator)
    return torch.autograd.grad((torch.stack(values) * mixture).sum(), [hidden, head.lm_head.weight])


@pytest.mark.parametrize(
    ("tile", "softcap"),
    [
        (None, None),
        (None, 0.8),
        (Tile(1, 1), None),
        (Tile(5, 7), None),
        (Tile(5, 7), 0.8),
        (Tile(100, 13), None),
        (Tile(4, 100), None),
    ],
)
def test_only_what_a_grammar_allows_has_a_part_in_values_and_gradients(
    tile: Tile | None, softcap: float | None
) -> None:
    """Against a distribution per position over the allowed tokens alone, of which there may be a single one."""
    exact = tile is not None and softcap is None
    dtype, tolerance = (torch.float64, 1e-12) if exact else (torch.float32, 1e-5)
    head: Any = Head(dtype, softcap=softcap)
    hidden, targets = inputs()
    hidden = hidden.to(dtype).requires_grad_()
    rng = np.random.default_rng(3)
    masks = rng.random((COUNT, VOCABULARY)) < rng.choice([0.05, 0.5, 0.95], (COUNT, 1))
    masks[:3] = False
    masks[np.arange(COUNT), targets] = True
    order = rng.permutation(COUNT)  # a mask's place in the table is not the position's
    packed = torch.from_numpy(np.packbits(masks[order], axis=1, bitorder="little"))
    allowed = Allowed(packed, torch.from_numpy(np.argsort(order)))
    found = token_logprobs(head, hidden, targets, 0.7, tile=tile, allowed=allowed)
    logits = hidden @ head.lm_head.weight.T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    rows = []
    for row, target, mask in zip(logits / 0.7, targets.tolist(), masks, strict=True):
        ids = [one for one in np.flatnonzero(mask).tolist() if one not in SUPPRESSED]
        one = torch.distributions.Categorical(logits=row[ids])
        rows.append(torch.stack([one.log_prob(torch.tensor(ids.index(target))), one.entropy()]))
    expected = torch.stack(rows, 1)
    assert found[1] is not None and found[0][:3].tolist() == [0.0] * 3
    assert torch.allclose(torch.stack(found), expected, rtol=0, atol=tolerance)
    theirs = gradients(head, (expected[0], expected[1]), hidden)
    for one, other in zip(gradients(head, found, hidden), theirs, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=10 * tolerance)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
@pytest.mark.parametrize("tile", [None, Tile(1, 1), Tile(5, 7), Tile(100, 13), Tile(4, 100)])
def test_values_and_gradients_equal_the_direct_computation(temperature: float, tile: Tile | None) -> None:
    """Of the hidden states and of weights that are trained too; tiles in float64."""
    dtype, tolerance = (torch.float32, 1e-5) if tile is None else (torch.float64, 1e-12)
    head: Any = Head(dtype)
    hidden, targets = inputs()
    hidden = hidden.to(dtype).requires_grad_()
    ours = token_logprobs(head, hidden, targets, temperature, tile=tile)
    expected = direct(head, hidden, targets, temperature)
    for one, other in zip(ours, expected, strict=True):
        assert one is not None
        assert one.shape == (COUNT,)
        assert torch.allclose(one, other, rtol=0, atol=tolerance)
    for one, other in zip(gradients(head, ours, hidden), gradients(head, expected, hidden), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=tolerance)


@pytest.mark.parametrize("entropy", ["none", "value", "gradient"])
@pytest.mark.parametrize("use_onednn", [False, True])
def test_tiles_equal_the_direct_computation_in_float32(
    use_onednn: bool, entropy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "USE_ONEDNN", use_onednn)
    monkeypatch.setattr(kernels, "_SMALL", 0)
    head: Any = Head()
    head.lm_head.weight.requires_grad_(False)
    hidden, targets = inputs()
    hidden.requires_grad_()
    found = token_logprobs(head, hidden, targets, 0.7, entropy=entropy, tile=Tile(4, 9))
    expected = direct(head, hidden, targets, 0.7)
    assert (found[1] is None) == (entropy == "none")
    wanted = [k for k, value in enumerate(found) if value is not None and value.requires_grad]
    assert wanted == ([0, 1] if entropy == "gradient" else [0])
    mixture = torch.randn(2, COUNT, generator=torch.Generator().manual_seed(2))
    slopes = [
        torch.autograd.grad(sum((mixture[k] * of[k]).sum() for k in wanted), [hidden])[0] for of in (found, expected)
    ]
    for one, other in (*zip(found, expected, strict=True), tuple(slopes)):
        assert one is None or torch.allclose(one, other, rtol=1e-5, atol=2e-6)


def test_two_tokens_by_hand() -> None:
    """Logits (ln 3, 0) and one token that is suppressed: probabilities 3/4 and 1/4."""
    head: Any = Head(torch.float64)
    head.lm_head.weight = nn.Parameter(torch.tensor([[1.0], [0.0], [5.0]], dtype=torch.float64), requires_grad=False)
    head.token_bias = torch.tensor([0.0, 0.0, float("-inf")])
    hidden = torch.tensor([[np.log(3.0)]], dtype=torch.float64, requires_grad=True)
    values, entropies = token_logprobs(head, hidden, torch.tensor([1]), 1.0, tile=Tile(1, 2))
    assert entropies is not None
    assert values.item() == pytest.approx(np.log(0.25))
    assert entropies.item() == pytest.approx(-0.75 * np.log(0.75) - 0.25 * np.log(0.25))
    of_value, of_entropy = (torch.autograd.grad(one.sum(), hidden, retain_graph=True)[0] for one in (values, entropies))
    assert of_value.item() == pytest.approx(-0.75)  # w_1 - p_0 w_0
    assert of_entropy.item() == pytest.approx(-0.75 * 0.25 * np.log(3.0))  # -p(1-p) times the log odds


def test_logits_of_all_positions_are_never_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    head: Any = Head()
    hidden, targets = inputs()
    hidden.requires_grad_()
    sizes: list[int] = []

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        sizes.append(max(len(x) * len(weight), x.numel()))
        return kernels.linear(x, weight, bias)

    monkeypatch.setattr("rl_vlm.learning.logprobs.linear", counted)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        values, _ = token_logprobs(head, hidden, targets, 1.0, tile=Tile(8, 10))
    assert max(saved) == head.lm_head.weight.numel()
    assert max(sizes) == max(8 * 10, 8 * WIDTH)
    values.sum().backward()


def test_a_pass_without_gradient_gives_the_same_bits() -> None:
    """The ratio to the old policy must be exactly one."""
    head: Any = Head()
    hidden, targets = inputs()
    with_gradient, _ = token_logprobs(head, hidden.clone().requires_grad_(), targets, 0.7, tile=Tile(8, 16))
    for entropy in ("none", "value", "gradient"):
        with torch.no_grad():
            without, _ = token_logprobs(head, hidden, targets, 0.7, entropy=entropy, tile=Tile(8, 16))
        assert torch.equal(without, with_gradient)


@pytest.mark.parametrize("tile", [None, Tile(8, 1), Tile(8, 16)])
def test_suppressed_tokens_bring_no_nan_into_entropies_or_gradients(tile: Tile | None) -> None:
    """A tile may hold suppressed tokens alone, the first one too."""
    head = Head()
    hidden, targets = inputs()
    hidden = (100 * hidden).requires_grad_()  # nearly one-hot distributions too
    backbone: Any = head
    values, entropies = token_logprobs(backbone, hidden, targets, 0.5, tile=tile)
    assert entropies is not None
    assert torch.isfinite(values).all()
    assert torch.isfinite(entropies).all()
    assert (entropies >= -1e-6).all()
    for gradient in torch.autograd.grad(100 * entropies.sum() + values.sum(), [hidden, head.lm_head.weight]):
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("tile", [None, Tile(8, 16)])
def test_low_precision_hidden_states_give_float32_logprobs(tile: Tile | None) -> None:
    """Logits are rounded to the model's type, as the engine's are; nothing else is."""
    head: Any = Head(torch.bfloat16)
    hidden, targets = inputs()
    hidden = hidden.bfloat16().requires_grad_()
    values, entropies = token_logprobs(head, hidden, targets, 1.0, tile=tile)
    assert entropies is not None
    assert values.dtype == entropies.dtype == torch.float32
    logits = head.lm_head(hidden).float() + head.token_bias
    expected = torch.log_softmax(logits, dim=-1).gather(1, targets[:, None])[:, 0]
    assert torch.allclose(values, expected, rtol=0, atol=1e-5)
    found, wanted = (torch.autograd.grad(one.sum(), hidden)[0] for one in (values, expected))
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.float(), wanted.float(), rtol=0.05, atol=0.02)


@pytest.mark.parametrize("tile", [None, Tile(5, 7)])
def test_a_wide_head_does_not_round_logits(tile: Tile | None) -> None:
    """Logits around 30, as large models have: bfloat16 rounds them to multiples of 1/8."""
    hidden, targets = inputs()
    hidden = (8 * hidden).bfloat16().requires_grad_()

    def head_of(wide: bool) -> Any:
        head = Head(torch.bfloat16, wide)
        head.lm_head.weight.data *= 8
        return head

    exact, precise = head_of(True), hidden.detach().double().requires_grad_()
    exact.lm_head.double()
    expected = direct(exact, precise, targets, 1.0)
    errors = {}
    for wide in (False, True):
        head = head_of(wide)
        found = token_logprobs(head, hidden, targets, 1.0, tile=tile)
        errors[wide] = float((found[0].double() - expected[0]).detach().abs().max())
        assert found[0].dtype == torch.float32
    assert errors[True] < 1e-4 < 0.02 < errors[False]
    for one, other in zip(gradients(head, found, hidden), gradients(exact, expected, precise), strict=True):
        assert torch.allclose(one.double(), other, rtol=0.02, atol=0.01 * float(other.abs().max()))
