"""SAC as an RLlib learner: its RLModule, its optimisers, and `update` on arrays of rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.core.rl_module.torch import TorchRLModule
from torch import Tensor

from rl_vlm.numerics import derive_seed
from rl_vlm.preference.sac import Batch, RunningStd, SACNetworks, SACUpdater, state_entropy
from rl_vlm.types import UserInputError

ActorLayers = list[tuple[np.ndarray, np.ndarray]]  # (weight [out, in], bias [out])
SACUpdateResult = tuple[dict[str, float], ActorLayers]  # mean statistics of the updates, and the policy after them


@dataclass(slots=True)
class SACUpdateBatch:
    """U updates: `rows` holds the fields of `Batch` as float32 arrays with U in front.

    With `visited` float32 [N, O] (exploration), the reward is the entropy of the states among these.
    """

    rows: tuple[np.ndarray, ...]
    visited: np.ndarray | None = None
    exploration_k: int = 5
    reset_critics: bool = False  # before the first update

    def __len__(self) -> int:
        return len(self.rows[0])


class SACModule(TorchRLModule):
    """The networks as an RLlib module. `model_config` holds `settings` (SACSection), `seed` and the two sizes."""

    def setup(self) -> None:
        """Make the networks; RLlib calls this once."""
        config: dict[str, Any] = self.model_config  # type: ignore[assignment]
        sizes = config["observation_size"], config["action_size"]
        self.networks = SACNetworks(*sizes, config["settings"], derive_seed(config["seed"], 30))

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As RLlib's, but copies: its arrays are views of the weights, which later updates change in place."""
        return {name: np.array(value) for name, value in super().get_state(*args, **kwargs).items()}

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """The mode of the policy for `obs` [B, O], under RLlib's key `actions`."""
        noise = torch.zeros(len(batch["obs"]), self.networks.action_size, device=batch["obs"].device)
        return {"actions": self.networks.act(batch["obs"], noise)[0]}


class SACLearner(TorchLearner):
    """Runs `SACUpdater`. `tensors` and `scalars` are its complete state; RLlib's own state holds it as well."""

    def build(self) -> None:
        """Build module and optimisers."""
        self.entropy_scale = RunningStd()
        super().build()

    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        """One Adam each for actor, critics and alpha."""
        config, self.networks = self.config.run_config, self.module[module_id].networks
        seed = derive_seed(config.seed, 31)
        self.updater = SACUpdater(self.networks, config.preference.sac, seed, self.config.compile_updates)
        for name, optimizer in self.updater.optimizers.items():
            params, lr = optimizer.param_groups[0]["params"], optimizer.param_groups[0]["lr"]
            self.register_optimizer(
                module_id=module_id, optimizer_name=name, optimizer=optimizer, params=params, lr_or_lr_schedule=lr
            )

    def _make_modules_ddp_if_necessary(self) -> None:
        """There is one learner, so DDP is not needed."""

    def compute_loss_for_module(self, *, module_id: str, config: Any, batch: Batch, fwd_out: Any) -> Tensor:
        """RLlib wants this method; `update` makes a step for each loss instead."""
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
                self.entropy_scale.update(entropy)
                batch = batch._replace(rewards=entropy / self.entropy_scale.std)
            self.updater.update(batch)
        return self.updater.take_statistics(), self.actor_layers()

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.networks.log_alpha.device)

    def actor_layers(self) -> ActorLayers:
        """The policy's matrices. In the driver's own process they are views, which later updates change."""
        return [(layer.weight.data.cpu().numpy(), layer.bias.data.cpu().numpy()) for layer in self.networks.actor]

    def tensors(self) -> dict[str, Tensor]:
        """Networks, targets, log alpha, Adam's moments and the state of the noise, by name."""
        found = self.networks.state()
        for name, optimizer in self.updater.optimizers.items():
            for place, state in optimizer.state_dict()["state"].items():
                for key, tensor in state.items():
                    found[f"moments.{name}.{place}.{key}"] = tensor.cpu().clone()
        return {**found, "noise": self.updater.generator.get_state()}

    def scalars(self) -> dict[str, Any]:
        """The rest of the state."""
        return {"updates": self.updater.updates, "entropy_scale": asdict(self.entropy_scale)}

    def restore(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        """Load a saved state. Raises UserInputError when it does not fit."""
        try:
            self.networks.load_state_dict({name: tensors[name] for name in self.networks.state_dict()})
        except (KeyError, RuntimeError) as error:
            reason = f"The checkpoint's networks have other shapes ({error}): keep preference.sac and the environment."
            raise UserInputError(reason) from error
        for name, optimizer in self.updater.optimizers.items():
            moments: defaultdict[int, dict[str, Tensor]] = defaultdict(dict)
            for key, tensor in tensors.items():
                if key.startswith(f"moments.{name}."):
                    place, kind = key.split(".")[2:]
                    moments[int(place)][kind] = tensor
            optimizer.load_state_dict({**optimizer.state_dict(), "state": dict(moments)})
        self.updater.generator.set_state(tensors["noise"])
        self.updater.updates = int(scalars["updates"])
        self.entropy_scale = RunningStd(**scalars["entropy_scale"])
