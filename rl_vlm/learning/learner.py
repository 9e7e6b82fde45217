"""VLMLearner: RLlib's learner that runs the policy update."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.core.rl_module.torch import TorchRLModule

from rl_vlm.config import PolicyConfig
from rl_vlm.envs.loading import load_plugins
from rl_vlm.learning.optimizer import make_optimizer, move_average, scale_lr
from rl_vlm.learning.plan import ScoreBatch, Scores, UpdateBatch, UpdateResult, UpdateStats
from rl_vlm.learning.policy_model import PolicyModel
from rl_vlm.learning.sight_check import sight_logprobs
from rl_vlm.learning.update import PolicyUpdater, make_strategy
from rl_vlm.models.devices import learner_device, limit_memory
from rl_vlm.models.shared_memory import VersionRoom
from rl_vlm.models.tensor_bytes import packed_size
from rl_vlm.models.weights import WeightPayload
from rl_vlm.tracing import continued, span
from rl_vlm.types import Trajectory

Tensors = dict[str, torch.Tensor]
# Weights, the optimiser's moments by name (`exp_avg.3`), a critic (`critic.`) with averaged weights (`average.`), and
# the state of torch's random numbers.
Snapshot = tuple[WeightPayload, Tensors, Tensors, torch.Tensor]


class VLMModule(TorchRLModule):
    """RLlib's view of the policy. `model_config` holds `model` (a ModelReference) and `run_config`."""

    def setup(self) -> None:
        """Load the model; RLlib calls this once, in the learner's process."""
        settings: dict[str, Any] = self.model_config  # type: ignore[assignment]
        run: PolicyConfig = settings["run_config"]
        torch.set_num_threads(run.learner.num_threads)
        device = learner_device(run)  # decided here, because the driver may sit on a machine without a GPU
        limit_memory(run, device)
        self.policy = PolicyModel(settings["model"].on_this_node(), run, device)
        self.vlm = self.policy.model  # registered as a submodule, so that RLlib finds the parameters
        if self.policy.critic is not None:
            self.value_head = self.policy.critic.head

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Nothing: RLlib asks for it once, for env runners that hold weights; `VLMLearner.snapshot` is saved."""
        return {}

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        raise TypeError("VLMModule samples through Ray Serve; it has no forward pass over RLlib batches.")


class VLMLearner(TorchLearner):
    """Trains one VLMModule on packed minibatches of trajectory groups."""

    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        """One optimiser of what is trained and the critic, registered with RLlib."""
        optimizer = make_optimizer(self.module[module_id].policy, self._run)
        self.register_optimizer(
            module_id=module_id,
            optimizer=optimizer,
            params=[parameter for group in optimizer.param_groups for parameter in group["params"]],
            lr_or_lr_schedule=self._run.learner.lr,
        )

    @property
    def _run(self) -> PolicyConfig:
        return self.config.run_config  # type: ignore[no-any-return]

    def build(self) -> None:
        """Build the module and the updater."""
        load_plugins(self._run.plugins)
        super().build()
        self.policy: PolicyModel = self.module[DEFAULT_MODULE_ID].policy
        self.updater, self._published_dtype = PolicyUpdater(self.policy, self._run), self._run.published_dtype
        self.optimizer: torch.optim.Optimizer = self.get_optimizer(DEFAULT_MODULE_ID)
        self._strategy = make_strategy(self._run.learner, self.policy, self.optimizer)
        averaged = self.policy.trained.weights() if self._run.learner.ema_decay else {}
        self._average = {name: tensor.detach().clone() for name, tensor in averaged.items()}

    def _map_module_to_device(self, module: Any) -> None:
        """The policy is loaded where it belongs; layers that will be sharded are in host memory until then."""

    def _make_modules_ddp_if_necessary(self) -> None:
        """No DDP: the strategy adds the gradients, once per step."""

    def compute_loss_for_module(self, **_: Any) -> torch.Tensor:
        raise RuntimeError("PolicyUpdater computes the loss: RLlib's own update loop never runs.")

    def update(self, training_data: TrainingData | None = None, **_: Any) -> UpdateResult | Scores:  # type: ignore[override]
        """One update, or scores: the only "episode" of `training_data` is an `UpdateBatch` or a `ScoreBatch`."""
        assert training_data is not None
        training_data.validate()
        training_data.solve_refs()
        (batch,) = training_data.episodes
        if isinstance(batch, ScoreBatch):
            return self.updater.score(batch.minibatches)
        assert isinstance(batch, UpdateBatch)
        self._weights_seq_no += 1
        scale_lr(self.optimizer, batch.lr_factor)
        result = UpdateResult(UpdateStats())
        with continued(batch.trace, f"learner-{self._learner_index or 0}") as result.spans, span("update"):
            is_first, room = self._learner_index in (None, 0), None
            if is_first and batch.folder and Path(batch.folder).is_dir():  # the driver is on this node
                room = VersionRoom(
                    Path(batch.folder), packed_size(self.policy.trained.weights(), self._published_dtype)
                )
            with span("pack"):
                packed = self.updater.pack(batch)
            norm, decay = self._run.learner.max_grad_norm, self._run.learner.ema_decay
            for micro_batches, active in [*zip(packed, batch.active, strict=True)] * batch.epochs:
                if active:
                    with span("optimizer_step", micro_batches=len(micro_batches)):
                        taken = self.updater.step(self._strategy, micro_batches, norm, result.stats, batch.learn_policy)
                    if taken and decay is not None and batch.learn_policy:
                        move_average(self._average, self.policy.trained.weights(), decay)
            if batch.record:
                result.tokens = self.updater.record(packed)
            if is_first or (self._run.trains_full and self._run.learner.shards_layers):  # all take part in gathering
                payload = self.policy.payload(batch.version, dtype=self._published_dtype, room=room)
                result.adapter = payload if is_first else None
        result.stats.add({"memory/learner": _memory_gib(self.policy.backbone.device)})
        self._give_back()
        return result

    def sight_logprobs(self, trajectories: Sequence[Trajectory], counterfactuals: bool) -> dict[str, list[np.ndarray]]:
        """See learning/sight_check.py."""
        logprobs = sight_logprobs(self.updater.recompute, self.policy.text.images, trajectories, counterfactuals)
        self._give_back()
        return logprobs

    def _give_back(self) -> None:
        """Free the memory that torch keeps, for the replica that takes turns with this learner."""
        if self._run.takes_turns and self.policy.backbone.device.type == "cuda":
            torch.cuda.empty_cache()

    def averaged_adapter(self, version: int) -> WeightPayload:
        """The average of the weights under `learner.ema_decay`."""
        return self.policy.payload(version, self._average)

    def snapshot(self, version: int) -> Snapshot:
        """What a checkpoint holds of a learner, for `restore`."""
        critic = self.policy.critic
        extras = {f"critic.{name}": tensor for name, tensor in (critic.state() if critic else {}).items()}
        extras |= {f"average.{name}": tensor.cpu().clone() for name, tensor in self._average.items()}
        return self.policy.payload(version), self._strategy.state(), extras, torch.get_rng_state()

    @torch.no_grad()
    def restore(self, weights: WeightPayload, moments: Tensors, extras: Tensors, random: torch.Tensor) -> None:
        """Load what `snapshot` returned."""
        self.policy.load(weights)
        self._strategy.restore(moments)
        if self.policy.critic is not None:
            self.policy.critic.restore(_under("critic.", extras))
        # A run that goes on with an average it did not have begins it at the present weights.
        averages = _under("average.", extras) or self.policy.trained.weights()
        for name, average in self._average.items():
            average.copy_(averages[name])
        torch.set_rng_state(random)


def _memory_gib(device: torch.device) -> float:
    """What torch has reserved of the GPU at most since it was asked last; without one, what the process takes."""
    if device.type != "cuda":
        return float(psutil.Process().memory_info().rss) / 2**30
    reserved = torch.cuda.max_memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    return reserved / 2**30


def _under(prefix: str, tensors: Tensors) -> Tensors:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
