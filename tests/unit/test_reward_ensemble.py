"""The reward ensemble: its losses and networks against independent computations, what it learns, and exact restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from label_support import pair, random_pairs, segment
from scipy.special import expit, log_expit
from scipy.stats import spearmanr

from rl_vlm.config import RewardModelSection
from rl_vlm.labelling.labels import SKIPPED, Label, Score, Segment, SegmentPair
from rl_vlm.preference.reward_examples import Examples
from rl_vlm.preference.reward_model import FitReport, RewardEnsemble, preference_loss, score_loss
from rl_vlm.preference.reward_networks import ImageCNN, MLPMembers
from rl_vlm.types import UserInputError

SMALL = {"channels": (4, 8, 8, 8), "size": 2}


def image_ensemble(seed: int = 0, size: int = 48, **more: Any) -> RewardEnsemble:
    return RewardEnsemble((size, size, 3), RewardModelSection(**{**SMALL, **more}), seed)


def state_pairs(count: int, steps: int = 3, seed: int = 0) -> list[SegmentPair]:
    """Segments with the true reward 2 o₀ - a."""
    rng = np.random.default_rng(seed)

    def one() -> Segment:
        observations = rng.normal(size=(steps, 4)).astype(np.float32)
        actions = rng.normal(size=(steps, 1)).astype(np.float32)
        return Segment(observations, actions, 2 * observations[:, 0] - actions[:, 0])

    return [SegmentPair(one(), one()) for _ in range(count)]


def truth(pairs: list[SegmentPair]) -> list[Label]:
    return [Label(int(p.first.true_rewards.sum() < p.second.true_rewards.sum())) for p in pairs]  # type: ignore[arg-type]


def examples_of(ensemble: RewardEnsemble, pairs: list[SegmentPair]) -> Examples:
    examples = Examples(2)
    assert ensemble.add_pairs(examples, pairs, truth(pairs)) == len(pairs)
    return examples


def fit(ensemble: RewardEnsemble, pairs: list[SegmentPair]) -> FitReport:
    return ensemble.fit(examples_of(ensemble, pairs))


def test_the_loss_is_the_bradley_terry_likelihood() -> None:
    rng = np.random.default_rng(0)
    returns = rng.normal(size=(3, 7, 2)).astype(np.float32)
    first = rng.uniform(size=(3, 7)).astype(np.float32)
    targets = np.stack([first, 1 - first], -1)
    difference = (returns[..., 0] - returns[..., 1]).astype(np.float64)
    expected = -(first * log_expit(difference) + (1 - first) * log_expit(-difference)).mean(1)
    found = preference_loss(torch.from_numpy(returns), torch.from_numpy(targets))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_the_loss_of_scores_is_their_squared_error() -> None:
    returns, targets = torch.tensor([[[0.5], [0.0]]]), torch.tensor([[[1.0], [-1.0]]])
    assert score_loss(returns, targets).tolist() == [pytest.approx((0.25 + 1.0) / 2)]


@pytest.mark.parametrize(
    ("label", "target"),
    [
        (Label(0), (0.9, 0.1)),
        (Label(1, (0.4, 0.2, 0.4)), (0.1, 0.9)),
        (Label(-1), None),
        (Label(-1, error="HTTP 500"), None),
        (Label(-1, error=SKIPPED), None),
    ],
)
def test_labels_become_targets(label: Label, target: tuple[float, float] | None) -> None:
    examples = Examples(2)
    ensemble = RewardEnsemble((5,), RewardModelSection(architecture="mlp", label_margin=0.1))
    ensemble.add_pairs(examples, state_pairs(1), [label])
    assert examples.targets == ([] if target is None else [pytest.approx(target)])


def test_the_stacked_perceptrons_are_perceptrons() -> None:
    torch.manual_seed(0)
    members = MLPMembers(5, RewardModelSection(size=2, hidden=8, layers=3))
    x = torch.randn(4, 5)
    for number, found in enumerate(members([x, x])):
        hidden = x
        for layer in range(4):
            linear = torch.nn.Linear(members.weights[layer].shape[1], members.weights[layer].shape[2])
            linear.weight.data, linear.bias.data = members.weights[layer][number].T, members.biases[layer][number, 0]
            hidden = linear(hidden) if layer == 3 else torch.nn.LeakyReLU()(linear(hidden))
        torch.testing.assert_close(found, torch.tanh(hidden)[:, 0])


def test_the_cnn_has_the_originals_layers() -> None:
    torch.manual_seed(0)
    network = ImageCNN(200, 200, RewardModelSection())
    convolutions = [layer for layer in network.features if isinstance(layer, torch.nn.Conv2d)]
    assert [layer.kernel_size[0] for layer in convolutions] == [5, 3, 3, 3]
    assert [layer.stride[0] for layer in convolutions] == [3, 2, 2, 2]
    assert [layer.out_channels for layer in convolutions] == [16, 32, 64, 128]
    # 200 → 66 → 32 → 15 → 7
    assert network.last.in_features == 128 * 7 * 7
    assert network.last.weight.abs().max() <= 1e-3 < convolutions[0].weight.abs().max()
    assert all(layer.bias is not None and not layer.bias.any() for layer in convolutions)
    for layer in convolutions:  # ours: He's initial weights, variance 2 / inputs
        assert float(layer.weight.var()) * layer.in_channels * layer.kernel_size[0] ** 2 == pytest.approx(2, rel=0.15)
    images = torch.rand(2, 3, 200, 200)
    expected = torch.tanh(network.features(2 * images - 1).flatten(1) @ network.last.weight.T + network.last.bias)[:, 0]
    torch.testing.assert_close(network(images), expected)


def test_the_reward_is_the_mean_of_the_members_and_a_preference_their_sigmoid() -> None:
    ensemble = RewardEnsemble((5,), RewardModelSection(architecture="mlp", hidden=16))
    pairs = state_pairs(6)
    inputs = np.concatenate([np.concatenate([p.first.observations, p.first.actions], 1) for p in pairs])
    members = ensemble.member_rewards(inputs)
    assert members.shape == (3, 18) and ensemble.input_kind == "state_action"
    np.testing.assert_allclose(ensemble.rewards(inputs), members.mean(0), rtol=1e-6)
    first = members.reshape(3, 6, 3).sum(-1)
    second = ensemble.segment_returns([p.second for p in pairs])
    np.testing.assert_allclose(ensemble.preferences(pairs), expit(first - second), rtol=1e-5)
    assert ensemble.rewards(inputs[:0]).shape == (0,)


def test_members_begin_different_and_seeds_decide_everything() -> None:
    frames = np.concatenate([p.first.frames for p in random_pairs(4, size=48)])  # type: ignore[misc]
    one, again, other = image_ensemble(1), image_ensemble(1), image_ensemble(2)
    assert len({tuple(row) for row in one.member_rewards(frames).tolist()}) == 2
    assert (one.rewards(frames) == again.rewards(frames)).all() and (one.rewards(frames) != other.rewards(frames)).all()


@pytest.mark.slow
def test_states_and_actions_are_ranked_after_some_hundred_pairs() -> None:
    ensemble = RewardEnsemble((5,), RewardModelSection(architecture="mlp", hidden=32, min_gradient_steps=150))
    pairs = state_pairs(300)
    report = fit(ensemble, pairs)
    fresh = [p.first for p in state_pairs(100, seed=9)]
    found = ensemble.segment_returns(fresh).mean(0)
    assert spearmanr(found, [s.true_rewards.sum() for s in fresh]).statistic > 0.9
    assert report.accuracy > 0.9 and len(report.losses) >= 150 and report.losses[0] == pytest.approx(np.log(2), abs=0.2)


@pytest.mark.slow
def test_pictures_are_ranked_segments_of_several_frames_included() -> None:
    rng = np.random.default_rng(0)

    def one() -> Segment:
        return segment(rng.uniform(-30, 30) + np.array([0.0, 1.0]), size=48)

    pairs = [SegmentPair(one(), one()) for _ in range(60)]
    ensemble = image_ensemble(lr=2e-3, batch=20, min_gradient_steps=60)
    fit(ensemble, pairs)
    fresh = [segment([angle], size=48) for angle in np.linspace(-30, 30, 31)]
    assert spearmanr(ensemble.segment_returns(fresh).mean(0), [s.true_rewards[0] for s in fresh]).statistic > 0.8


@pytest.mark.slow
def test_training_stops_early_but_not_before_its_gradient_steps() -> None:
    pairs = state_pairs(64)
    options: dict[str, Any] = {"architecture": "mlp", "hidden": 32, "lr": 3e-3, "batch": 32, "epochs": 200}
    eager = RewardEnsemble((5,), RewardModelSection(**options, min_gradient_steps=0))
    found = fit(eager, pairs)
    assert found.accuracy > 0.97 and found.epochs < 200
    patient = RewardEnsemble((5,), RewardModelSection(**options, min_gradient_steps=300))
    assert len(fit(patient, pairs).losses) == 300
    short = RewardEnsemble((5,), RewardModelSection(**{**options, "epochs": 2}, min_gradient_steps=0, stop_accuracy=2))
    assert fit(short, pairs).epochs == 2
    # Fewer pairs than a batch: epochs are added until there were enough steps.
    few = RewardEnsemble((5,), RewardModelSection(**{**options, "epochs": 2}, min_gradient_steps=10))
    assert fit(few, pairs[:5]).epochs == 10


@pytest.mark.slow
def test_scores_are_learned() -> None:
    ensemble = RewardEnsemble((5,), RewardModelSection(architecture="mlp", hidden=32, lr=3e-3, min_gradient_steps=300))
    segments = [p.first for p in state_pairs(200, steps=1)]
    wanted = expit([float(s.true_rewards[0]) for s in segments])
    examples = Examples(1)
    scores = [*(Score(float(value)) for value in wanted[:198]), Score(None), Score(0.5, error="down")]
    assert ensemble.add_scores(examples, segments, scores) == 198
    report = ensemble.fit(examples)
    assert report.losses[-1] < 0.05 and np.isnan(report.accuracy)
    found = ensemble.segment_returns(segments).mean(0)
    assert np.abs(found - (2 * wanted - 1)).mean() < 0.15


@pytest.mark.parametrize("architecture", ["cnn", "mlp", pytest.param("resnet18", marks=pytest.mark.slow)])
def test_a_restart_changes_nothing(tmp_path: Path, architecture: str) -> None:
    if architecture == "mlp":
        pairs = state_pairs(12)
        shape: tuple[int, ...] = (5,)
    else:
        pairs = random_pairs(6, size=48)
        shape = (48, 48, 3)
    small = {**SMALL, "size": 1 if architecture == "resnet18" else 2}
    options = RewardModelSection(architecture=architecture, **small, batch=3, epochs=1, min_gradient_steps=2)  # type: ignore[arg-type]
    straight, resumed = (RewardEnsemble(shape, options, seed) for seed in (1, 2))
    examples, again = examples_of(straight, pairs), examples_of(resumed, pairs)
    straight.fit(examples)
    straight.save(tmp_path / "reward.safetensors")
    resumed.load(tmp_path / "reward.safetensors")
    assert resumed.fit(again).losses == straight.fit(examples).losses
    inputs = np.concatenate([p.first.frames for p in pairs]) if architecture != "mlp" else np.ones((3, 5), np.float32)  # type: ignore[misc]
    assert (resumed.member_rewards(inputs) == straight.member_rewards(inputs)).all()


def test_a_new_run_takes_the_weights_of_another_and_neither_its_random_numbers_nor_its_moments(tmp_path: Path) -> None:
    examples = examples_of(image_ensemble(), random_pairs(6, size=48))
    other, begun, loaded = image_ensemble(), image_ensemble(), image_ensemble()
    other.fit(examples)
    other.save(tmp_path / "other.safetensors")
    loaded.load(tmp_path / "other.safetensors", weights_only=True)
    begun.members.load_state_dict(other.members.state_dict())
    assert loaded.fit(examples).losses == pytest.approx(begun.fit(examples).losses, rel=1e-4)


def test_a_file_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    image_ensemble().save(tmp_path / "a")
    with pytest.raises(UserInputError, match="does not fit"):
        image_ensemble(channels=(4, 8, 8, 16)).load(tmp_path / "a")
    (tmp_path / "b").write_bytes(b"nothing")
    with pytest.raises(UserInputError, match="does not fit"):
        image_ensemble().load(tmp_path / "b")


def test_inputs_of_another_size_are_refused() -> None:
    ensemble = image_ensemble()
    with pytest.raises(UserInputError, match=r"\(64, 64, 3\)"):
        ensemble.rewards(np.zeros((1, 64, 64, 3), np.uint8))
    with pytest.raises(UserInputError, match="sees inputs of"):
        ensemble.inputs_of(pair(1, 2, size=64).first)
    with pytest.raises(UserInputError, match="pictures"):
        ensemble.inputs_of(state_pairs(1)[0].first)
    with pytest.raises(UserInputError, match="too small"):
        image_ensemble(size=20)
    with pytest.raises(UserInputError, match="kernels"):
        image_ensemble(kernels=(3,))


def test_a_stride_is_the_originals_resize_factor() -> None:
    frames = np.random.default_rng(0).integers(0, 256, (3, 144, 144, 3), dtype=np.uint8)
    strided, plain = image_ensemble(size=144, stride=3), image_ensemble(size=48)
    assert (strided.rewards(frames) == plain.rewards(frames[:, ::3, ::3])).all()
    assert (strided.rewards(frames[:, ::3, ::3]) == plain.rewards(frames[:, ::3, ::3])).all()  # a ring may hold them so


@pytest.mark.parametrize("unpacked_bytes", [2**30, 0])
def test_pictures_are_packed_without_loss(unpacked_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_vlm.preference.reward_examples._UNPACKED_BYTES", unpacked_bytes)
    examples, pairs = Examples(2), random_pairs(5, size=200)
    assert image_ensemble(size=200).add_pairs(examples, pairs, [Label(0)] * 5) == len(examples) == 5
    found = examples.reader()(np.array([2, 0]))
    for parts, one in zip(found, (pairs[2], pairs[0]), strict=True):
        assert (parts[0] == one.first.frames).all() and (parts[1] == one.second.frames).all()
    assert sum(len(part) for row in examples._inputs for part in row) < 5 * 2 * 200 * 200 * 3 / 20
