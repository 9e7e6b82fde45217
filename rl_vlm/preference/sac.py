"""One update of SAC (arXiv 1801.01290 and 1812.05905) with RL-VLM-F's settings."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from rl_vlm.config import SACSection
from rl_vlm.preference.sac_networks import SACNetworks

logger = logging.getLogger(__name__)

STATISTICS = ("critic_loss", "q", "batch_reward", "actor_loss", "actor_entropy", "alpha_loss")  # as RL-VLM-F calls them


class Batch(NamedTuple):
    """Rows of the replay buffer."""

    observations: Tensor  # [B, O]
    actions: Tensor  # [B, A]
    rewards: Tensor  # [B]
    next_observations: Tensor  # [B, O]
    continues: Tensor  # [B], 0 where the episode terminated


# Of a batch, noise [B, A] for the policy's actions, and alpha [1]: the loss and one more statistic without a gradient.
Loss: TypeAlias = Callable[[Batch, Tensor, Tensor], tuple[Tensor, Tensor]]


class SACUpdater:
    """Makes updates of the networks, on their device. `seed` is that of the noise; `compiled` tries torch.compile."""

    def __init__(self, networks: SACNetworks, settings: SACSection, seed: int, compiled: bool = False) -> None:
        self.networks, self.settings = networks, settings
        self.generator = torch.Generator().manual_seed(seed)
        self.updates = 0
        self.target_entropy = -float(networks.action_size)

        def adam(parameters: list[nn.Parameter], lr: float) -> torch.optim.Adam:
            return torch.optim.Adam(parameters, lr=lr, betas=settings.betas, fused=True)

        self.optimizers = {
            "critic": adam(list(networks.critics.parameters()), settings.lr),
            "actor": adam(list(networks.actor.parameters()), settings.lr),
            "alpha": adam([networks.log_alpha], settings.alpha_lr),
        }
        self._compute_critic_loss: Loss = _compile(self.critic_loss) if compiled else self.critic_loss
        self._compute_actor_loss: Loss = _compile(self.actor_loss) if compiled else self.actor_loss
        self._statistics: list[Tensor] = []

    def update(self, batch: Batch) -> None:
        """Update the critics; the actor and alpha, and the targets, as often as the settings say."""
        networks, settings = self.networks, self.settings
        alpha = networks.log_alpha.detach().exp()

        critic_loss, q = self._compute_critic_loss(batch, self.draw_noise(batch), alpha)
        _step(self.optimizers["critic"], critic_loss)
        statistics = [critic_loss.detach(), q, batch.rewards.mean()]

        if self.updates % settings.actor_update_every == 0:
            networks.critics.requires_grad_(False)  # spares the gradients of the critics' weights
            actor_loss, entropy = self._compute_actor_loss(batch, self.draw_noise(batch), alpha)
            _step(self.optimizers["actor"], actor_loss)
            networks.critics.requires_grad_(True)

            alpha_loss = self.alpha_loss(entropy)
            _step(self.optimizers["alpha"], alpha_loss)
            statistics += [actor_loss.detach(), entropy, alpha_loss.detach()]
        else:
            statistics += [torch.zeros_like(q)] * 3

        if self.updates % settings.target_update_every == 0:
            with torch.no_grad():
                for target, critic in zip(networks.targets.parameters(), networks.critics.parameters(), strict=True):
                    target.lerp_(critic, settings.tau)

        self._statistics.append(torch.stack(statistics))
        self.updates += 1

    def draw_noise(self, batch: Batch) -> Tensor:
        """Standard normal [B, A], the same on every device."""
        return torch.randn(batch.actions.shape, generator=self.generator).to(batch.actions.device)

    def critic_loss(self, batch: Batch, noise: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """Both critics' mean squared errors, added, and the mean of their values. The target is
        r + γ (min Q'(s', a') - α log π(a'|s')) with a' from the policy; r alone after a termination."""
        networks, settings = self.networks, self.settings
        with torch.no_grad():
            next_actions, log_probs = networks.act(batch.next_observations, noise)
            next_q = torch.minimum(*networks.q_values(networks.targets, batch.next_observations, next_actions))
            target = batch.rewards + settings.gamma * batch.continues * (next_q - alpha * log_probs)
        first, second = networks.q_values(networks.critics, batch.observations, batch.actions)
        loss = functional.mse_loss(first, target) + functional.mse_loss(second, target)
        return loss, (first + second).detach().mean() / 2

    def actor_loss(self, batch: Batch, noise: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """mean(α log π(a|s) - min Q(s, a)) with a from the policy, and the policy's entropy."""
        networks = self.networks
        actions, log_probs = networks.act(batch.observations, noise)
        q = torch.minimum(*networks.q_values(networks.critics, batch.observations, actions))
        return (alpha * log_probs - q).mean(), -log_probs.detach().mean()

    def alpha_loss(self, entropy: Tensor) -> Tensor:
        """α (entropy - target entropy), the policy held fixed."""
        return (self.networks.log_alpha.exp() * (entropy - self.target_entropy)).sum()

    def reset_critics(self) -> None:
        """Reset the critics after the reward has changed: new weights, new optimiser state, targets equal to them."""
        self.networks.reset_critics(self.generator)
        self.optimizers["critic"].state.clear()

    def take_statistics(self) -> dict[str, float]:
        """Means since the last call, `alpha_value` and the number of `updates`; empty if there was none."""
        if not self._statistics:
            return {}
        means = dict(zip(STATISTICS, torch.stack(self._statistics).mean(0).tolist(), strict=True))
        for name in ("actor_loss", "alpha_loss", "actor_entropy"):
            means[name] *= self.settings.actor_update_every
        means |= {"alpha_value": float(self.networks.log_alpha.detach().exp()), "updates": float(len(self._statistics))}
        self._statistics.clear()
        return means


def _step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def _compile(loss: Loss) -> Loss:
    """The loss under torch.compile; from the first call that fails on, the loss as it is."""
    chosen: Loss = torch.compile(loss, dynamic=False, fullgraph=True)

    def call(batch: Batch, noise: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal chosen
        try:
            return chosen(batch, noise, alpha)
        except Exception as error:  # dynamo and inductor raise what their parts raise; `loss` itself is tested
            logger.warning("SAC runs without torch.compile, somewhat slower: %s", str(error).split("\n")[0][:200])
            chosen = loss
            return loss(batch, noise, alpha)

    return call
