"""One update of SAC (arXiv 1801.01290 and 1812.05905) with RL-VLM-F's settings.

`critic_loss`, `actor_loss` and `alpha_loss` are the losses of the papers. `SACUpdater` makes the same steps with the
gradients written out (see networks.py); a test compares them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl_vlm.config import SACSection
from rl_vlm.models.products import Product, torch_product
from rl_vlm.preference.networks import (
    SACNetworks,
    backward,
    forward,
    input_gradient,
    layers_of,
    policy_gradient,
    sample_actions,
)

logger = logging.getLogger(__name__)

STATISTICS = ("critic_loss", "actor_loss", "alpha_loss", "entropy", "q", "batch_reward")


class Batch(NamedTuple):
    """observations, next_observations [B, O]; actions [B, A]; rewards, continues [B] (0 where the episode terminated)."""

    observations: Tensor
    actions: Tensor
    rewards: Tensor
    next_observations: Tensor
    continues: Tensor


# The losses of the papers.


def critic_target(networks: SACNetworks, batch: Batch, noise: Tensor, settings: SACSection) -> Tensor:
    """[B]: r + γ (min Q'(s', a') - α log π(a'|s')) with a' from the policy; nothing after a termination."""
    head, _ = forward(layers_of(networks.actor.data, networks.actor_sizes), batch.next_observations)
    sample = sample_actions(head, noise, settings.log_std_bounds)
    pairs = torch.cat([batch.next_observations, sample.actions], dim=1)
    first, second = (forward(layers, pairs)[0][:, 0] for layers in networks.critic_layers(networks.targets))
    value = torch.minimum(first, second) - networks.log_alpha.data.exp() * sample.log_probs
    return batch.rewards + settings.gamma * batch.continues * value


def critic_loss(networks: SACNetworks, batch: Batch, target: Tensor) -> Tensor:
    """Mean squared error of both critics, added."""
    pairs = torch.cat([batch.observations, batch.actions], dim=1)
    values = (forward(layers, pairs)[0][:, 0] for layers in networks.critic_layers(networks.critics))
    return sum(((value - target).square().mean() for value in values), torch.zeros(()))


def actor_loss(networks: SACNetworks, batch: Batch, noise: Tensor, settings: SACSection) -> tuple[Tensor, Tensor]:
    """mean(α log π(a|s) - min Q(s, a)) with a from the policy, and log π(a|s) [B]."""
    head, _ = forward(layers_of(networks.actor, networks.actor_sizes), batch.observations)
    sample = sample_actions(head, noise, settings.log_std_bounds)
    pairs = torch.cat([batch.observations, sample.actions], dim=1)
    first, second = (forward(layers, pairs)[0][:, 0] for layers in networks.critic_layers(networks.critics.data))
    alpha = networks.log_alpha.data.exp()
    return (alpha * sample.log_probs - torch.minimum(first, second)).mean(), sample.log_probs


def alpha_loss(networks: SACNetworks, log_probs: Tensor, target_entropy: float) -> Tensor:
    """mean(α (-log π - target entropy)), the policy held fixed."""
    return (networks.log_alpha.exp() * (-log_probs.detach() - target_entropy)).mean()


class SACUpdater:
    """Makes updates in place and counts them.

    Args:
        networks: on the device where the updates run.
        settings: `preference.sac` of the configuration.
        seed: of the noise.
        compiled: run the matrix parts through torch.compile; where that fails, go on without it.
        product: what multiplies matrices.
    """

    def __init__(
        self,
        networks: SACNetworks,
        settings: SACSection,
        seed: int,
        compiled: bool = False,
        product: Product = torch_product,
    ) -> None:
        self.networks, self.settings, self.product = networks, settings, product
        self.generator = torch.Generator().manual_seed(seed)
        self.updates = 0
        self.target_entropy = (
            settings.target_entropy if settings.target_entropy is not None else -float(networks.action_size)
        )
        self.critic_optimizer = self._adam(networks.critics, settings.lr)
        self.actor_optimizer = self._adam(networks.actor, settings.lr)
        self.alpha_optimizer = self._adam(networks.log_alpha, settings.alpha_lr)
        networks.actor.grad = torch.zeros_like(networks.actor)
        networks.critics.grad = torch.zeros_like(networks.critics)
        networks.log_alpha.grad = torch.zeros_like(networks.log_alpha)
        self._statistics = torch.zeros(len(STATISTICS), device=networks.actor.device)
        self._counted = 0
        part: Callable[..., Any] = _Compiled if compiled else lambda function: function
        self._critic_part = part(self._critics)
        self._policy_part = part(self._policy)
        self._actor_part = part(self._actor)

    def _adam(self, parameter: torch.nn.Parameter, lr: float) -> torch.optim.Adam:
        return torch.optim.Adam([parameter], lr=lr, betas=self.settings.betas, fused=True)

    @torch.no_grad()
    def update(self, batch: Batch) -> None:
        """One step of the critics, the actor and alpha, and of the targets every `target_update_every` updates."""
        networks, settings = self.networks, self.settings
        alpha = networks.log_alpha.exp()
        shape = (len(batch.actions), networks.action_size)
        gradients, critic_loss, q = self._critic_part(
            networks.critics, networks.targets, networks.actor, batch, self._noise(shape), alpha
        )
        torch.cat(gradients, out=networks.critics.grad)
        self.critic_optimizer.step()
        figures = [critic_loss, q, batch.rewards.mean()]
        if self.updates % settings.actor_update_every == 0:
            figures += self._update_actor(batch.observations, self._noise(shape), alpha)
        if self.updates % settings.target_update_every == 0:
            networks.targets.lerp_(networks.critics, settings.tau)
        self.updates += 1
        self._count(figures)

    def _noise(self, shape: tuple[int, int]) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.networks.actor.device)

    def _critics(
        self, critics: Tensor, targets: Tensor, actor: Tensor, batch: Batch, noise: Tensor, alpha: Tensor
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """Gradient of the critics' loss in pieces, the loss, and their mean value."""
        networks, settings, product = self.networks, self.settings, self.product
        head, _ = forward(layers_of(actor, networks.actor_sizes), batch.next_observations, product)
        sample = sample_actions(head, noise, settings.log_std_bounds)
        pairs = torch.cat([batch.next_observations, sample.actions], dim=1)
        first, second = [forward(layers, pairs, product)[0] for layers in networks.critic_layers(targets)]
        value = torch.minimum(first, second)[:, 0] - alpha * sample.log_probs
        target = (batch.rewards + settings.gamma * batch.continues * value)[:, None]
        pairs = torch.cat([batch.observations, batch.actions], dim=1)
        gradients: list[Tensor] = []
        loss, mean = torch.zeros_like(alpha[0]), torch.zeros_like(alpha[0])
        for layers in networks.critic_layers(critics):
            value, activations = forward(layers, pairs, product)
            error = value - target
            gradients += backward(layers, activations, error * (2 / len(error)), product)
            loss, mean = loss + error.square().mean(), mean + 0.5 * value.mean()
        return gradients, loss, mean

    def _update_actor(self, observations: Tensor, noise: Tensor, alpha: Tensor) -> list[Tensor]:
        networks = self.networks
        activations, sample, values, inside = self._policy_part(networks.actor, networks.critics, observations, noise)
        slopes = self._slopes(values, inside)
        gradients = self._actor_part(networks.actor, activations, sample, slopes, alpha)
        torch.cat(gradients, out=networks.actor.grad)
        entropy = -sample.log_probs.mean()
        networks.log_alpha.grad.copy_(alpha * (entropy - self.target_entropy))  # type: ignore[union-attr]
        self.actor_optimizer.step()
        self.alpha_optimizer.step()
        loss = -alpha[0] * entropy - torch.minimum(*values).mean()
        return [loss, alpha[0] * (entropy - self.target_entropy), entropy]

    def _policy(
        self, actor: Tensor, critics: Tensor, observations: Tensor, noise: Tensor
    ) -> tuple[list[Tensor], Any, tuple[Tensor, Tensor], tuple[list[Tensor], list[Tensor]]]:
        """Activations and sample of the policy, both critics' values of the sample, and their activations."""
        networks, product = self.networks, self.product
        head, activations = forward(layers_of(actor, networks.actor_sizes), observations, product)
        sample = sample_actions(head, noise, self.settings.log_std_bounds)
        pairs = torch.cat([observations, sample.actions], dim=1)
        (first, one), (second, two) = [forward(layers, pairs, product) for layers in networks.critic_layers(critics)]
        return activations, sample, (first[:, 0], second[:, 0]), (one, two)

    def _slopes(self, values: tuple[Tensor, Tensor], inside: tuple[list[Tensor], list[Tensor]]) -> Tensor:
        """d min Q / d action [B, A]: each row goes back through the one critic that is the minimum there."""
        networks = self.networks
        smaller = values[0] < values[1]
        slopes = torch.empty((len(smaller), networks.action_size), device=smaller.device)
        for chosen, layers, activations in zip(
            (smaller, ~smaller), networks.critic_layers(networks.critics), inside, strict=True
        ):
            rows = chosen.nonzero()[:, 0]
            some = [activation.index_select(0, rows) for activation in activations]
            slopes.index_copy_(0, rows, input_gradient(layers, some, networks.observation_size, self.product))
        return slopes

    def _actor(
        self, actor: Tensor, activations: list[Tensor], sample: Any, slopes: Tensor, alpha: Tensor
    ) -> list[Tensor]:
        """Gradient of the actor's loss in pieces."""
        head = policy_gradient(sample, slopes, alpha, self.settings.log_std_bounds)
        return backward(layers_of(actor, self.networks.actor_sizes), activations, head, self.product)

    def reset_critics(self) -> None:
        """Reset the critics after the reward has changed: new weights, new optimiser state, targets equal to them."""
        self.networks.reset_critics(self.generator)
        self.critic_optimizer.state.clear()

    def _count(self, figures: list[Tensor]) -> None:
        loss, q, reward, *policy = figures
        actor, alpha, entropy = policy or [torch.zeros_like(loss)] * 3
        self._statistics += torch.stack([loss, actor, alpha, entropy, q, reward])
        self._counted += 1

    def take_statistics(self) -> dict[str, float]:
        """Means since the last call, `alpha` and the number of `updates`; empty if there was none."""
        if not self._counted:
            return {}
        found = dict(zip(STATISTICS, (self._statistics / self._counted).tolist(), strict=True))
        for name in ("actor_loss", "alpha_loss", "entropy"):
            found[name] *= self.settings.actor_update_every
        found |= {"alpha": float(self.networks.log_alpha.data.exp()), "updates": float(self._counted)}
        self._statistics.zero_()
        self._counted = 0
        return found


class _Compiled:
    """A function under torch.compile, compiled at its first call; where that fails, the function itself."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._plain = function
        self._function = torch.compile(function, dynamic=False)
        self._tried = False

    def __call__(self, *args: Any) -> Any:
        if self._tried:
            return self._function(*args)
        try:
            result = self._function(*args)
        except Exception as error:  # dynamo and inductor raise what their parts raise; the function itself is tested
            logger.warning("SAC runs without torch.compile, somewhat slower: %s", str(error).split("\n")[0][:200])
            self._function = self._plain  # type: ignore[assignment]
            result = self._plain(*args)
        self._tried = True
        return result
