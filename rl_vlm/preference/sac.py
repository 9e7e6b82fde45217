"""One update of SAC (arXiv 1801.01290 and 1812.05905) with RL-VLM-F's settings."""

from __future__ import annotations

import itertools
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.core.rl_module.torch import TorchRLModule
from torch import Tensor, nn
from torch.nn import functional

from rl_vlm.config import SACSection
from rl_vlm.models.kernels import FastLinear
from rl_vlm.seeding import derive_seed
from rl_vlm.types import UserInputError

# SAC's networks and its policy, a squashed Gaussian. Plain torch.


def sample_actions(head: Tensor, noise: Tensor, log_std_bounds: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Actions [B, A] in (-1, 1) and log-probabilities [B] of the squashed Gaussian (arXiv 1801.01290, appendix C).

    `head` [B, 2 A] holds the mean and the raw log standard deviation, `noise` [B, A] is standard normal.
    As in the original, log std = low + (high - low) / 2 × (tanh(raw) + 1). log(1 - tanh²) is in its stable form.
    """
    low, high = log_std_bounds
    mean, raw = head.chunk(2, dim=1)
    log_std = low + 0.5 * (high - low) * (raw.tanh() + 1)
    before = mean + noise * log_std.exp()
    log_normal = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
    log_slope = 2 * (math.log(2) - before - functional.softplus(-2 * before))
    return before.tanh(), (log_normal - log_slope).sum(1)


class MLP(nn.ModuleList):
    """Linear layers of these sizes with ReLU between them."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(FastLinear(*pair) for pair in itertools.pairwise(sizes))

    def forward(self, inputs: Tensor) -> Tensor:
        *hidden, last = self
        for layer in hidden:
            inputs = layer(inputs).relu_()
        return last(inputs)  # type: ignore[no-any-return]


@torch.no_grad()
def _initialize(networks: nn.Module, generator: torch.Generator) -> None:
    """Make every matrix orthogonal and every bias zero."""
    for parameter in networks.parameters():
        parameter.zero_()
        if parameter.ndim == 2:
            parameter.copy_(nn.init.orthogonal_(torch.empty(parameter.shape), generator=generator))


class SACNetworks(nn.Module):
    """The policy `actor`, two `critics`, their `targets`, and `log_alpha` [1]."""

    def __init__(self, observation_size: int, action_size: int, settings: SACSection, seed: int) -> None:
        super().__init__()
        self.action_size, self.log_std_bounds = action_size, settings.log_std_bounds
        hidden = [settings.hidden] * settings.depth
        critic_sizes = (observation_size + action_size, *hidden, 1)
        self.actor = MLP((observation_size, *hidden, 2 * action_size))
        self.critics = nn.ModuleList(MLP(critic_sizes) for _ in range(2))
        self.targets = nn.ModuleList(MLP(critic_sizes) for _ in range(2)).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.tensor([math.log(settings.init_alpha)]))
        generator = torch.Generator().manual_seed(seed)
        _initialize(self.actor, generator)
        self.reset_critics(generator)

    def reset_critics(self, generator: torch.Generator) -> None:
        _initialize(self.critics, generator)
        self.targets.load_state_dict(self.critics.state_dict())

    def act(self, observations: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """As `sample_actions`, for observations [B, O]; zero noise gives the mode."""
        return sample_actions(self.actor(observations), noise, self.log_std_bounds)

    @staticmethod
    def q_values(critics: nn.ModuleList, observations: Tensor, actions: Tensor) -> list[Tensor]:
        """The values [B] by each of `critics` or `targets`."""
        inputs = torch.cat([observations, actions], dim=1)
        return [critic(inputs)[:, 0] for critic in critics]


# Exploration before the first labels by state entropy: PEBBLE, arXiv 2106.05091, section 4.1.

_EXTRA_CANDIDATES = 8  # candidates beyond the k nearest, whose exact distances are computed


def state_entropy(states: Tensor, visited: Tensor, k: int) -> Tensor:
    """float32 [B]: the distance from each of `states` [B, O] to the k-th nearest other one of `visited` [N, O].

    `visited` holds `states` too, so the nearest neighbour is the state itself and is not counted. With N <= k, the
    farthest one counts. One matrix product ranks the neighbours, by |visited|² - 2 state · visited. It is inexact for
    close ones, so the distances to the nearest few are computed exactly.
    """
    wanted = min(k + 1, len(visited))
    candidates = min(wanted + _EXTRA_CANDIDATES, len(visited))
    centre = visited.mean(0)
    near, far = states - centre, visited - centre
    squared = torch.addmm(far.square().sum(1)[None, :], near, far.t(), alpha=-2.0)
    places = squared.topk(candidates, dim=1, largest=False, sorted=False).indices
    distances = (states[:, None, :] - visited[places]).square().sum(2).sqrt()
    return distances.kthvalue(wanted, dim=1).values


def sums_of(values: Tensor) -> Tensor:
    """float64 [3] on the CPU: the number of values [B], their sum, and the sum of their squares."""
    exact = values.double()
    return torch.stack([torch.ones_like(exact), exact, exact.square()]).sum(1).cpu()


def std_of(sums: Tensor) -> float:
    """The standard deviation of all values whose `sums_of` were added; 1 where all are equal."""
    count, total, squares = sums.tolist()
    variance = squares / count - (total / count) ** 2
    return float(variance**0.5) if variance > 0 else 1.0


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


# With fewer updates on a GPU compiling takes longer than it saves; on a CPU it saves nothing.
_WORTH_COMPILING = 100_000

# SAC as an RLlib learner: its RLModule, its optimisers, and `update` on arrays of rows.

ActorLayers = list[tuple[np.ndarray, np.ndarray]]  # (weight [out, in], bias [out])
SACUpdateResult = tuple[dict[str, float], ActorLayers]  # mean statistics of the updates, and the policy after them


@dataclass(slots=True)
class SACUpdateBatch:
    """U updates: `rows` holds the fields of `Batch` as float32 arrays with U in front. With `visited` float32 [N, O]
    (exploration), the reward is the entropy of the states among these."""

    rows: tuple[np.ndarray, ...]
    visited: np.ndarray | None = None
    exploration_k: int = 5
    reset_critics: bool = False  # before the first update

    def __len__(self) -> int:
        return len(self.rows[0])


class SACModule(TorchRLModule):
    """The networks as an RLlib module. `model_config` holds `settings` (SACSection), `seed` and the two sizes."""

    def setup(self) -> None:
        config: dict[str, Any] = self.model_config  # type: ignore[assignment]
        sizes = config["observation_size"], config["action_size"]
        self.networks = SACNetworks(*sizes, config["settings"], derive_seed(config["seed"], 30))


class SACLearner(TorchLearner):
    """Runs `SACUpdater`, whose state is `snapshot` and not RLlib's."""

    def build(self) -> None:
        self.entropy_sums = torch.zeros(3, dtype=torch.float64)  # of all that exploration was rewarded by
        super().build()

    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        config, self.networks = self.config.run_config, self.module[module_id].networks
        sac, seed = config.preference.sac, derive_seed(config.seed, 31)
        planned = config.preference.total_steps * sac.updates_per_step
        pays = config.learner.gpus_per_learner > 0 and planned >= _WORTH_COMPILING
        compiled = sac.compile == "on" or (sac.compile == "auto" and pays)
        self.updater = SACUpdater(self.networks, sac, seed, compiled)

    def _make_modules_ddp_if_necessary(self) -> None: ...  # there is one learner

    def compute_loss_for_module(self, *, module_id: str, config: Any, batch: Batch, fwd_out: Any) -> Tensor:
        raise RuntimeError("SACUpdater makes the steps: each loss has an optimiser of its own.")

    def update(self, training_data: TrainingData | None = None, **_: Any) -> SACUpdateResult:  # type: ignore[override]
        """Make the updates of one `SACUpdateBatch` (the only "episode" of `training_data`)."""
        assert training_data is not None
        training_data.validate()
        training_data.solve_refs()
        (updates,) = training_data.episodes
        self._weights_seq_no += 1
        if updates.reset_critics:
            self.updater.reset_critics()
        visited = None if updates.visited is None else self._tensor(updates.visited)
        for arrays in zip(*updates.rows, strict=True):
            batch = Batch(*map(self._tensor, arrays))
            if visited is not None:
                entropy = state_entropy(batch.observations, visited, updates.exploration_k)
                self.entropy_sums += sums_of(entropy)
                batch = batch._replace(rewards=entropy / std_of(self.entropy_sums))
            self.updater.update(batch)
        return self.updater.take_statistics(), self.actor_layers()

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.networks.log_alpha.device)

    def actor_layers(self) -> ActorLayers:
        """The policy's matrices. In the driver's own process they are views, which later updates change."""
        return [(layer.weight.data.cpu().numpy(), layer.bias.data.cpu().numpy()) for layer in self.networks.actor]

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of networks, Adam's moments, the state of the noise and all counts, by name, on the CPU."""
        state = {name: tensor.detach().cpu().clone() for name, tensor in self.networks.state_dict().items()}
        for name, optimizer in self.updater.optimizers.items():
            for index, moments in optimizer.state_dict()["state"].items():
                state |= {f"moments.{name}.{index}.{key}": tensor.cpu().clone() for key, tensor in moments.items()}
        noise, updates = self.updater.generator.get_state(), torch.tensor([self.updater.updates])
        return {**state, "noise": noise, "entropy_scale": self.entropy_sums.clone(), "updates": updates}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Load a saved state. Raises UserInputError when it does not fit."""
        try:
            self.networks.load_state_dict({name: state[name] for name in self.networks.state_dict()})
        except (KeyError, RuntimeError) as error:
            reason = f"The checkpoint's networks have other shapes ({error}): keep preference.sac and the environment."
            raise UserInputError(reason) from error
        for name, optimizer in self.updater.optimizers.items():
            moments: defaultdict[int, dict[str, Tensor]] = defaultdict(dict)
            for key, tensor in state.items():
                if key.startswith(f"moments.{name}."):
                    index, kind = key.split(".")[2:]
                    moments[int(index)][kind] = tensor
            optimizer.load_state_dict({**optimizer.state_dict(), "state": dict(moments)})
        self.updater.generator.set_state(state["noise"])
        self.updater.updates = int(state["updates"])
        self.entropy_sums = state["entropy_scale"].clone()
