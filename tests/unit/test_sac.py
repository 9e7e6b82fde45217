"""SAC's update: the losses equal Stable-Baselines3's, the order of steps is SAC's."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from scipy.spatial import cKDTree
from stable_baselines3.common.distributions import SquashedDiagGaussianDistribution
from stable_baselines3.sac.policies import SACPolicy

from rl_vlm.config import SACSection
from rl_vlm.preference.collector import NumpyActor
from rl_vlm.preference.sac import Batch, SACUpdater
from rl_vlm.preference.sac_networks import SACNetworks
from rl_vlm.preference.state_entropy import state_entropy, std_of, sums_of

O, A, B = 5, 2, 40  # noqa: E741  (observation, action and batch size, as in the shapes)
SETTINGS = SACSection(hidden=16, depth=2, batch_size=B, target_update_every=1, compile="off")


def networks(seed: int = 0, scale: float = 0.2) -> SACNetworks:
    nets = SACNetworks(O, A, SETTINGS, seed)
    generator = torch.Generator().manual_seed(seed + 100)
    with torch.no_grad():
        for tensor in nets.parameters():
            if tensor is not nets.log_alpha:
                tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=scale)
    return nets


def state_of(nets: SACNetworks) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in nets.state_dict().items()}


def batch(seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))

    continues = torch.from_numpy((rng.random(B) > 0.3).astype(np.float32))
    return Batch(normal(B, O), normal(B, A).tanh(), normal(B), normal(B, O), continues)


def sb3_policy(nets: SACNetworks) -> SACPolicy:
    """Stable-Baselines3's networks with our weights."""
    box = gymnasium.spaces.Box
    policy = SACPolicy(
        box(-np.inf, np.inf, (O,), np.float32), box(-1, 1, (A,), np.float32), lambda _: 3e-4, net_arch=[16, 16]
    )
    state = state_of(nets)
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

    updater = SACUpdater(nets, SETTINGS, seed=0)
    ours_critic, q = updater.critic_loss(data, noise[0], alpha)
    ours_actor, entropy = updater.actor_loss(data, noise[1], alpha)
    assert float(ours_critic) == pytest.approx(float(theirs_critic), rel=1e-4)
    assert float(q) == pytest.approx(float(torch.cat(policy.critic(data.observations, data.actions)).mean()), rel=1e-4)
    assert float(ours_actor) == pytest.approx(float(theirs_actor), rel=1e-4)
    assert float(entropy) == pytest.approx(-float(log_prob.mean()), rel=1e-4)
    # The gradients of the weights, Stable-Baselines3's by its own autograd.
    ours_critic.backward()
    theirs_critic.backward()
    ours_actor.backward(inputs=list(nets.actor.parameters()))
    theirs_actor.backward(inputs=list(policy.actor.parameters()))
    pairs = [(nets.critics[k][0].weight, policy.critic.q_networks[k][0].weight) for k in range(2)]
    for mine, other in [*pairs, (nets.actor[0].weight, policy.actor.latent_pi[0].weight)]:
        assert mine.grad is not None and float(mine.grad.abs().max()) > 1e-3
        assert torch.allclose(mine.grad, other.grad, rtol=1e-3, atol=1e-5)


def test_alpha_moves_the_entropy_to_its_target() -> None:
    updater = SACUpdater(networks(), SETTINGS, seed=0)
    loss = updater.alpha_loss(torch.tensor(0.5))
    loss.backward()
    assert updater.target_entropy == -A
    assert float(loss.detach()) == pytest.approx(0.1 * (0.5 + A))  # α = .1, and d α / d log α = α
    assert float(updater.networks.log_alpha.grad) == pytest.approx(0.1 * (0.5 + A))


def test_updates_follow_sacs_order_and_schedules() -> None:
    settings = SETTINGS.model_copy(update={"target_update_every": 2, "actor_update_every": 3})
    nets = networks(2)
    updater = SACUpdater(nets, settings, seed=0)
    moved = []
    for number in range(6):
        before = state_of(nets)
        updater.update(batch(number))
        after = state_of(nets)
        moved.append({name.split(".")[0] for name in after if not torch.equal(before[name], after[name])})
        if number % 2 == 0:
            expected = before["targets.0.0.weight"].lerp(after["critics.0.0.weight"], settings.tau)
            assert torch.allclose(after["targets.0.0.weight"], expected)
    full = {"critics", "actor", "log_alpha", "targets"}
    assert moved == [full, {"critics"}, {"critics", "targets"}, full - {"targets"}, {"critics", "targets"}, {"critics"}]


def test_reset_critics_are_new_and_their_optimiser_forgets() -> None:
    nets = networks(4)
    updater = SACUpdater(nets, SETTINGS, seed=0)
    updater.update(batch())
    before = state_of(nets)
    updater.reset_critics()
    after = state_of(nets)
    assert all(torch.equal(after[name], before[name]) for name in after if name.startswith("actor"))
    for k in range(2):
        assert not torch.allclose(after[f"critics.{k}.1.weight"], before[f"critics.{k}.1.weight"])
        assert torch.equal(after[f"critics.{k}.1.weight"], after[f"targets.{k}.1.weight"])
    assert not updater.optimizers["critic"].state and updater.optimizers["actor"].state
    weight = after["critics.1.1.weight"]
    assert torch.allclose(weight @ weight.t(), torch.eye(16), atol=1e-5)  # orthogonal
    updater.update(batch())


def test_the_actor_without_torch_acts_the_same() -> None:
    nets = networks(7)
    layers = [(layer.weight.detach().numpy(), layer.bias.detach().numpy()) for layer in nets.actor]
    actor = NumpyActor(layers, SETTINGS.log_std_bounds)
    observations, noise = torch.randn(9, O), torch.randn(9, A)
    with torch.no_grad():
        expected, mode = nets.act(observations, noise)[0], nets.actor(observations)[:, :A].tanh()
    assert actor.act(observations.numpy(), noise.numpy()) == pytest.approx(expected.numpy(), abs=1e-5)
    assert actor.act(observations.numpy()) == pytest.approx(mode.numpy(), abs=1e-5)


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
    assert all(torch.equal(tensor, state_of(compiled)[name]) for name, tensor in state_of(plain).items())
    assert "SAC runs without torch.compile, somewhat slower: No C++ compiler was found" in caplog.text


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("aot_eager", marks=pytest.mark.slow),
        pytest.param("inductor", marks=pytest.mark.acceptance),
    ],
)
def test_compiled_updates_equal_plain_ones(
    backend: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if backend == "aot_eager":  # the same graph, without a C++ compiler
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
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
    for name, tensor in state_of(plain).items():
        assert torch.allclose(tensor, state_of(compiled)[name], atol=1e-5), name


# --- Exploration by state entropy: distances equal scipy's, running figures equal numpy's


@pytest.mark.parametrize(("visited", "size", "k"), [(500, 3, 5), (2000, 39, 5), (60, 4, 1), (40, 2, 30)])
def test_the_kth_nearest_neighbour_is_scipys(visited: int, size: int, k: int) -> None:
    rng = np.random.default_rng(visited)
    # Close together and far from the origin, where a product of float32 matrices loses most digits.
    points = (100 + 0.05 * rng.standard_normal((visited, size))).astype(np.float32)
    rows = rng.integers(0, visited, 25)
    found = state_entropy(torch.from_numpy(points[rows]), torch.from_numpy(points), k).numpy()
    expected = cKDTree(points.astype(np.float64)).query(points[rows].astype(np.float64), k + 1)[0][:, -1]
    assert found == pytest.approx(expected, rel=1e-4)


def test_with_few_states_the_farthest_counts() -> None:
    points = torch.tensor([[0.0], [1.0], [5.0]])
    assert state_entropy(points, points, k=5).tolist() == [5.0, 4.0, 5.0]
    assert state_entropy(points, points, k=1).tolist() == [1.0, 1.0, 4.0]


def test_the_running_deviation_is_that_of_all_values() -> None:
    rng = np.random.default_rng(0)
    parts = [1000 + rng.standard_normal(n) * scale for n, scale in ((3, 1), (50, 9), (1, 0), (200, 2))]
    sums = sum(sums_of(torch.from_numpy(part)) for part in parts)
    assert std_of(sums) == pytest.approx(np.concatenate(parts).std(), rel=1e-9)
    assert std_of(sums_of(torch.ones(3))) == 1.0
