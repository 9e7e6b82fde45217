"""SAC's update: the written-out gradients equal autograd's, the losses equal Stable-Baselines3's, the step order is SAC's."""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from stable_baselines3.common.distributions import SquashedDiagGaussianDistribution
from stable_baselines3.sac.policies import SACPolicy

from rl_vlm.config import SACSection
from rl_vlm.models import products
from rl_vlm.models.products import onednn_product
from rl_vlm.preference.collection.collector import NumpyActor
from rl_vlm.preference.mlp import forward
from rl_vlm.preference.networks import SACNetworks, sample_actions
from rl_vlm.preference.sac import SACUpdater
from rl_vlm.preference.sac_losses import Batch, actor_loss, alpha_loss, critic_loss, critic_target

O, A, B = 5, 2, 40  # noqa: E741  (observation, action and batch size, as in the shapes)
SETTINGS = SACSection(hidden=16, depth=2, batch_size=B, target_update_every=1, compile="off")


def networks(seed: int = 0, scale: float = 0.2) -> SACNetworks:
    nets = SACNetworks(O, A, SETTINGS.hidden, SETTINGS.depth, SETTINGS.init_alpha, seed)
    generator = torch.Generator().manual_seed(seed + 100)
    with torch.no_grad():
        for vector in (nets.actor, nets.critics, nets.targets):
            vector.add_(torch.randn(vector.shape, generator=generator), alpha=scale)
    return nets


def batch(seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))

    continues = torch.from_numpy((rng.random(B) > 0.3).astype(np.float32))
    return Batch(normal(B, O), normal(B, A).tanh(), normal(B), normal(B, O), continues)


def noises(updater: SACUpdater, count: int) -> list[torch.Tensor]:
    """The noise that the next updates will draw."""
    generator = torch.Generator()
    generator.set_state(updater.generator.get_state())
    return [torch.randn((B, A), generator=generator) for _ in range(count)]


def test_written_out_gradients_equal_autograd() -> None:
    nets, data = networks(), batch()
    # The weights stay as they are, for comparison.
    updater = SACUpdater(nets, SETTINGS.model_copy(update={"lr": 1e-30, "alpha_lr": 1e-30}), seed=3)
    first, second = noises(updater, 2)
    expected_critics = torch.autograd.grad(
        critic_loss(nets, data, critic_target(nets, data, first, SETTINGS)), nets.critics
    )[0]
    loss, log_probs = actor_loss(nets, data, second, SETTINGS)
    expected_actor = torch.autograd.grad(loss, nets.actor)[0]
    expected_alpha = torch.autograd.grad(alpha_loss(nets, log_probs, -A), nets.log_alpha)[0]
    updater.update(data)
    for found, expected in (
        (nets.critics.grad, expected_critics),
        (nets.actor.grad, expected_actor),
        (nets.log_alpha.grad, expected_alpha),
    ):
        assert found is not None
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)
        assert expected.abs().max() > 1e-3
    figures = updater.take_statistics()
    assert figures["actor_loss"] == pytest.approx(float(loss), rel=1e-4)
    assert figures["entropy"] == pytest.approx(-float(log_probs.mean()), rel=1e-4)
    assert figures["updates"] == 1 and updater.take_statistics() == {}


def test_updates_by_either_product_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_SMALL", 0)
    shapes = []

    def recorded(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        shapes.append(tuple(x.shape))
        return onednn_product(x, *rest)

    monkeypatch.setattr(products, "onednn_product", recorded)
    wide = SETTINGS.model_copy(update={"hidden": 48})
    after = {}
    for product in (products.torch_products, products.onednn_products):
        nets = SACNetworks(O, A, 48, 2, 0.1, seed=0)
        updater = SACUpdater(nets, wide, seed=3, products=product)
        for number in range(3):
            updater.update(batch(number))
        after[product] = nets.state()
    one, other = after.values()
    for name in one:
        assert torch.allclose(one[name], other[name], atol=2e-4), name
    # 14 forward (the actor's narrow head is torch's), 8 for the critics and their inputs, 4 for the actor.
    assert len(shapes) == 3 * 26 and {(48, B), (B, 48), (2 * B, 48)} <= set(shapes)


def sb3_policy(nets: SACNetworks) -> SACPolicy:
    """Stable-Baselines3's networks with our weights."""
    box = gymnasium.spaces.Box
    policy = SACPolicy(
        box(-np.inf, np.inf, (O,), np.float32), box(-1, 1, (A,), np.float32), lambda _: 3e-4, net_arch=[16, 16]
    )
    state = nets.state()
    with torch.no_grad():
        for kind, target in (("critics", policy.critic), ("targets", policy.critic_target)):
            for k, q in enumerate(target.q_networks):
                for place, linear in enumerate(m for m in q if isinstance(m, torch.nn.Linear)):
                    linear.weight.copy_(state[f"{kind}.{k}.{place}.weight"])
                    linear.bias.copy_(state[f"{kind}.{k}.{place}.bias"])
        hidden = [m for m in policy.actor.latent_pi if isinstance(m, torch.nn.Linear)]
        for place, linear in enumerate(hidden):
            linear.weight.copy_(state[f"actor.{place}.weight"])
            linear.bias.copy_(state[f"actor.{place}.bias"])
        for part in ("weight", "bias"):
            head = state[f"actor.2.{part}"]
            getattr(policy.actor.mu, part).copy_(head[:A])
            getattr(policy.actor.log_std, part).copy_(head[A:])
    return policy


def test_losses_equal_stable_baselines3_on_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    # Small weights: Stable-Baselines3 adds 1e-6 inside log(1 - tanh²), which tells where tanh is nearly 1.
    nets, data = networks(1, scale=0.03), batch(1)
    policy = sb3_policy(nets)
    # It clamps the log standard deviation where the original squashes it: give its head ours.
    low, high = SETTINGS.log_std_bounds
    plain = policy.actor.get_action_dist_params

    def squashed(observations: torch.Tensor) -> Any:
        mean, _, kwargs = plain(observations)
        raw = policy.actor.log_std(policy.actor.latent_pi(observations))
        return mean, low + 0.5 * (high - low) * (raw.tanh() + 1), kwargs

    monkeypatch.setattr(policy.actor, "get_action_dist_params", squashed)
    noise = [torch.randn((B, A), generator=torch.Generator().manual_seed(k)) for k in (1, 2)]
    drawn = iter(noise)

    def with_noise(self: Any) -> torch.Tensor:
        self.gaussian_actions = self.distribution.mean + self.distribution.stddev * next(drawn)
        return torch.tanh(self.gaussian_actions)

    monkeypatch.setattr(SquashedDiagGaussianDistribution, "sample", with_noise)
    monkeypatch.setattr(SquashedDiagGaussianDistribution, "mode", with_noise)
    # Stable-Baselines3's SAC.train, line by line.
    alpha = nets.log_alpha.data.exp()
    with torch.no_grad():
        next_actions, next_log_prob = policy.actor.action_log_prob(data.next_observations)
        next_q = torch.cat(policy.critic_target(data.next_observations, next_actions), dim=1).min(dim=1).values
        target = data.rewards + data.continues * 0.99 * (next_q - alpha * next_log_prob)
    theirs_critic = sum(
        torch.nn.functional.mse_loss(q[:, 0], target) for q in policy.critic(data.observations, data.actions)
    )
    actions, log_prob = policy.actor.action_log_prob(data.observations)
    smallest = torch.cat(policy.critic(data.observations, actions), dim=1).min(dim=1).values
    theirs_actor = (alpha * log_prob - smallest).mean()

    ours_target = critic_target(nets, data, noise[0], SETTINGS)
    ours_actor, ours_log_probs = actor_loss(nets, data, noise[1], SETTINGS)
    assert torch.allclose(ours_log_probs, log_prob, atol=2e-4)
    assert torch.allclose(ours_target, target, atol=1e-4)
    assert float(critic_loss(nets, data, ours_target)) == pytest.approx(float(theirs_critic), rel=1e-4)
    assert float(ours_actor) == pytest.approx(float(theirs_actor), rel=1e-4)


def test_the_log_probability_is_that_of_the_squashed_gaussian() -> None:
    head = torch.tensor([[0.3, -0.2, 0.1, -0.4]])
    sample = sample_actions(head, torch.tensor([[0.5, -1.0]]), (-5.0, 2.0))
    log_std = -5 + 3.5 * (torch.tanh(head[0, 2:]) + 1)
    before = head[0, :2] + torch.tensor([0.5, -1.0]) * log_std.exp()
    normal = torch.distributions.Normal(head[0, :2].double(), log_std.exp().double())
    by_hand = normal.log_prob(before.double()).sum() - torch.log(1 - before.double().tanh() ** 2).sum()
    assert float(sample.log_probs) == pytest.approx(float(by_hand), rel=1e-5)
    assert sample.actions[0] == pytest.approx(before.tanh().tolist())


def test_updates_follow_sacs_order_and_schedules() -> None:
    settings = SETTINGS.model_copy(update={"target_update_every": 2, "actor_update_every": 3})
    nets = networks(2)
    updater = SACUpdater(nets, settings, seed=0)
    moved = []
    for number in range(6):
        before = nets.state()
        updater.update(batch(number))
        after = nets.state()
        moved.append({name.split(".")[0] for name in after if not torch.equal(before[name], after[name])})
        if number % 2 == 0:
            expected = before["targets.0.0.weight"].lerp(after["critics.0.0.weight"], settings.tau)
            assert torch.allclose(after["targets.0.0.weight"], expected)
    full = {"critics", "actor", "log_alpha", "targets"}
    assert moved == [full, {"critics"}, {"critics", "targets"}, full - {"targets"}, {"critics", "targets"}, {"critics"}]


def test_adam_moves_every_weight_by_the_learning_rate_at_first() -> None:
    nets = networks(3)
    before = nets.critics.data.clone()
    SACUpdater(nets, SETTINGS, seed=0).update(batch())
    steps = (nets.critics.data - before).abs()
    assert float(steps.max()) == pytest.approx(SETTINGS.lr, rel=1e-2)


def test_batches_may_change_their_size() -> None:
    whole = batch()
    nets, same = networks(3), networks(3)
    updater, anew = SACUpdater(nets, SETTINGS, seed=0), SACUpdater(same, SETTINGS, seed=0)
    part = Batch(*(rows[:7] for rows in whole))
    updater.update(part)
    updater.update(whole)
    anew.update(part)
    anew._held = None
    anew.update(whole)
    assert all(torch.equal(tensor, same.state()[name]) for name, tensor in nets.state().items())


def test_reset_critics_are_new_and_their_optimiser_forgets() -> None:
    nets = networks(4)
    updater = SACUpdater(nets, SETTINGS, seed=0)
    updater.update(batch())
    actor, old = nets.actor.data.clone(), nets.critics.data.clone()
    updater.reset_critics()
    assert torch.equal(nets.actor.data, actor) and not torch.allclose(nets.critics.data, old)
    assert torch.equal(nets.targets, nets.critics.data)
    assert not updater.critic_optimizer.state and updater.actor_optimizer.state
    weight = nets.critic_layers(nets.critics.data)[1][0][1]
    assert torch.allclose(weight @ weight.t(), torch.eye(16), atol=1e-5)  # orthogonal
    updater.update(batch())


def test_a_saved_network_is_the_same_network() -> None:
    one, other = networks(5), networks(6)
    other.load(one.state())
    for name, tensor in one.state().items():
        assert torch.equal(other.state()[name], tensor), name
    assert math.exp(float(SACNetworks(O, A, 4, 1, 0.1, 0).log_alpha)) == pytest.approx(0.1)


def test_the_actor_without_torch_acts_the_same() -> None:
    nets = networks(7)
    layers = [(w[0].numpy(), b[0, 0].numpy()) for w, b in nets.actor_layers(nets.actor.data)]
    actor = NumpyActor(layers, SETTINGS.log_std_bounds)
    observations, noise = torch.randn(9, O), torch.randn(9, A)
    (head,), _ = forward(nets.actor_layers(nets.actor.data), observations[None])
    expected = sample_actions(head, noise, SETTINGS.log_std_bounds).actions
    assert actor.act(observations.numpy(), noise.numpy()) == pytest.approx(expected.numpy(), abs=1e-5)
    assert actor.act(observations.numpy()) == pytest.approx(head[:, :A].tanh().numpy(), abs=1e-5)
    assert actor.action_size == A


def test_without_a_compiler_updates_run_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(function: Any, **_: Any) -> Any:
        def raise_error(*_: Any) -> Any:
            raise RuntimeError("No C++ compiler was found\nin many lines")

        return raise_error

    plain, compiled = networks(8), networks(8)
    SACUpdater(plain, SETTINGS, seed=0).update(batch())
    monkeypatch.setattr(torch, "compile", broken)
    with caplog.at_level(logging.WARNING):
        SACUpdater(compiled, SETTINGS, seed=0, compiled=True).update(batch())
    assert torch.equal(plain.critics.data, compiled.critics.data)
    assert "SAC runs without torch.compile, somewhat slower: No C++ compiler was found" in caplog.text


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.acceptance)])
def test_compiled_updates_equal_plain_ones(
    backend: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if backend == "aot_eager":  # the same graph, without a C++ compiler
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
        monkeypatch.setattr("rl_vlm.preference.sac._CPP", {})
    settings = SETTINGS.model_copy(update={"actor_update_every": 2})
    plain, compiled = networks(9), networks(9)
    one, other = SACUpdater(plain, settings, seed=0), SACUpdater(compiled, settings, seed=0, compiled=True)
    for number in range(5):
        if number == 3:
            one.reset_critics()
            other.reset_critics()
        one.update(batch(number))
        other.update(batch(number))
    assert "without torch.compile" not in caplog.text
    assert one.take_statistics() == pytest.approx(other.take_statistics(), rel=1e-4)
    for name, tensor in plain.state().items():
        assert torch.allclose(tensor, compiled.state()[name], atol=1e-5), name
