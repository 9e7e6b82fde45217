"""SAC as an RLlib learner: its RLModule, its optimisers, and `update` on arrays of rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.core.rl_module.torch import TorchRLModule
from torch import Tensor

from rl_vlm.config import SACSection
from rl_vlm.models.products import choose_product, products_of, torch_products
from rl_vlm.preference.exploration import RunningStd, state_entropy
from rl_vlm.preference.mlp import forward
from rl_vlm.preference.networks import SACNetworks, sample_actions
from rl_vlm.preference.sac import SACUpdater
from rl_vlm.preference.sac_losses import Batch, actor_loss, alpha_loss, critic_loss, critic_target
from rl_vlm.seeding import derive_seed
from rl_vlm.types import UserInputError

ActorLayers = list[tuple[np.ndarray, np.ndarray]]


@dataclass(slots=True)
class SACUpdateBatch:
    """Rows for U updates of batch size B, one array per field.

    observations, next_observations float32 [U, B, O]; actions float32 [U, B, A]; rewards, continues float32 [U, B].
    With `visited` float32 [N, O] (exploration), the reward is the entropy of the states among these.
    """

    observations: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    next_observations: np.ndarray
    continues: np.ndarray
    visited: np.ndarray | None = None
    exploration_k: int = 5
    reset_critics: bool = False  # before the first update

    def __len__(self) -> int:
        return int(self.rewards.size)


@dataclass(slots=True)
class SACUpdateResult:
    """Mean figures of the updates, and the policy after them."""

    statistics: dict[str, float]
    actor: ActorLayers = field(default_factory=list)


class SACModule(TorchRLModule):
    """The networks as an RLlib module. `model_config` holds `settings` (SACSection), `seed` and the two sizes."""

    def setup(self) -> None:
        """Make the networks; RLlib calls this once."""
        config: dict[str, Any] = self.model_config  # type: ignore[assignment]
        settings: SACSection = config["settings"]
        self.networks = SACNetworks(
            config["observation_size"],
            config["action_size"],
            settings.hidden,
            settings.depth,
            settings.init_alpha,
            derive_seed(config["seed"], 30),
        )

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As RLlib's, but copies: its arrays are views of the weights, which later updates change in place."""
        return {name: np.array(value) for name, value in super().get_state(*args, **kwargs).items()}

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """The mode of the policy for `obs` [B, O], under RLlib's key `actions`."""
        networks = self.networks
        head, _ = forward(networks.actor_layers(networks.actor), batch["obs"][None])
        settings: SACSection = self.model_config["settings"]  # type: ignore[index]
        noise = torch.zeros(len(head[0]), networks.action_size, device=head.device)
        return {"actions": sample_actions(head[0], noise, settings.log_std_bounds).actions}


class SACLearner(TorchLearner):
    """Runs `SACUpdater`. `tensors` and `scalars` are its complete state; RLlib's own state holds it as well."""

    def build(self) -> None:
        """Build module and optimisers."""
        self.entropy_scale = RunningStd()
        super().build()

    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        """One Adam each for actor, critics and alpha."""
        run = self.config.run_config
        settings: SACSection = run.preference.sac
        networks = self.module[module_id].networks
        products = torch_products
        if networks.actor.device.type == "cpu":
            products = products_of(choose_product(run.learner.cpu_product, run.deterministic, "updates"))
        self.updater = SACUpdater(
            networks, settings, derive_seed(run.seed, 31), compiled=self.config.compile_updates, products=products
        )
        for name, optimizer, parameter, lr in (
            ("actor", self.updater.actor_optimizer, networks.actor, settings.lr),
            ("critic", self.updater.critic_optimizer, networks.critics, settings.lr),
            ("alpha", self.updater.alpha_optimizer, networks.log_alpha, settings.alpha_lr),
        ):
            self.register_optimizer(
                module_id=module_id, optimizer_name=name, optimizer=optimizer, params=[parameter], lr_or_lr_schedule=lr
            )

    @property
    def networks(self) -> SACNetworks:
        """Those of the module."""
        return self.module[DEFAULT_MODULE_ID].networks  # type: ignore[no-any-return]

    def _make_modules_ddp_if_necessary(self) -> None:
        """There is one learner, so DDP is not needed."""

    def compute_loss_for_module(self, *, module_id: str, config: Any, batch: Batch, fwd_out: Any) -> Tensor:
        """The sum of the papers' three losses; `update` makes the same steps faster."""
        updater, settings = self.updater, self.updater.settings
        noise = [torch.randn(batch.actions.shape, generator=updater.generator) for _ in range(2)]
        target = critic_target(self.networks, batch, noise[0], settings)
        policy, log_probs = actor_loss(self.networks, batch, noise[1], settings)
        temperature = alpha_loss(self.networks, log_probs, updater.target_entropy)
        return critic_loss(self.networks, batch, target) + policy + temperature

    def update(self, training_data: TrainingData | None = None, **_: Any) -> SACUpdateResult:  # type: ignore[override]
        """The updates of one `SACUpdateBatch` (the only "episode" of `training_data`)."""
        assert training_data is not None
        training_data.validate()
        training_data.solve_refs()
        (rows,) = training_data.episodes
        self._weights_seq_no += 1
        if rows.reset_critics:
            self.updater.reset_critics()
        visited = None if rows.visited is None else self._tensor(rows.visited)
        for number in range(len(rows.rewards)):
            batch = Batch(*(self._tensor(getattr(rows, name)[number]) for name in Batch._fields))
            if visited is not None:
                entropy = state_entropy(batch.observations, visited, rows.exploration_k)
                self.entropy_scale.update(entropy)
                batch = batch._replace(rewards=entropy / self.entropy_scale.std)
            self.updater.update(batch)
        return SACUpdateResult(self.updater.take_statistics(), self.actor_layers())

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.networks.actor.device)

    def actor_layers(self) -> ActorLayers:
        """The policy's matrices. In the driver's own process they are views, which later updates change."""
        layers = self.networks.actor_layers(self.networks.actor.data)
        return [(weight[0].cpu().numpy(), bias[0, 0].cpu().numpy()) for weight, bias in layers]

    def tensors(self) -> dict[str, Tensor]:
        """Networks, targets, log alpha, Adam's moments and the state of the noise, by name."""
        found = self.networks.state()
        for name, optimizer in self._optimizers().items():
            for state in optimizer.state.values():
                found |= {f"moments.{name}.{key}": tensor.detach().cpu().clone() for key, tensor in state.items()}
        return {**found, "noise": self.updater.generator.get_state()}

    def scalars(self) -> dict[str, Any]:
        """The rest of the state."""
        return {"updates": self.updater.updates, "entropy_scale": self.entropy_scale.state()}

    def restore(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        """Load a saved state. Raises UserInputError when it does not fit."""
        try:
            self.networks.load(tensors)
        except (KeyError, RuntimeError) as error:
            raise UserInputError(
                f"The checkpoint's networks have other shapes ({error}): keep preference.sac and the environment."
            ) from error
        for name, optimizer in self._optimizers().items():
            prefix = f"moments.{name}."
            moments = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": {0: moments} if moments else {}, "param_groups": groups})
        self.updater.generator.set_state(tensors["noise"])
        self.updater.updates = int(scalars["updates"])
        self.entropy_scale.load(scalars["entropy_scale"])

    def _optimizers(self) -> dict[str, torch.optim.Optimizer]:
        updater = self.updater
        return {"actor": updater.actor_optimizer, "critic": updater.critic_optimizer, "alpha": updater.alpha_optimizer}
