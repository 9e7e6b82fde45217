"""VLMLearner: RLlib's learner that runs the policy update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.learner.training_data import TrainingData

from rl_vlm.config import RunConfig
from rl_vlm.learning.batching import BatchBuilder, Minibatch
from rl_vlm.learning.optimizer import make_optimizer
from rl_vlm.learning.strategies.base import Strategy
from rl_vlm.learning.strategies.replicated import make_strategy
from rl_vlm.learning.update import PackedMinibatch, PolicyUpdater, UpdateStats
from rl_vlm.models.adapter import AdapterPayload
from rl_vlm.plugins import load_plugins

if TYPE_CHECKING:
    from rl_vlm.learning.module import VLMModule  # with peft and all of transformers, for env runners too
    from rl_vlm.learning.policy_model import PolicyModel

MicroBatchLoss = Callable[[PackedMinibatch, int, UpdateStats], torch.Tensor]


@dataclass(slots=True)
class UpdateBatch:
    """One learner's share of one update: its part of every optimiser step, and what all learners agree on."""

    minibatches: list[Minibatch]
    active: list[bool]
    epochs: int
    lr: float
    version: int  # of the adapter that the update makes

    def __len__(self) -> int:
        return sum(len(minibatch) for minibatch in self.minibatches)


@dataclass(slots=True)
class UpdateResult:
    """What `VLMLearner.update` returns. Learner 0 adds the new adapter."""

    stats: UpdateStats
    adapter: AdapterPayload | None = None


def make_updater(policy: PolicyModel, run: RunConfig) -> PolicyUpdater:
    """The policy update that a run configuration describes."""
    builder = BatchBuilder(
        image_token_id=policy.text.codec.image_token_id,
        pad_token_id=policy.text.codec.pad_token_id,
        images=policy.text.images,
        max_tokens=run.learner.micro_batch_tokens,
        share_prompts=run.learner.share_prompts,
    )
    return PolicyUpdater(
        policy.backbone,
        builder,
        run.algorithm,
        temperature=run.rollout.temperature,
        without_adapter=policy.without_adapter,
    )


def optimizer_step(
    strategy: Strategy, minibatch: PackedMinibatch, loss: MicroBatchLoss, max_grad_norm: float, stats: UpdateStats
) -> None:
    """One optimiser step; `loss(minibatch, number, stats)` is the loss of one micro-batch. Non-finite gradients are skipped."""
    for number in range(len(minibatch.micro_batches)):
        strategy.backward(loss(minibatch, number, stats))
    norm = strategy.step(max_grad_norm)
    if norm is None:
        stats.skipped_steps += 1
        return
    stats.grad_norm += norm
    stats.steps += 1


class VLMLearner(TorchLearner):
    """Trains the LoRA weights of one VLMModule on packed minibatches of trajectory groups."""

    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        """One AdamW over the LoRA weights, registered with RLlib under its learning rate."""
        module = self.module[module_id]
        optimizer = make_optimizer(module.policy, self._run)
        self.register_optimizer(
            module_id=module_id,
            optimizer=optimizer,
            params=module.policy.parameters,
            lr_or_lr_schedule=self._run.learner.lr,
        )

    @property
    def _run(self) -> RunConfig:
        return self.config.run_config  # type: ignore[no-any-return]

    @property
    def vlm(self) -> VLMModule:
        """The module."""
        return self.module[DEFAULT_MODULE_ID]  # type: ignore[no-any-return]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimiser."""
        return self.get_optimizer(DEFAULT_MODULE_ID)  # type: ignore[no-any-return]

    def build(self) -> None:
        """Build the module and the updater."""
        load_plugins(self._run.plugins)
        super().build()
        self._updater = make_updater(self.vlm.policy, self._run)
        self._strategy = make_strategy(self.config.num_learners)
        self._strategy.prepare(self.vlm.policy, self.optimizer)

    def _make_modules_ddp_if_necessary(self) -> None:
        """No DDP: the strategy adds the gradients, once per step, whatever the number of micro-batches."""

    def compute_loss_for_module(self, *, module_id: str, config: Any, batch: Any, fwd_out: Any) -> torch.Tensor:
        """The loss of one micro-batch; `batch` is (packed minibatch, number of the micro-batch, statistics)."""
        return self._updater.loss(*batch)

    def update(self, training_data: TrainingData | None = None, **_: Any) -> UpdateResult:  # type: ignore[override]
        """One GRPO update from an `UpdateBatch` (the only "episode" of `training_data`)."""
        assert training_data is not None
        training_data.validate()
        training_data.solve_refs()
        (batch,) = training_data.episodes
        self._weights_seq_no += 1
        for group in self.optimizer.param_groups:
            group["lr"] = batch.lr
        stats = UpdateStats()
        packed = self._updater.pack(batch.minibatches)

        def loss(minibatch: PackedMinibatch, number: int, stats: UpdateStats) -> torch.Tensor:
            return self.compute_loss_for_module(
                module_id=DEFAULT_MODULE_ID, config=self.config, batch=(minibatch, number, stats), fwd_out={}
            )

        for _epoch in range(batch.epochs):
            for minibatch, active in zip(packed, batch.active, strict=True):
                if active:
                    optimizer_step(self._strategy, minibatch, loss, self._run.learner.max_grad_norm, stats)
        first = self._learner_index in (None, 0)
        return UpdateResult(stats, self._strategy.gather_adapter(batch.version) if first else None)

    def adapter(self, version: int) -> AdapterPayload:
        """The adapter as it is."""
        return self._strategy.gather_adapter(version)

    def moments(self) -> dict[str, Any]:
        """The optimiser's state as flat CPU tensors by name: `exp_avg.3`, `exp_avg_sq.3`, `step.3`."""
        return self._strategy.state()

    def restore(self, adapter: dict[str, Any], moments: dict[str, Any]) -> None:
        """Load adapter tensors and optimiser moments."""
        self.vlm.set_state(adapter)
        self._strategy.restore(moments)
