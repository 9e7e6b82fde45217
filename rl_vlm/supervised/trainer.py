"""The supervised training step: the mean negative log-likelihood of the assistant's tokens, and one Adam step on it.

Forward pass, positions, masks and packing are those of the policy update (`learning/update.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from rl_vlm.config import SFTConfig
from rl_vlm.learning.batching import MicroBatch, gathered, make_builder
from rl_vlm.learning.logprobs import predicting_states, token_logprobs
from rl_vlm.learning.optimizer import lr_factor, make_optimizer
from rl_vlm.learning.policy_model import PolicyModel
from rl_vlm.learning.strategies import Strategy
from rl_vlm.models.supervised import backward_mean_nll
from rl_vlm.models.weights import WeightPayload
from rl_vlm.types import RLVLMError, Trajectory

_ROWS = 128  # tokens whose logits are in memory at a time


class OutOfMemoryError(RLVLMError):
    """A step does not fit into the GPU's memory.

    Do: lower `learner.micro_batch_tokens` or `sft.max_length`, or set `learner.checkpoint: all`.
    """


class SFTTrainer:
    """Trains the LoRA weights of a policy, whose backbone must not suppress tokens."""

    def __init__(self, policy: PolicyModel, job: SFTConfig) -> None:
        self._policy = policy
        self._learner = job.learner
        self._builder = make_builder(policy, job.learner)
        self._optimizer = make_optimizer(policy, job)
        self._strategy = Strategy(policy, self._optimizer)

    def step(self, batch: Sequence[Trajectory], lr: float) -> tuple[float, int, float | None]:
        """One optimiser step: the loss before it (nats per assistant token), these tokens, and the gradient's norm;
        None: it was not finite, and nothing was changed. Raises OutOfMemoryError."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        targets = sum(int(trajectory.loss_mask.sum()) for trajectory in batch)
        try:
            loss = backward_mean_nll(map(self._logprobs, self._builder.build([batch])), targets)
            norm = self._strategy.step(self._learner.max_grad_norm)
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                "A step does not fit into the GPU's memory: lower learner.micro_batch_tokens or sft.max_length, or set "
                "learner.checkpoint: all."
            ) from error
        return loss, targets, norm

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Sequence[Trajectory]]) -> tuple[float, int]:
        """The mean negative log-likelihood of the assistant's tokens, nats per token, and their number."""
        total, targets = 0.0, 0
        for batch in batches:
            for micro in self._builder.build([batch]):
                total -= float(self._logprobs(micro).double().sum())
                targets += len(micro.target)
        return total / max(targets, 1), targets

    @torch.no_grad()
    def writes(self, batch: Sequence[Trajectory]) -> list[bool]:
        """Whether the greedy answer is the last turn of each conversation: each token must be the likeliest that an
        engine samples."""
        backbone, text = self._policy.backbone, self._policy.text
        never = torch.from_numpy(text.codec.suppressed_token_ids(text.vocab_size)).to(backbone.device)
        found: list[tuple[MicroBatch, np.ndarray]] = []
        for micro in self._builder.build([batch]):
            hidden = predicting_states(backbone, micro)
            # The logits of some tokens at a time: all of them would fill the memory.
            logits = (backbone.logits(rows).index_fill(1, never, -torch.inf) for rows in hidden.split(_ROWS))
            likeliest = torch.cat([rows.argmax(-1) for rows in logits])
            found.append((micro, likeliest.cpu().numpy() == micro.target))
        right = gathered(found)
        lengths = [one.turns[-1].stop - one.turns[-1].start for one in batch]
        return [bool(right[one.trajectory_id][-length:].all()) for one, length in zip(batch, lengths, strict=True)]

    def _logprobs(self, micro: MicroBatch) -> Tensor:
        backbone = self._policy.backbone
        hidden, target = predicting_states(backbone, micro), torch.from_numpy(micro.target).to(backbone.device)
        return token_logprobs(backbone, hidden, target, 1.0, entropy="none")[0]

    def adapter(self, version: int) -> WeightPayload:
        return self._policy.payload(version)

    def moments(self) -> dict[str, Tensor]:
        return self._strategy.state()

    def restore(self, adapter: WeightPayload, moments: dict[str, Tensor]) -> None:
        self._policy.load(adapter)
        self._strategy.restore(moments)


def learning_rate(job: SFTConfig, step: int, total: int) -> float:
    """Of step 0, 1, ...: a linear rise over `sft.warmup_steps`, then `learner.lr_schedule`."""
    learner, warmup = job.learner, job.sft.warmup_steps
    if step < warmup:
        return learner.lr * (step + 1) / (warmup + 1)
    return learner.lr * lr_factor(learner, step - warmup, total - 1 - warmup)
