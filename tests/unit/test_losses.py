"""Losses: by hand, and equal to TRL's GRPOTrainer in value and gradient, through our weights and our update."""

from __future__ import annotations

import importlib
import math
import sys
import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_vlm.config import AlgorithmSection
from rl_vlm.learning.batching import MicroBatch, TrainSample
from rl_vlm.learning.losses import (
    clipped_surrogate,
    get_loss,
    kl_estimate,
    loss_names,
    truncated_importance_weights,
)
from rl_vlm.learning.plan import plan_update
from rl_vlm.learning.update import PackedMinibatch, PolicyUpdater, UpdateStats
from rl_vlm.types import StopReason, Trajectory, TrajectoryGroup, TrajectoryStatus, Turn

GROUPS, SIZE, LENGTH, MAX_NEW_TOKENS = 3, 4, 12, 20


# --- by hand


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, False),
        (1.2, 1.0, -1.2, -1.2, False),  # within clip_high
        (1.5, 1.0, -1.28, 0.0, True),  # above: bounded, no gradient
        (1.5, -1.0, 1.5, 1.5, False),  # a bad action that became likelier is pushed down in full
        (0.5, 1.0, -0.5, -0.5, False),
        (0.5, -1.0, 0.8, 0.0, True),  # below clip_low
        (0.9, -1.0, 0.9, 0.9, False),
        (3.0, 0.0, 0.0, 0.0, False),
    ],
)
def test_the_clipped_surrogate_by_hand(
    ratio: float, advantage: float, loss: float, gradient: float, clipped: bool
) -> None:
    """The gradient is with respect to the new log-probability, so it is the ratio times the advantage, or nothing."""
    old = torch.tensor([-2.0], dtype=torch.float64)
    new = (old + math.log(ratio)).requires_grad_()
    terms = clipped_surrogate(
        new, old, torch.tensor([advantage], dtype=torch.float64), AlgorithmSection(clip_low=0.2, clip_high=0.28)
    )
    terms.loss.sum().backward()
    assert terms.loss.item() == pytest.approx(loss)
    assert new.grad is not None
    assert new.grad.item() == pytest.approx(gradient)
    assert terms.ratio.item() == pytest.approx(ratio)
    assert bool(terms.clipped) is clipped


def test_importance_weights_are_capped_and_carry_no_gradient() -> None:
    old = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    behaviour = torch.tensor([-1.0, -3.0, -0.5])
    weights = truncated_importance_weights(old, behaviour, 2.0)
    assert weights.tolist() == pytest.approx([1.0, 2.0, math.exp(-0.5)])
    assert not weights.requires_grad
    assert truncated_importance_weights(old, behaviour, None).tolist() == [1.0, 1.0, 1.0]
    assert truncated_importance_weights(old, behaviour, 100.0).tolist() == pytest.approx(
        [1.0, math.exp(2), math.exp(-0.5)]
    )


def test_kl_estimates_by_hand() -> None:
    new, reference = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.0])
    assert kl_estimate(new, reference, "k1").tolist() == pytest.approx([0.5, 0.0])
    assert kl_estimate(new, reference, "k2").tolist() == pytest.approx([0.125, 0.0])
    assert kl_estimate(new, reference, "k3").tolist() == pytest.approx([math.exp(-0.5) - 1 + 0.5, 0.0])


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_kl_estimates_average_to_the_divergence(estimator: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    new, reference = torch.log_softmax(logits, -1)
    exact = (new.exp() * (new - reference)).sum()
    assert (new.exp() * kl_estimate(new, reference, estimator)).sum() == pytest.approx(float(exact))  # type: ignore[arg-type]


def test_k2_has_the_gradient_of_the_divergence() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.randn(6, generator=generator, dtype=torch.float64), -1)
    new = torch.log_softmax(logits, -1)
    (exact,) = torch.autograd.grad((new.exp() * (new - reference)).sum(), logits, retain_graph=True)
    (ours,) = torch.autograd.grad((new.detach().exp() * kl_estimate(new, reference, "k2")).sum(), logits)
    assert torch.allclose(ours, exact)


def test_each_loss_has_its_aggregation() -> None:
    expected = {"grpo": "sequence_mean", "dapo": "token_mean", "dr_grpo": "constant"}
    assert expected.items() <= {name: get_loss(name)[1] for name in loss_names()}.items()


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

    def __init__(self, loss: str, config: AlgorithmSection) -> None:
        backbone: Any = SimpleNamespace(device=torch.device("cpu"))
        builder: Any = None
        algorithm = config.model_copy(update={"loss": loss})
        super().__init__(backbone, builder, algorithm=algorithm, temperature=1.0)
        self.given: dict[int, tuple[Tensor, Tensor]] = {}

    def logprobs(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        return self.given[id(micro)]


def micro_batch(samples: list[TrainSample]) -> MicroBatch:
    """The part of a micro-batch that the loss reads."""
    sampled = [sample.trajectory.loss_mask for sample in samples]

    def spread(values: list[float]) -> np.ndarray:
        return np.repeat(np.array(values, dtype=np.float32), [mask.sum() for mask in sampled])

    nothing = np.zeros(0)
    return MicroBatch(
        nothing, nothing, nothing, [], nothing, nothing, nothing,
        behaviour=np.concatenate([s.trajectory.logprobs[mask] for s, mask in zip(samples, sampled, strict=True)]),
        advantage=spread([sample.advantage for sample in samples]),
        weight=spread([sample.weight for sample in samples]),
    )  # fmt: skip


def ours(numbers: Numbers, loss: str, config: AlgorithmSection, parts: int) -> tuple[float, Tensor, UpdateStats]:
    """Loss, gradient [B, T] and statistics of one optimiser step that is cut into micro-batches."""
    plan = plan_update(
        numbers.groups(),
        config,
        np.random.default_rng(0),
        aggregation=get_loss(loss)[1],
        max_new_tokens=MAX_NEW_TOKENS,
    )
    samples = [sample for group in plan.shards[0][0].groups for sample in group]
    updater, stats = GivenLogprobs(loss, config), UpdateStats()
    new = torch.tensor(numbers.new, requires_grad=True)
    packed = PackedMinibatch([])
    for part in range(parts):
        chosen = samples[part::parts]
        rows = [int(sample.trajectory.trajectory_id) for sample in chosen]
        place = (
            np.repeat(rows, numbers.mask[rows].sum(1)),
            np.concatenate([np.flatnonzero(numbers.mask[r]) for r in rows]),
        )
        packed.micro_batches.append(micro_batch(chosen))
        packed.old.append(torch.tensor(numbers.old)[place])
        packed.reference.append(torch.tensor(numbers.reference)[place])
        updater.given[id(packed.micro_batches[-1])] = (new[place], torch.tensor(numbers.entropy)[place])
    total = sum(updater.loss(packed, part, stats) for part in range(parts))
    assert isinstance(total, Tensor)
    total.backward()
    assert new.grad is not None
    return float(total.detach()), new.grad, stats


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
        importance_sampling_level="token",
        beta=config.kl_coef,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        loss_type=loss,
        epsilon_low=config.clip_low,
        epsilon_high=config.clip_high,
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
        "prompt_ids": torch.zeros(len(mask), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(mask), 1, dtype=torch.long),
        "completion_ids": torch.zeros(mask.shape, dtype=torch.long),
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


CONFIGS = {
    "plain": AlgorithmSection(clip_low=0.2, clip_high=0.2, tis_cap=None),
    "clip-higher": AlgorithmSection(clip_low=0.1, clip_high=0.35, tis_cap=None),
    "kl": AlgorithmSection(clip_low=0.2, clip_high=0.28, tis_cap=None, kl_coef=0.3),
    "correction": AlgorithmSection(clip_low=0.2, clip_high=0.28, tis_cap=1.5),
    "correction and kl": AlgorithmSection(clip_low=0.2, clip_high=0.28, tis_cap=2.0, kl_coef=0.1),
}


@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("parts", [1, 3])
def test_loss_and_gradient_equal_those_of_trl(trainer: Any, loss: str, name: str, parts: int) -> None:
    numbers, config = Numbers(seed=len(name)), CONFIGS[name]
    plan = plan_update(numbers.groups(), config, np.random.default_rng(0), aggregation="token_mean")
    advantages = np.concatenate(plan.advantages)
    assert np.count_nonzero(advantages[:SIZE]) == 0 < np.count_nonzero(advantages)
    value, gradient, stats = ours(numbers, loss, config, parts)
    expected, expected_gradient, metrics = theirs(trainer, numbers, loss, config, advantages)
    assert value == pytest.approx(expected, abs=2e-6)
    assert torch.allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-8)
    assert expected_gradient.abs().max() > 1e-3
    assert stats.loss == pytest.approx(expected, abs=2e-6)
    # Their fraction is over all tokens, ours over those that have an advantage or a penalty.
    clipped = metrics["clip_ratio/region_mean"][0] * numbers.mask.sum()
    assert stats.clipped == pytest.approx(clipped, abs=1e-3)
    assert stats.clipped > 3
    if config.kl_coef:
        assert stats.kl / stats.tokens == pytest.approx(metrics["kl"][0], rel=1e-5)


def test_the_entropy_bonus_of_the_token_mean_equals_that_of_trl(trainer: Any) -> None:
    numbers, config = Numbers(seed=3), AlgorithmSection(tis_cap=None, entropy_coef=0.05)
    plan = plan_update(numbers.groups(), config, np.random.default_rng(0), aggregation="token_mean")
    value, _, stats = ours(numbers, "dapo", config, parts=2)
    expected, _, metrics = theirs(trainer, numbers, "dapo", config, np.concatenate(plan.advantages))
    assert value == pytest.approx(expected, abs=2e-6)
    assert stats.entropy / stats.tokens == pytest.approx(metrics["entropy"][0], rel=1e-5)


def test_mismatch_and_change_are_measured_from_the_right_policies() -> None:
    numbers = Numbers(seed=4)
    _, _, stats = ours(numbers, "dapo", AlgorithmSection(kl_coef=1e-9), parts=2)
    gap = (numbers.old - numbers.behaviour)[numbers.mask]
    change = (numbers.new - numbers.old)[numbers.mask]
    figures = stats.metrics()
    assert stats.tokens == numbers.mask.sum()
    assert figures["mismatch/kl"] == pytest.approx(np.mean(np.exp(gap) - 1 - gap), rel=1e-4)
    assert figures["mismatch/token_mult_prob_error"] == pytest.approx(np.mean(np.exp(np.abs(gap))), rel=1e-4)
    assert figures["policy/approx_kl"] == pytest.approx(np.mean(np.exp(change) - 1 - change), rel=1e-4)
    assert figures["policy/ratio_max"] == pytest.approx(np.exp(change.max()), rel=1e-5)
