"""The supervised training step: the mean negative log-likelihood of the assistant's tokens, and one Adam step on it.

Forward pass, positions, masks and packing are those of the policy update (`learning/update.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_vlm.config import SFTConfig
from rl_vlm.engines.base import EngineError
from rl_vlm.engines.decoder import Decoder
from rl_vlm.engines.rows import PreparedRequest
from rl_vlm.learning.batching import MicroBatch
from rl_vlm.learning.policy_model import PolicyModel
from rl_vlm.learning.strategies import Strategy
from rl_vlm.learning.update import lr_factor, make_builder, make_optimizer, micro_logprobs, predicting_states
from rl_vlm.models.qwen_vl import Backbone
from rl_vlm.models.supervised import backward_mean_nll
from rl_vlm.models.weights import WeightPayload
from rl_vlm.supervised.conversations import Prompt
from rl_vlm.types import GenerationRequest, RLVLMError, SamplingParams, Trajectory


class OutOfMemoryError(RLVLMError):
    """A step does not fit into the GPU's memory."""


class SFTTrainer:
    """Trains the LoRA weights of one policy.

    The policy's backbone must not suppress tokens: the loss is that of the plain model.
    """

    def __init__(self, policy: PolicyModel, job: SFTConfig) -> None:
        self._policy = policy
        self._learner = job.learner
        self._builder = make_builder(policy, job.learner)
        self._optimizer = make_optimizer(policy, job)
        self._strategy = Strategy()
        self._strategy.prepare(policy, self._optimizer)

    def step(self, batch: Sequence[Trajectory], lr: float) -> tuple[float, int, float | None]:
        """One optimiser step, in which every assistant token of the batch has the same weight. Raises OutOfMemoryError.

        Returns the loss (nats per assistant token) before the step, the number of these tokens, and the norm of the
        gradient before clipping; None: it was not finite and the step was skipped.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        targets = sum(int(trajectory.loss_mask.sum()) for trajectory in batch)
        try:
            loss = backward_mean_nll(map(self._logprobs, self._pack(batch)), targets)
            norm = self._strategy.step(self._learner.max_grad_norm)
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                "A step does not fit into the GPU's memory: lower learner.micro_batch_tokens or sft.max_length, or set "
                "learner.gradient_checkpointing."
            ) from error
        return loss, targets, norm

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Sequence[Trajectory]]) -> tuple[float, int]:
        """The mean negative log-likelihood of the assistant's tokens, nats per token, and their number."""
        total, targets = 0.0, 0
        for batch in batches:
            for micro in self._pack(batch):
                total -= float(self._logprobs(micro).double().sum())
                targets += len(micro.target)
        return total / max(targets, 1), targets

    def _pack(self, batch: Sequence[Trajectory]) -> list[MicroBatch]:
        """Micro-batches of rows of similar length; conversations with the same beginning share a row where that
        pays."""
        groups: dict[Any, list[Trajectory]] = {}
        for trajectory in batch:
            prompt = trajectory.token_ids[: int(np.argmax(trajectory.loss_mask))].tobytes()
            key = (prompt, tuple(image.sha256 for image in trajectory.images))
            groups.setdefault(key, []).append(trajectory)
        return self._builder.build(list(groups.values()))

    def _logprobs(self, micro: MicroBatch) -> Tensor:
        hidden = predicting_states(self._policy.backbone, micro)
        return micro_logprobs(self._policy.backbone, hidden, micro, temperature=1.0)[0]

    def adapter(self, version: int) -> WeightPayload:
        """The adapter as it is."""
        return self._strategy.gather_adapter(version)

    def moments(self) -> dict[str, Tensor]:
        """The optimiser's state as CPU tensors by name."""
        return self._strategy.state()

    def restore(self, adapter: WeightPayload, moments: dict[str, Tensor]) -> None:
        """Load what `adapter` and `moments` returned."""
        self._policy.load(adapter)
        self._strategy.restore(moments)


def learning_rate(job: SFTConfig, step: int, total: int) -> float:
    """Of step 0, 1, ...: a linear rise over `sft.warmup_steps`, then `learner.lr_schedule`."""
    learner, warmup = job.learner, job.sft.warmup_steps
    if step < warmup:
        return learner.lr * (step + 1) / (warmup + 1)
    return learner.lr * lr_factor(learner, step - warmup, total - 1 - warmup)


# Greedy answers of a model that is being trained, with the engine's own decoder and without a server.

_ROWS = 64  # at a time


class AnswerWriter:
    """Answers prompts with the policy's present weights.

    Args:
        policy: the model.
        max_context: tokens of a prompt and its answer; longer prompts get no answer.
        max_new_tokens: of an answer.
    """

    def __init__(self, policy: PolicyModel, max_context: int, max_new_tokens: int) -> None:
        codec = policy.text.codec
        # With the token mask of an engine, which never samples special tokens.
        suppressed = codec.suppressed_token_ids(policy.text.vocab_size)
        head = policy.backbone.head_dtype
        backbone = Backbone(policy.model, policy.text.images, suppressed, cache_bytes=0, head_dtype=head)
        self._decoder = Decoder(backbone, codec, max_context=max_context)
        self._codec = codec
        self._sampling = SamplingParams(max_new_tokens, temperature=0.0)

    @torch.inference_mode()
    def answers(self, prompts: Sequence[Prompt]) -> list[str | None]:
        """The greedy answer to each prompt; None where the prompt is too long."""
        found: dict[str, str] = {}
        for start in range(0, len(prompts), _ROWS):
            requests = [
                GenerationRequest(str(start + k), prompt.token_ids, self._sampling, prompt.images)
                for k, prompt in enumerate(prompts[start : start + _ROWS])
            ]
            prepared = self._decoder.prepare(requests)
            jobs = [job for job in prepared if not isinstance(job, EngineError)]
            finished: list[PreparedRequest] = self._decoder.admit(jobs) if jobs else []
            while self._decoder.num_rows:
                finished += self._decoder.step()
            for job in finished:
                found[job.request.request_id] = self._codec.decode(job.samples[0].token_ids)
        return [found.get(str(number)) for number in range(len(prompts))]
