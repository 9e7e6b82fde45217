"""SAC as an RLlib learner: its RLModule, its optimisers, and `update` on arrays of rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.core.rl_module.torch import TorchRLModule
from torch import Tensor

from rl_vlm.preference.sac import Batch, SACUpdater
from rl_vlm.preference.sac_networks import SACNetworks
from rl_vlm.preference.state_entropy import state_entropy, std_of, sums_of
from rl_vlm.seeding import derive_seed
from rl_vlm.types import UserInputError

# With fewer updates on a GPU compiling takes longer than it saves; on a CPU it saves nothing.
_WORTH_COMPILING = 100_000
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
        self.entropy_sums = torch.zeros(3, dtype=torch.float64)  # of the entropies that exploration was rewarded with
        super().build()

    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        config, self.networks = self.config.run_config, self.module[module_id].networks
        sac, seed = config.preference.sac, derive_seed(config.seed, 31)
        planned = config.preference.total_steps * sac.updates_per_step
        worth_it = config.learner.gpus_per_learner > 0 and planned >= _WORTH_COMPILING
        compiled = sac.compile == "on" or (sac.compile == "auto" and worth_it)
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
