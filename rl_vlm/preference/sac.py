"""One update of SAC (arXiv 1801.01290 and 1812.05905) with RL-VLM-F's settings.

`SACUpdater` makes the steps of the losses in sac_losses.py with the gradients written out (see mlp.py); a test compares them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl_vlm.config import SACSection
from rl_vlm.models.products import Products, torch_products
from rl_vlm.preference.adam import Moments, adam_step, moments_of
from rl_vlm.preference.mlp import Layer, backward, forward, input_gradient
from rl_vlm.preference.networks import PolicySample, SACNetworks, policy_gradient, sample_actions
from rl_vlm.preference.sac_losses import Batch, critic_inputs

logger = logging.getLogger(__name__)

# Calls from C++ in place of Python: 3 to 9 % of an update of two layers of 256.
_CPP: dict[str, Any] = {"cpp_wrapper": True}
STATISTICS = ("critic_loss", "actor_loss", "alpha_loss", "entropy", "q", "batch_reward")


class _Weights(NamedTuple):
    """What a step changes."""

    actor: Tensor
    critics: Tensor
    log_alpha: Tensor
    actor_moments: Moments
    critic_moments: Moments
    alpha_moments: Moments
    statistics: Tensor  # sums, in the order of STATISTICS


class _Layers(NamedTuple):
    """Views of the networks, and of the gradients where these have a place."""

    actor: list[Layer]
    critics: list[Layer]
    targets: list[Layer]
    actor_gradient: list[Layer] | None = None
    critic_gradient: list[Layer] | None = None


class _Memory(NamedTuple):
    """For hidden layers; the same at every update, since fresh memory is cold and given back to the system again and again."""

    actor: list[Tensor]
    critics: list[Tensor]
    gradients: list[Tensor]


class SACUpdater:
    """Makes updates in place and counts them.

    Args:
        networks: on the device where the updates run.
        settings: `preference.sac` of the configuration.
        seed: of the noise.
        compiled: run the step through torch.compile; where that fails, go on without it.
        products: what multiplies matrices.
    """

    def __init__(
        self,
        networks: SACNetworks,
        settings: SACSection,
        seed: int,
        compiled: bool = False,
        products: Products = torch_products,
    ) -> None:
        self.networks, self.settings, self.products = networks, settings, products
        self.generator = torch.Generator().manual_seed(seed)
        self.updates = 0
        self.target_entropy = (
            settings.target_entropy if settings.target_entropy is not None else -float(networks.action_size)
        )
        self.critic_optimizer = self._adam(networks.critics, settings.lr)
        self.actor_optimizer = self._adam(networks.actor, settings.lr)
        self.alpha_optimizer = self._adam(networks.log_alpha, settings.alpha_lr)
        networks.actor.grad = self._actor_gradient = torch.zeros_like(networks.actor.data)
        networks.critics.grad = self._critic_gradient = torch.zeros_like(networks.critics.data)
        networks.log_alpha.grad = self._alpha_gradient = torch.zeros_like(networks.log_alpha.data)
        self._statistics = torch.zeros(len(STATISTICS), device=networks.actor.device)
        self._counted = 0
        self._layers = _Layers(
            networks.actor_layers(networks.actor.data),
            networks.critic_layers(networks.critics.data),
            networks.critic_layers(networks.targets),
            networks.actor_layers(self._actor_gradient),
            networks.critic_layers(self._critic_gradient),
        )
        self._held: _Memory | None = None
        on_cpu = networks.actor.device.type == "cpu"
        self._steps = {
            acts: _Compiled(partial(self._whole, acts), partial(self._plain, acts), on_cpu)
            if compiled
            else partial(self._plain, acts)
            for acts in (False, True)
        }

    def _adam(self, parameter: torch.nn.Parameter, lr: float) -> torch.optim.Adam:
        # Holds the moments, and is what RLlib knows; `adam_step` makes its step.
        return torch.optim.Adam([parameter], lr=lr, betas=self.settings.betas, fused=True)

    @torch.no_grad()
    def update(self, batch: Batch) -> None:
        """One step of the critics, the actor and alpha, and of the targets every `target_update_every` updates."""
        networks, settings = self.networks, self.settings
        acts = self.updates % settings.actor_update_every == 0
        shape = (len(batch.actions), networks.action_size)
        noise = torch.cat([torch.randn(shape, generator=self.generator) for _ in range(1 + acts)])
        weights = _Weights(
            networks.actor.data,
            networks.critics.data,
            networks.log_alpha.data,
            moments_of(self.actor_optimizer),
            moments_of(self.critic_optimizer),
            moments_of(self.alpha_optimizer),
            self._statistics,
        )
        self._steps[acts](weights, networks.targets, batch, noise.to(networks.actor.device))
        if self.updates % settings.target_update_every == 0:
            networks.targets.lerp_(networks.critics.data, settings.tau)
        self.updates += 1
        self._counted += 1

    def _plain(self, acts: bool, weights: _Weights, targets: Tensor, batch: Batch, noise: Tensor) -> None:
        rows, hidden = len(batch.actions), self.settings.hidden
        if self._held is None or self._held.critics[0].shape[1] != rows:
            device, depth = targets.device, range(self.settings.depth)
            self._held = _Memory(
                [torch.empty((1, 2 * rows, hidden), device=device) for _ in depth],
                [torch.empty((2, rows, hidden), device=device) for _ in depth],
                [torch.empty((2, rows, hidden), device=device) for _ in range(2)],
            )
        self._step(acts, weights, self._layers, batch, noise, self._held)

    def _whole(self, acts: bool, weights: _Weights, targets: Tensor, batch: Batch, noise: Tensor) -> None:
        """For torch.compile: views are made inside, and the compiler takes care of memory."""
        networks = self.networks
        layers = _Layers(
            networks.actor_layers(weights.actor),
            networks.critic_layers(weights.critics),
            networks.critic_layers(targets),
        )
        self._step(acts, weights, layers, batch, noise, None)

    def _step(
        self, acts: bool, weights: _Weights, layers: _Layers, batch: Batch, noise: Tensor, memory: _Memory | None
    ) -> None:
        settings, products, rows = self.settings, self.products, len(batch.actions)
        alpha = weights.log_alpha.exp()
        # The critics' step does not change the policy: it acts for both steps at once.
        states = torch.cat([batch.next_observations, batch.observations]) if acts else batch.next_observations
        outputs = None if memory is None else [output[:, : len(states)] for output in memory.actor]
        head, hidden = forward(layers.actor, states[None], products, outputs)
        sample = sample_actions(head[0], noise, settings.log_std_bounds)
        ahead = PolicySample(*(part[:rows] for part in sample))
        figures = self._critic_step(weights, layers, batch, ahead, alpha, memory)
        if acts:
            now = PolicySample(*(part[rows:] for part in sample))
            hidden = [layer[:, rows:] for layer in hidden]
            figures += self._actor_step(weights, layers, hidden, now, alpha, memory)
        else:
            figures += [torch.zeros_like(alpha[0])] * 3
        loss, q, reward, actor, temperature, entropy = figures
        weights.statistics.add_(torch.stack([loss, actor, temperature, entropy, q, reward]))

    def _critic_step(
        self,
        weights: _Weights,
        layers: _Layers,
        batch: Batch,
        ahead: PolicySample,
        alpha: Tensor,
        memory: _Memory | None,
    ) -> list[Tensor]:
        """Both critics' step; their loss and mean value, and the mean reward."""
        settings, products, outputs = self.settings, self.products, memory and memory.critics
        values, _ = forward(layers.targets, critic_inputs(batch.next_observations, ahead.actions), products, outputs)
        value = torch.minimum(values[0], values[1])[:, 0] - alpha * ahead.log_probs
        target = batch.rewards + settings.gamma * batch.continues * value
        values, hidden = forward(layers.critics, critic_inputs(batch.observations, batch.actions), products, outputs)
        error = values - target[:, None]
        scratch, into = memory and memory.gradients, layers.critic_gradient
        gradients = backward(layers.critics, hidden, error * (2 / len(target)), products, scratch, into)
        gradient = _flat(gradients) if into is None else self._critic_gradient
        adam_step(weights.critics, gradient, weights.critic_moments, settings.lr, settings.betas)
        return [error.square().sum() / len(target), values.mean(), batch.rewards.mean()]

    def _actor_step(
        self,
        weights: _Weights,
        layers: _Layers,
        hidden: list[Tensor],
        now: PolicySample,
        alpha: Tensor,
        memory: _Memory | None,
    ) -> list[Tensor]:
        """The step of actor and alpha, with the inputs of the actor's layers in `hidden`; both losses and the entropy."""
        settings, products, outputs = self.settings, self.products, memory and memory.critics
        values, inside = forward(layers.critics, critic_inputs(hidden[0][0], now.actions), products, outputs)
        # Each row goes back through the one critic that is the minimum there.
        is_first = (values[0] < values[1]).float()
        chosen = torch.stack([is_first, 1 - is_first])
        scratch, into = memory and memory.gradients, layers.actor_gradient
        slopes = input_gradient(layers.critics, inside, chosen, self.networks.observation_size, products, scratch)
        output = policy_gradient(now, slopes.sum(0), alpha, settings.log_std_bounds)
        scratch = scratch and [part[:1] for part in scratch]
        gradients = backward(layers.actor, hidden, output[None], products, scratch, into)
        gradient = _flat(gradients) if into is None else self._actor_gradient
        entropy = -now.log_probs.mean()
        temperature = alpha * (entropy - self.target_entropy)
        if into is not None:
            temperature = self._alpha_gradient.copy_(temperature)
        adam_step(weights.actor, gradient, weights.actor_moments, settings.lr, settings.betas)
        adam_step(weights.log_alpha, temperature, weights.alpha_moments, settings.alpha_lr, settings.betas)
        loss = -alpha[0] * entropy - torch.minimum(values[0], values[1]).mean()
        return [loss, temperature[0], entropy]

    def reset_critics(self) -> None:
        """Reset the critics after the reward has changed: new weights, new optimiser state, targets equal to them."""
        self.networks.reset_critics(self.generator)
        self.critic_optimizer.state.clear()

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


def _flat(gradients: list[Layer]) -> Tensor:
    """As the vector of the weights."""
    count = len(gradients[0][0])
    return torch.cat([part.reshape(count, -1) for layer in gradients for part in layer], dim=1).view(-1)


class _Compiled:
    """A function under torch.compile, compiled at its first call; where that fails, `plain`."""

    def __init__(self, function: Callable[..., None], plain: Callable[..., None], on_cpu: bool) -> None:
        self._plain, self._tried = plain, False
        self._function = torch.compile(function, dynamic=False, fullgraph=True, options=_CPP if on_cpu else None)

    def __call__(self, *args: Any) -> None:
        if self._tried:
            self._function(*args)
            return
        try:
            self._function(*args)
        except Exception as error:  # dynamo and inductor raise what their parts raise; the function itself is tested
            logger.warning("SAC runs without torch.compile, somewhat slower: %s", str(error).split("\n")[0][:200])
            self._function = self._plain
            self._plain(*args)
        self._tried = True
