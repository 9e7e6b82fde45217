"""VLMLearner: RLlib's learner around the policy update."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.learner.training_data import TrainingData

from rl_vlm.config import RunConfig
from rl_vlm.learning.batching import BatchBuilder, Minibatch
from rl_vlm.learning.update import (
    PackedMinibatch,
    PolicyUpdater,
    UpdateStats,
    gradient_vector,
    set_gradients,
)
from rl_vlm.models.adapter import AdapterPayload

if TYPE_CHECKING:
    from rl_vlm.learning.module import Policy, VLMModule  # with peft and all of transformers, for env runners too


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
    timings: dict[str, float] = field(default_factory=dict)


def make_updater(policy: Policy, run: RunConfig) -> PolicyUpdater:
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
        algorithm=run.algorithm,
        temperature=run.rollout.temperature,
        without_adapter=policy.without_adapter,
    )


def make_optimizer(policy: Policy, run: RunConfig) -> torch.optim.Optimizer:
    """AdamW on the LoRA weights (Adam when weight_decay is 0)."""
    learner = run.learner
    return torch.optim.AdamW(
        policy.parameters, lr=learner.lr, betas=learner.betas, weight_decay=learner.weight_decay, fused=True
    )


class OptimizerStep:
    """Accumulates the gradients of a minibatch over its micro-batches, adds them over learners, clips and steps."""

    def __init__(
        self, policy: Policy, optimizer: torch.optim.Optimizer, max_grad_norm: float, world_size: int = 1
    ) -> None:
        self._parameters = policy.parameters
        self._optimizer = optimizer
        self._max_grad_norm = max_grad_norm
        self._world_size = world_size

    def __call__(self, minibatch: PackedMinibatch, loss: Any, stats: UpdateStats) -> None:
        """`loss(minibatch, number, stats)` gives the loss of one micro-batch. Steps with non-finite gradients are skipped."""
        self._optimizer.zero_grad(set_to_none=True)
        for number in range(len(minibatch.micro_batches)):
            loss(minibatch, number, stats).backward()
        if self._world_size > 1:
            # One sum per optimiser step: the weights are normalised over all learners already.
            vector = gradient_vector(self._parameters)
            torch.distributed.all_reduce(vector)
            set_gradients(self._parameters, vector)
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm))
        if not torch.isfinite(torch.tensor(norm)):
            stats.skipped_steps += 1
            return
        self._optimizer.step()
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
        super().build()
        self._updater = make_updater(self.vlm.policy, self._run)
        world_size = torch.distributed.get_world_size() if self.config.num_learners > 1 else 1
        self._step = OptimizerStep(self.vlm.policy, self.optimizer, self._run.learner.max_grad_norm, world_size)

    def _make_modules_ddp_if_necessary(self) -> None:
        """No DDP: `OptimizerStep` adds the gradients itself, once per step, whatever the number of micro-batches."""

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
                    self._step(minibatch, loss, stats)
        first = self._learner_index in (None, 0)
        return UpdateResult(stats, self.vlm.policy.payload(batch.version) if first else None)

    def adapter(self, version: int) -> AdapterPayload:
        """The adapter as it is."""
        return self.vlm.policy.payload(version)

    def moments(self) -> dict[str, Any]:
        """The optimiser's state as flat tensors by name: `exp_avg.3`, `exp_avg_sq.3`, `step.3`."""
        state = self.optimizer.state_dict()["state"]
        return {f"{field}.{k}": tensor for k, fields in state.items() for field, tensor in fields.items()}

    def restore(self, adapter: dict[str, Any], moments: dict[str, Any]) -> None:
        """Load adapter tensors and optimiser moments."""
        self.vlm.set_state(adapter)
        state: dict[int, dict[str, Any]] = {}
        for name, tensor in moments.items():
            kind, _, number = name.rpartition(".")
            state.setdefault(int(number), {})[kind] = tensor
        current = self.optimizer.state_dict()
        self.optimizer.load_state_dict({"state": state, "param_groups": current["param_groups"]})
