"""The peer: TRL's GRPOTrainer on the same model folder, items, reward, LoRA and schedule, as fast as it honestly goes.

Set as in the run's config: prompts, group size, optimiser steps per rollout, completion length, temperature, clipping,
loss, learning rate and its linear decay, betas and clipping norm. `reward_weights` carries the advantage's scale, since
TRL has no setting of that name and a reward's factor is the advantage's where nothing is divided by the deviation.
Special tokens other than the end of turn are suppressed in sampling, as the system does: a sampled <|image_pad|>
without an image stops the model.

Set for speed: float32 without autocast; no gradient checkpointing; fused AdamW and SDPA attention (both are defaults);
no logging, checkpoints, reference model or data workers. TRL reads the rows of a rollout once per optimiser step, so
the dataset hands out rows that were made beforehand, with images as uint8 tensors.

Tried and left out, because none was faster: gradient checkpointing (TRL's default), a plain dataset, eager attention,
PIL images instead of tensors, a static cache, LoRA without peft's wrapper, `torch_compile`.

What TRL does that no setting changes: it prepares and encodes the image of every row, in generation, in the pass for
the old log-probabilities and in the loss; that pass covers the first optimiser step too, whose ratio is 1 anyway; rows
with zero advantage are differentiated like others. Its continuous batching refuses multimodal models, and its own vLLM
mode is not used here, since all contenders sample with transformers.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from huggingface_hub import constants
from transformers import AutoProcessor, TrainerCallback
from trl import import_utils

from rl_vlm.config import PolicyConfig
from rl_vlm.envs.registry import make
from rl_vlm.models.loading import load_model, load_text_side, quiet_libraries
from rl_vlm.models.lora import lora_config
from rl_vlm.types import Split, UserInputError
from rl_vlm.zoo.shapes.environment import ShapesEnv, parse_answer, shapes_item

# TRL imports vLLM where it is installed, which takes longer than all else here and is not used.
import_utils.is_vllm_available = lambda min_version=None: False
# TRL reports every trainer that is made to its makers.
constants.HF_HUB_DISABLE_TELEMETRY = True

from trl import GRPOConfig, GRPOTrainer  # noqa: E402  # only now, without vLLM

Row = dict[str, Any]


class TRLLoop:
    """GRPOTrainer, one rollout at a time, for `benchmarks/loop.py` and the tests.

    `Trainer.train()` runs in a thread of its own, which a callback stops after the last optimiser step of each rollout.
    So a step's seconds hold everything that TRL does for it: reading the rows, generation, rewards, old
    log-probabilities, optimiser steps, schedule and the trainer's own bookkeeping.
    """

    def __init__(self, folder: Path, run: PolicyConfig, num_threads: int = 1) -> None:
        quiet_libraries()
        torch.set_num_threads(num_threads)
        self._num_threads = num_threads
        self.prompts = run.rollout.prompts_per_iteration
        self._env = _shapes(run)
        self._processor = AutoProcessor.from_pretrained(folder, padding_side="left", truncation_side="left")
        text = load_text_side(folder)
        self._end_of_turn: int = text.codec.end_of_turn_id
        self._suppressed: list[int] = text.codec.suppressed_token_ids(text.vocab_size).tolist()
        self._scratch = tempfile.TemporaryDirectory(prefix="rl-vlm-trl-")
        self._error: BaseException | None = None
        self._gate = _Gate(run.algorithm.minibatches * run.algorithm.epochs)
        lora = run.model.lora
        self.trainer = _TimedTrainer(
            load_model(folder), self._grade, grpo_arguments(run, self._scratch.name, self._suppressed),
            self._dataset("train"), processing_class=self._processor, callbacks=[self._gate],
            peft_config=lora_config(lora.rank, lora.alpha, lora.target_modules),
        )  # fmt: skip
        # A daemon: it waits at the gate for a next step that may never come.
        threading.Thread(target=self._train, name="trl", daemon=True).start()

    def step(self) -> dict[str, float]:
        """One rollout and its optimiser steps: seconds by activity (`sample`: generation and rewards)."""
        self.trainer.sample_seconds = 0.0
        started = time.perf_counter()
        self._gate.pass_one()
        total = time.perf_counter() - started
        if self._error is not None:
            raise RuntimeError("TRL's training failed.") from self._error
        if self._gate.closed:
            raise UserInputError("The schedule has ended: raise algorithm.iterations for more steps.")
        sample = self.trainer.sample_seconds
        return {"sample": sample, "learn": total - sample, "total": total}

    def _train(self) -> None:
        torch.set_num_threads(self._num_threads)  # torch keeps this number per thread
        try:
            self.trainer.train()
        finally:
            self._error = sys.exception()
            self._gate.close()

    def _row(self, split: Split, index: int) -> Row:
        item = shapes_item(self._env.task, split, index, self._env.seed, self._env.image_size)
        pixels = torch.from_numpy(np.array(item.image.to_pil()))
        return {
            "prompt": [{"role": "user", "content": item.question}],
            "image": pixels.permute(2, 0, 1).contiguous(),  # [3, height, width]
            "answer": item.answer,
        }

    def _dataset(self, split: Split) -> Dataset:
        rows = [self._row(split, index) for index in range(self._env.num_items(split))]

        def read(batch: dict[str, list[int]]) -> dict[str, list[Any]]:
            return {column: [rows[index][column] for index in batch["index"]] for column in rows[0]}

        return Dataset.from_dict({"index": list(range(len(rows)))}).with_transform(read)

    def _grade(
        self, completions: list[list[dict[str, str]]], completion_ids: list[list[int]], answer: list[str], **_: Any
    ) -> list[float]:
        """TRL's reward function."""
        return self._grades([messages[0]["content"] for messages in completions], completion_ids, answer)

    def _grades(self, texts: list[str], ids: list[list[int]], answers: list[str]) -> list[float]:
        """1 if the whole turn is the right answer and the policy ended it itself."""
        return [
            float(tokens[-1] == self._end_of_turn and parse_answer(text) == answer)
            for text, tokens, answer in zip(texts, ids, answers, strict=True)
        ]


def grpo_arguments(run: PolicyConfig, output: str, suppressed: list[int]) -> GRPOConfig:
    """TRL's arguments for a run; see the module's docstring."""
    algorithm, rollout, learner = run.algorithm, run.rollout, run.learner
    rows = rollout.prompts_per_iteration * rollout.group_size
    if rows % algorithm.minibatches:
        raise UserInputError(
            f"TRL needs minibatches of equal size: {rows} rows do not divide by {algorithm.minibatches}."
        )
    if algorithm.kl_coef and algorithm.kl_estimator != "k3":
        raise UserInputError(f"TRL estimates the KL divergence by k3 only, not by {algorithm.kl_estimator}.")
    if algorithm.advantage_normalization == "std" and algorithm.advantage_scale != 1:
        raise UserInputError(
            "TRL cannot scale advantages that are divided by their deviation: set advantage_scale to 1."
        )
    schedule: dict[str, Any] = {"lr_scheduler_type": "constant"}
    if learner.lr_schedule == "linear" and learner.lr_final_fraction < 1:
        # "linear" would end at zero; a polynomial of power 1 ends where it is told to.
        end = learner.lr * learner.lr_final_fraction
        schedule = {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": end, "power": 1.0}}
    return GRPOConfig(
        output_dir=output,
        seed=run.seed,
        use_cpu=True,
        bf16=False,
        # Rollout.
        num_generations=rollout.group_size,
        per_device_train_batch_size=rows // algorithm.minibatches,
        steps_per_generation=algorithm.minibatches,
        gradient_accumulation_steps=1,
        num_iterations=algorithm.epochs,
        max_completion_length=rollout.max_new_tokens_per_turn,
        temperature=rollout.temperature,
        top_p=1.0,
        top_k=0,
        generation_kwargs={"suppress_tokens": suppressed},
        # Loss.
        loss_type={"sequence_mean": "grpo", "token_mean": "dapo", "constant": "dr_grpo"}[algorithm.aggregation],
        beta=algorithm.kl_coef,
        epsilon=algorithm.clip_low,
        epsilon_high=algorithm.clip_high,
        scale_rewards="group" if algorithm.advantage_normalization == "std" else "none",
        reward_weights=[algorithm.advantage_scale],
        # Optimiser.
        max_steps=algorithm.iterations * algorithm.minibatches * algorithm.epochs,
        learning_rate=learner.lr,
        adam_beta1=learner.betas[0],
        adam_beta2=learner.betas[1],
        weight_decay=learner.weight_decay,
        max_grad_norm=learner.max_grad_norm,
        gradient_checkpointing=False,
        # Nothing besides.
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        **schedule,
    )


class _Gate(TrainerCallback):
    """Holds the training thread before every rollout until it is let pass."""

    def __init__(self, optimizer_steps: int) -> None:
        self._optimizer_steps = optimizer_steps
        self._go, self._arrived = threading.Semaphore(0), threading.Semaphore(0)
        self.closed = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._go.acquire()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self._optimizer_steps == 0:
            self._arrived.release()
            self._go.acquire()

    def pass_one(self) -> None:
        """Let one rollout happen and wait until it has, or until training is over."""
        self._go.release()
        self._arrived.acquire()
        if self.closed:
            self._arrived.release()  # for whoever asks again

    def close(self) -> None:
        """Training is over: nobody waits any more."""
        self.closed = True
        self._arrived.release()


class _TimedTrainer(GRPOTrainer):
    """GRPOTrainer that adds up the seconds of generation and rewards; nothing else is changed."""

    sample_seconds = 0.0

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed(super()._generate, *args, **kwargs)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed(super()._calculate_rewards, *args, **kwargs)

    def _timed(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = function(*args, **kwargs)
        self.sample_seconds += time.perf_counter() - started
        return result


def _shapes(run: PolicyConfig) -> ShapesEnv:
    env = make(run.env.id, **run.env.make_kwargs())
    if not isinstance(env, ShapesEnv) or env.turns != 1 or env.tool:
        raise UserInputError("The TRL loop plays Shapes-v0 with one turn and no tool.")
    return env
