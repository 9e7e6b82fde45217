"""Losses: by hand, and equal to TRL's GRPOTrainer in value and gradient, through our weights and our update."""

from __future__ import annotations

import importlib
import math
import sys
import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from core_support import Sample, plan_update
from torch import Tensor

from rl_vlm.config import PolicyConfig
from rl_vlm.config.learner import AlgorithmSection
from rl_vlm.learning.batching import MicroBatch
from rl_vlm.learning.losses import LOSSES, TokenBatch, clipped_surrogate, kl_estimate, mismatch_weights
from rl_vlm.learning.plan import UpdateStats
from rl_vlm.learning.update import Found, PolicyUpdater
from rl_vlm.types import StopReason, Trajectory, TrajectoryGroup, TrajectoryStatus, Turn

GROUPS, SIZE, LENGTH, MAX_NEW_TOKENS = 3, 4, 12, 20


def token_batch(new: Tensor, old: Tensor, advantage: Tensor, sample: Tensor | None = None) -> TokenBatch:
    ids = torch.zeros(len(new), dtype=torch.long) if sample is None else sample
    return TokenBatch(new, old, old, advantage, ids, torch.zeros_like(ids))


# --- by hand


def of_one_token(compute: Any, ratio: float, advantage: float, **settings: Any) -> tuple[Any, float]:
    """The loss's terms of a token whose likelihood was exp(-2), and their gradient by its new log-probability."""
    old = torch.tensor([-2.0], dtype=torch.float64)
    new = (old + math.log(ratio)).requires_grad_()
    terms = compute(token_batch(new, old, torch.tensor([advantage], dtype=torch.float64)), AlgorithmSection(**settings))
    terms.loss.sum().backward()
    assert new.grad is not None
    return terms, new.grad.item()


@pytest.mark.parametrize(
    ("dual_clip", "ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (None, 1.0, 2.0, -2.0, -2.0, False),
        (None, 1.2, 1.0, -1.2, -1.2, False),  # within clip_high
        (None, 1.5, 1.0, -1.28, 0.0, True),  # above: bounded, no gradient
        (None, 1.5, -1.0, 1.5, 1.5, False),  # a bad action that became likelier is pushed down in full
        (None, 0.5, 1.0, -0.5, -0.5, False),
        (None, 0.5, -1.0, 0.8, 0.0, True),  # below clip_low
        (None, 0.9, -1.0, 0.9, 0.9, False),
        (None, 3.0, 0.0, 0.0, 0.0, False),
        # arXiv 1912.09729: max(min(r A, clip(r) A), c A) for A < 0.
        (3.0, 2.9, -1.0, 2.9, 2.9, False),
        (3.0, 3.5, -2.0, 6.0, 0.0, True),  # an unlikely token that became likely stops pushing: its loss is 3 times |A|
        (3.0, 3.5, 2.0, -2.56, 0.0, True),  # a good one is bounded by clip_high as before
        (3.0, 0.5, -1.0, 0.8, 0.0, True),
    ],
)
def test_the_clipped_surrogate_by_hand(
    dual_clip: float | None, ratio: float, advantage: float, loss: float, gradient: float, clipped: bool
) -> None:
    settings = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": dual_clip}
    terms, slope = of_one_token(clipped_surrogate, ratio, advantage, **settings)
    assert (terms.loss.item(), slope) == pytest.approx((loss, gradient))
    assert terms.ratio.item() == pytest.approx(ratio)
    assert bool(terms.clipped) is clipped


RATIOS = [0.01, 0.5, 0.9, 1.0, 1.1, 2.0, 4.0, 30.0]


@pytest.mark.parametrize("advantage", [-2.0, 0.0, 0.5])
@pytest.mark.parametrize("ratio", RATIOS)
def test_cispo_by_hand(ratio: float, advantage: float) -> None:
    """arXiv 2506.13585: the weight is min(r, cap) without a gradient; the gradient is that of log π, for every token."""
    terms, slope = of_one_token(LOSSES["cispo"], ratio, advantage, loss="cispo", cispo_cap=3.0)
    weight = min(ratio, 3.0)
    assert terms.loss.item() == pytest.approx(-weight * advantage * (math.log(ratio) - 2), abs=1e-12)
    assert slope == pytest.approx(-weight * advantage, abs=1e-12)
    assert bool(terms.clipped) is (ratio > 3)


@pytest.mark.parametrize("advantage", [-2.0, 0.0, 0.5])
@pytest.mark.parametrize("ratio", RATIOS)
def test_sapo_by_hand(ratio: float, advantage: float) -> None:
    """arXiv 2511.20347: the gate 4 σ(τ(r - 1)) / τ; its slope is 4 p (1 - p) with p = σ(τ(r - 1)), 1 where r is 1."""
    terms, slope = of_one_token(LOSSES["sapo"], ratio, advantage, loss="sapo", sapo_tau_pos=0.7, sapo_tau_neg=1.6)
    tau = 0.7 if advantage > 0 else 1.6
    p = 1 / (1 + math.exp(-tau * (ratio - 1)))
    assert terms.loss.item() == pytest.approx(-4 / tau * p * advantage, rel=1e-6)
    assert slope == pytest.approx(-ratio * 4 * p * (1 - p) * advantage, rel=1e-6, abs=1e-12)
    assert not terms.clipped.any()


def test_kl_estimates_by_hand() -> None:
    new, reference = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.0])
    assert kl_estimate(new, reference, "k2").tolist() == pytest.approx([0.125, 0.0])
    assert kl_estimate(new, reference, "k3").tolist() == pytest.approx([math.exp(-0.5) - 1 + 0.5, 0.0])
    with pytest.raises(ValueError, match="gradient"):
        AlgorithmSection(kl_estimator="k1")  # type: ignore[arg-type]


def test_k2_has_the_gradient_of_the_divergence() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.randn(6, generator=generator, dtype=torch.float64), -1)
    new = torch.log_softmax(logits, -1)
    (exact,) = torch.autograd.grad((new.exp() * (new - reference)).sum(), logits, retain_graph=True)
    (ours,) = torch.autograd.grad((new.detach().exp() * kl_estimate(new, reference, "k2")).sum(), logits)
    assert torch.allclose(ours, exact)


def test_the_sequence_ratio_by_hand() -> None:
    """Sample 0 has log-ratios 0.1 and 0.3, so each of its tokens has the ratio exp(0.2); sample 1 is alone."""
    old = torch.zeros(3, dtype=torch.float64)
    new = torch.tensor([0.1, 0.3, -0.05], dtype=torch.float64, requires_grad=True)
    tokens = token_batch(new, old, torch.tensor([1.0, 1.0, -2.0], dtype=torch.float64), torch.tensor([0, 0, 1]))
    terms = LOSSES["gspo"](tokens, AlgorithmSection(clip_low=0.2, clip_high=0.3))
    terms.loss.sum().backward()
    first, second = math.exp(0.2), math.exp(-0.05)
    assert terms.ratio.tolist() == pytest.approx([first, first, second])
    assert terms.loss.tolist() == pytest.approx([-first, -first, 2 * second])
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-first, -first, 2 * second])


# --- against TRL


@pytest.fixture(scope="module")
def trainer() -> Any:
    """TRL's GRPOTrainer class; its import would load vLLM, which these tests do not need."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if "trl.trainer.grpo_trainer" not in sys.modules:
            patch.setitem(sys.modules, "vllm", None)  # type: ignore[arg-type]
        return importlib.import_module("trl.trainer.grpo_trainer").GRPOTrainer


class Numbers:
    """Random numbers of a rollout, as TRL holds them: [B, T] with a mask that has holes where a tool spoke."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        shape = (GROUPS * SIZE, LENGTH)
        self.mask = rng.random(shape) < 0.7
        self.mask[:, 0] = True
        for row, length in enumerate(rng.integers(1, LENGTH + 1, shape[0])):
            self.mask[row, length:] = False
        self.behaviour = self._normal(rng, -2.0, 0.7).clip(max=-0.01)
        self.old = self.behaviour + self._normal(rng, 0.0, 0.4)
        self.new = self.old + self._normal(rng, 0.0, 0.3)
        self.reference = self.old + self._normal(rng, 0.0, 0.5)
        self.entropy = self._normal(rng, 3.0, 0.5)
        self.rewards = rng.choice([0.0, 0.5, 1.0], shape[0])
        self.rewards[:SIZE] = 0.1  # a group that teaches nothing

    def _normal(self, rng: np.random.Generator, mean: float, deviation: float) -> np.ndarray:
        return rng.normal(mean, deviation, self.mask.shape).astype(np.float32)

    def groups(self) -> list[TrajectoryGroup]:
        """The same as trajectories: one prompt token, then the row."""
        groups = []
        for group in range(GROUPS):
            members = []
            for row in range(group * SIZE, (group + 1) * SIZE):
                mask = np.append(False, self.mask[row])
                edges = np.flatnonzero(np.diff(np.append(mask, False).astype(int), prepend=0))
                turns = [
                    Turn(int(start), int(stop), 0, StopReason.END_OF_TURN)
                    for start, stop in zip(edges[::2], edges[1::2], strict=True)
                ]
                turns[-1] = Turn(turns[-1].start, turns[-1].stop, 0, StopReason.STOP, float(self.rewards[row]))
                logprobs = np.where(mask, np.append(0, self.behaviour[row]), 0).astype(np.float32)
                ids = np.arange(LENGTH + 1, dtype=np.int32)
                members.append(
                    Trajectory(str(row), ids, mask, logprobs, tuple(turns), TrajectoryStatus.COMPLETED).check()
                )
            groups.append(TrajectoryGroup(str(group), group, members))
        return groups


class GivenLogprobs(PolicyUpdater):
    """The update with log-probabilities that a test chooses instead of a model's."""

    def __init__(self, settings: AlgorithmSection) -> None:
        policy = MagicMock(critic=None)
        policy.backbone.device = torch.device("cpu")
        super().__init__(policy, PolicyConfig(algorithm=settings))
        self.given: dict[int, tuple[Tensor, Tensor]] = {}

    def logprobs(self, micro: MicroBatch, entropy: str = "none") -> Found:
        return Found(*self.given[id(micro)], None, None)


def micro_batch(samples: list[Sample]) -> MicroBatch:
    """The part of a micro-batch that the loss reads."""
    sampled = [sample.trajectory.loss_mask for sample in samples]

    counts = [mask.sum() for mask in sampled]

    nothing = np.zeros(0)
    return MicroBatch(
        nothing, nothing, nothing, [], nothing, nothing, nothing,
        behaviour=np.concatenate([s.trajectory.logprobs[mask] for s, mask in zip(samples, sampled, strict=True)]),
        sample=np.repeat(np.arange(len(samples)), counts),
        turn=np.zeros(sum(counts), dtype=np.int64),
        weight=np.repeat(np.array([sample.weight for sample in samples], dtype=np.float32), counts),
        advantage=np.concatenate([sample.advantage for sample in samples]),
    )  # fmt: skip


def ours(numbers: Numbers, settings: AlgorithmSection, parts: int) -> tuple[float, Tensor, UpdateStats]:
    """Loss, gradient [B, T] and statistics of one optimiser step that is cut into micro-batches."""
    plan = plan_update(numbers.groups(), settings, np.random.default_rng(0), max_new_tokens=MAX_NEW_TOKENS)
    (batch,) = plan.batches
    samples = [
        Sample(one, batch.advantages[one.trajectory_id], batch.minibatches[0].weights[one.trajectory_id])
        for group in batch.minibatches[0].groups
        for one in group
    ]
    updater, stats = GivenLogprobs(settings), UpdateStats()
    new = torch.tensor(numbers.new, requires_grad=True)
    packed: list[MicroBatch] = []
    for part in range(parts):
        chosen = samples[part::parts]
        rows = [int(sample.trajectory.trajectory_id) for sample in chosen]
        place = (
            np.repeat(rows, numbers.mask[rows].sum(1)),
            np.concatenate([np.flatnonzero(numbers.mask[r]) for r in rows]),
        )
        packed.append(micro := micro_batch(chosen))
        micro.old, micro.reference = torch.tensor(numbers.old)[place], torch.tensor(numbers.reference)[place]
        updater.given[id(micro)] = (new[place], torch.tensor(numbers.entropy)[place])
    total = sum(updater.loss(micro, stats) for micro in packed)
    assert isinstance(total, Tensor)
    total.backward()
    assert new.grad is not None
    return float(total.detach()), new.grad, stats


def prompts_of(mask: Tensor) -> dict[str, Tensor]:
    one, ids = torch.ones(len(mask), 1, dtype=torch.long), torch.zeros(mask.shape, dtype=torch.long)
    return {"prompt_ids": 0 * one, "prompt_mask": one, "completion_ids": ids}


def theirs(
    trainer: Any, numbers: Numbers, loss: str, config: AlgorithmSection, advantages: np.ndarray
) -> tuple[float, Tensor, dict[str, list[float]]]:
    """The same by `GRPOTrainer._compute_loss`."""
    new = torch.tensor(numbers.new, requires_grad=True)
    mask = torch.tensor(numbers.mask).int()
    metrics: dict[str, dict[str, list[float]]] = {"train": defaultdict(list)}
    stub = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, torch.tensor(numbers.entropy), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="sequence" if config.loss == "gspo" else "token",
        beta=config.kl_coef,
        args=SimpleNamespace(
            use_bias_correction_kl=False,
            delta=config.dual_clip,
            steps_per_generation=1,
            sapo_temperature_pos=config.sapo_tau_pos,
            sapo_temperature_neg=config.sapo_tau_neg,
        ),
        loss_type=loss,
        epsilon_low=config.clip_low,
        epsilon_high=config.cispo_cap if loss == "cispo" else config.clip_high,
        use_vllm=config.tis_cap is not None,
        vllm_importance_sampling_correction=True,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_NEW_TOKENS,
        _entropy_bonus_enabled=config.entropy_coef > 0,
        use_adaptive_entropy=False,
        entropy_coef=config.entropy_coef,
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=True
        ),
        _metrics=metrics,
    )
    ratio = torch.exp(torch.tensor(numbers.old) - torch.tensor(numbers.behaviour))
    inputs = {
        **prompts_of(mask),
        "completion_mask": torch.ones_like(mask),
        "tool_mask": mask,
        "advantages": torch.tensor(advantages, dtype=torch.float32),
        "old_per_token_logps": torch.tensor(numbers.old),
        "ref_per_token_logps": torch.tensor(numbers.reference),
        "importance_sampling_ratio": ratio.clamp(max=config.tis_cap or math.inf),  # mode token_truncate
        "num_items_in_batch": mask.sum(),
    }
    value = trainer._compute_loss(stub, None, inputs)
    value.backward()
    assert new.grad is not None
    return float(value.detach()), new.grad, metrics["train"]


STD = AlgorithmSection(advantage_normalization="std")


def settings_of(preset: str, **constants: Any) -> AlgorithmSection:
    """TRL divides by the standard deviation whatever its loss."""
    return AlgorithmSection(preset=preset, **{"advantage_normalization": "std", **constants})


CONSTANTS: dict[str, dict[str, Any]] = {
    "plain": {"clip_low": 0.2, "clip_high": 0.2, "tis_cap": None},
    "clip-higher": {"clip_low": 0.1, "clip_high": 0.35, "tis_cap": None},
    "kl": {"clip_low": 0.2, "clip_high": 0.28, "tis_cap": None, "kl_coef": 0.3},
    "correction": {"clip_low": 0.2, "clip_high": 0.28, "tis_cap": 1.5},
    "correction and kl": {"clip_low": 0.2, "clip_high": 0.28, "tis_cap": 2.0, "kl_coef": 0.1},
    "dual clip": {"clip_low": 0.2, "clip_high": 0.28, "tis_cap": None, "dual_clip": 1.4},
}


def agree(
    trainer: Any, numbers: Numbers, loss: str, config: AlgorithmSection, parts: int
) -> tuple[UpdateStats, dict[str, list[float]]]:
    """Value and gradient of both; returns our statistics and their metrics."""
    advantages = np.concatenate(plan_update(numbers.groups(), STD, np.random.default_rng(0)).advantages)
    assert np.count_nonzero(advantages[:SIZE]) == 0 < np.count_nonzero(advantages)
    value, gradient, stats = ours(numbers, config, parts)
    expected, expected_gradient, metrics = theirs(trainer, numbers, loss, config, advantages)
    assert value == pytest.approx(expected, abs=2e-6)
    assert torch.allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-8)
    assert expected_gradient.abs().max() > 1e-3
    assert stats["policy/loss"] == pytest.approx(expected, abs=2e-6)
    return stats, metrics


@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize("name", CONSTANTS)
@pytest.mark.parametrize("parts", [1, 3])
def test_loss_and_gradient_equal_those_of_trl(trainer: Any, loss: str, name: str, parts: int) -> None:
    numbers, config = Numbers(seed=len(name)), settings_of(loss, **CONSTANTS[name])
    stats, metrics = agree(trainer, numbers, loss, config, parts)
    # Their fraction is over all tokens, ours over those that have an advantage or a penalty.
    clipped = metrics["clip_ratio/region_mean"][0] * numbers.mask.sum()
    if config.dual_clip is None:  # they do not count what it stops
        assert stats["policy/clip_fraction"] == pytest.approx(clipped, abs=1e-3)
    else:
        assert stats["policy/clip_fraction"] > clipped + 1
    assert stats["policy/clip_fraction"] > 3
    if config.kl_coef:
        assert stats["policy/kl"] / stats["tokens"] == pytest.approx(metrics["kl"][0], rel=1e-5)


GSPO = [{**CONSTANTS["plain"], "loss": "gspo"}, {**CONSTANTS["clip-higher"], "loss": "gspo"}]


@pytest.mark.parametrize("config", [*(settings_of("grpo", **one) for one in GSPO), settings_of("gspo", tis_cap=None)])
@pytest.mark.parametrize("parts", [1, 3])
def test_gspo_and_its_gradient_equal_those_of_trl(trainer: Any, config: AlgorithmSection, parts: int) -> None:
    """With one advantage per sequence, our gradient through each token equals theirs through the mean."""
    stats, _ = agree(trainer, Numbers(seed=7), "grpo", config, parts)
    if config.preset == "gspo":  # bounds this narrow stop about half of the tokens
        assert 0 < stats["policy/clip_fraction"] < stats["tokens"]


@pytest.mark.parametrize("loss", ["cispo", "sapo"])
@pytest.mark.parametrize("name", ["plain", "kl", "correction"])
@pytest.mark.parametrize("parts", [1, 3])
def test_cispo_and_sapo_and_their_gradients_equal_those_of_trl(trainer: Any, loss: str, name: str, parts: int) -> None:
    own = {"cispo_cap": 1.2} if loss == "cispo" else {"sapo_tau_pos": 0.8, "sapo_tau_neg": 1.5}
    stats, _ = agree(trainer, Numbers(seed=8), loss, settings_of(loss, **CONSTANTS[name], **own), parts)
    assert (stats["policy/clip_fraction"] > 3) is (loss == "cispo")


def test_the_rloo_preset_takes_the_first_step_of_trls_trainer(trainer: Any) -> None:
    """Theirs multiplies the likelihood of whole answers, ours adds up tokens over a constant: equal where the ratio is 1."""
    rloo_trainer = importlib.import_module("trl.trainer.rloo_trainer").RLOOTrainer
    numbers, config = Numbers(seed=10), settings_of("rloo", tis_cap=None)
    numbers.new = numbers.old
    mask = torch.tensor(numbers.mask).int()
    rewards = torch.tensor(numbers.rewards, dtype=torch.float32).view(GROUPS, SIZE)
    advantages = (rewards - (rewards.sum(1, keepdim=True) - rewards) / (SIZE - 1)).flatten()
    new = torch.tensor(numbers.new, requires_grad=True)
    stub = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, torch.tensor(numbers.entropy), None),
        aux_loss_enabled=False,
        epsilon_low=0.2,
        epsilon_high=0.2,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x),
        _metrics={"train": defaultdict(list)},
    )
    old = (torch.tensor(numbers.old) * mask).sum(1)
    inputs = {**prompts_of(mask), "completion_mask": mask, "advantages": advantages, "old_logps": old}
    rloo_trainer._compute_loss(stub, None, inputs).backward()
    assert new.grad is not None
    _, gradient, _ = ours(numbers, config, parts=2)
    assert torch.allclose(gradient * MAX_NEW_TOKENS, new.grad * mask, rtol=1e-5, atol=1e-7)
    assert gradient.abs().max() > 1e-3


def test_the_entropy_bonus_of_the_token_mean_equals_that_of_trl(trainer: Any) -> None:
    numbers, config = Numbers(seed=3), settings_of("dapo", tis_cap=None, entropy_coef=0.05)
    stats, metrics = agree(trainer, numbers, "dapo", config, parts=2)
    assert stats["policy/entropy"] / stats["tokens"] == pytest.approx(metrics["entropy"][0], rel=1e-5)


def test_mismatch_and_change_are_measured_from_the_right_policies() -> None:
    numbers = Numbers(seed=4)
    _, _, stats = ours(numbers, settings_of("dapo", kl_coef=1e-9), parts=2)
    gap = (numbers.old - numbers.behaviour)[numbers.mask]
    change = (numbers.new - numbers.old)[numbers.mask]
    figures = stats.metrics()
    assert stats["tokens"] == numbers.mask.sum()
    assert figures["mismatch/kl"] == pytest.approx(np.mean(np.exp(gap) - 1 - gap), rel=1e-4)
    assert figures["mismatch/token_mult_prob_error"] == pytest.approx(np.mean(np.exp(np.abs(gap))), rel=1e-4)
    assert figures["policy/approx_kl"] == pytest.approx(np.mean(np.exp(change) - 1 - change), rel=1e-4)
    assert figures["policy/ratio_max"] == pytest.approx(np.exp(change.max()), rel=1e-5)


# --- What corrects the mismatch between engine and learner: weights by hand, against TRL's, and in the update


MISMATCHES = [0.2, 0.5, 0.9, 1.0, 1.8, 3.0, 6.0]


def weights_of(
    ratios: list[float], sample: list[int] | None = None, **settings: object
) -> tuple[list[float], list[bool]]:
    """Of tokens whose learner's log-probability is log(ratio) above the engine's."""
    behaviour = torch.full((len(ratios),), -2.0, dtype=torch.float64)
    old = behaviour + torch.tensor(ratios, dtype=torch.float64).log()
    ids = torch.tensor(sample or range(len(ratios)))
    weights, masked = mismatch_weights(old.requires_grad_(), behaviour, ids, AlgorithmSection(**settings))
    assert not weights.requires_grad
    return weights.tolist(), masked.tolist()


def test_none_and_truncation_by_hand() -> None:
    assert weights_of(MISMATCHES, mismatch="none") == ([1.0] * 7, [False] * 7)
    weights, masked = weights_of(MISMATCHES)
    assert weights == pytest.approx([min(ratio, 2.0) for ratio in MISMATCHES])
    assert not any(masked)
    assert weights_of(MISMATCHES, tis_cap=None)[0] == [1.0] * 7


def test_the_token_mask_is_two_sided_and_keeps_the_ratio_inside() -> None:
    weights, masked = weights_of(MISMATCHES, mismatch="mask", mismatch_low=0.6, mismatch_high=2.5)
    assert weights == pytest.approx([0, 0, 0.9, 1.0, 1.8, 0, 0])
    assert masked == [True, True, False, False, False, True, True]
    assert weights_of([0.49, 0.51, 4.9, 5.1], mismatch="mask")[0] == pytest.approx([0, 0.51, 4.9, 0])


def test_the_sequence_mask_compares_geometric_means() -> None:
    """Trajectory 0: sqrt(0.5 · 2) = 1, kept; 1: sqrt(1.3 · 1.3) = 1.3, out; 2: a single token at 1.05, kept."""
    ratios, sample = [0.5, 1.3, 2.0, 1.3, 1.05], [0, 1, 0, 1, 2]
    settings = {"mismatch": "sequence_mask", "mismatch_low": 0.9, "mismatch_high": 1.1}
    weights, masked = weights_of(ratios, sample, **settings, tis_cap=1.5)
    assert masked == [False, True, False, True, False]
    assert weights == pytest.approx([0.5, 0, 1.5, 0, 1.05])
    assert weights_of(ratios, sample, **settings, tis_cap=None)[0] == [1.0, 0.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize("mismatch", ["mask", "sequence_mask"])
def test_masked_tokens_have_no_gradient_and_are_counted(mismatch: str) -> None:
    numbers = Numbers(seed=5)
    bounds = {"mismatch_low": 0.8, "mismatch_high": 1.25}
    _, gradient, stats = ours(numbers, settings_of("dapo", mismatch=mismatch, **bounds, entropy_coef=1e-9), parts=3)
    gap = torch.tensor(numbers.old - numbers.behaviour)
    mask = torch.tensor(numbers.mask)
    compared = gap.exp() if mismatch == "mask" else ((gap * mask).sum(1) / mask.sum(1)).exp()[:, None].expand_as(gap)
    outside: Tensor = ((compared < 0.8) | (compared > 1.25)) & mask
    assert 0 < outside.sum() < mask.sum()
    assert stats["mismatch/masked"] == float(outside.sum())
    assert stats.metrics()["mismatch/masked"] == pytest.approx(float(outside.sum() / mask.sum()))
    assert not gradient[outside].any()
    _, whole, plain = ours(numbers, settings_of("dapo", mismatch="none", entropy_coef=1e-9), parts=3)
    assert plain.metrics()["mismatch/masked"] == 0.0
    inside = ~outside & mask
    weight = gap.exp() if mismatch == "mask" else gap.exp().clamp(max=2.0)
    assert torch.allclose(gradient[inside], (whole * weight)[inside], rtol=1e-4, atol=1e-8)
    assert math.isfinite(float(gradient.sum()))
