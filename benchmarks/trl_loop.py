"""The peer: TRL's GRPOTrainer on the same model, items, reward, LoRA and schedule."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

# Before the libraries are imported: they read both once. TRL reports every trainer that is made to its makers.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from transformers import AutoProcessor, GenerationConfig, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from datasets import Dataset
from rl_vlm.config import RunConfig, load_config
from rl_vlm.envs.registry import make
from rl_vlm.envs.shapes import ShapesEnv, parse_answer, shapes_item
from rl_vlm.models.loading import load_model, load_text_side, quiet_libraries, resolve_model
from rl_vlm.models.lora import lora_config
from rl_vlm.types import Split, UserInputError

EVAL_ROWS = 128


class _Gate(TrainerCallback):
    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._go.acquire()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self._steps == 0:
            self._stopped.release()
            self._go.acquire()

    def one_rollout(self) -> None:
        self._go.release()
        self._stopped.acquire()

    def ended(self) -> None:
        self._stopped.release()


class _TimedTrainer(GRPOTrainer):
    sample_seconds = 0.0

    def _generate(self, prompts):
        started = time.perf_counter()
        result = super()._generate(prompts)
        self.sample_seconds += time.perf_counter() - started
        return result

    def _calculate_rewards(self, *args):
        started = time.perf_counter()
        result = super()._calculate_rewards(*args)
        self.sample_seconds += time.perf_counter() - started
        return result


VAR = {}


class TRLLoop:
    def __init__(self, folder: Path, run: RunConfig, num_threads: int = 1) -> None:
        quiet_libraries()
        torch.set_num_threads(num_threads)
        self.run = run
        env = make(run.env.id, **run.env.make_kwargs())
        self._env = env
        processor = AutoProcessor.from_pretrained(folder)
        self._processor = processor
        text = load_text_side(folder)
        self.suppressed = text.codec.suppressed_token_ids(text.vocab_size).tolist()
        self.end = text.codec.end_of_turn_id
        rows = [self._row("train", i) for i in range(env.num_items("train"))]
        if VAR.get("tensor_msg"):
            import numpy as np
            for r in rows: r["prompt"][0]["content"][0]["image"] = torch.from_numpy(np.array(r["prompt"][0]["content"][0]["image"])).permute(2, 0, 1).contiguous()
        if VAR.get("plain_dataset"):
            from datasets import Image
            ds = Dataset.from_dict({"prompt": [[{"role": "user", "content": r["prompt"][0]["content"][1]["text"]}] for r in rows], "image": [r["prompt"][0]["content"][0]["image"] for r in rows], "answer": [r["answer"] for r in rows]})
            ds = ds.cast_column("image", Image())
        elif VAR.get("image_column"):
            flat = [{"prompt": [{"role": "user", "content": r["prompt"][0]["content"][1]["text"]}], "image": r["prompt"][0]["content"][0]["image"], "answer": r["answer"]} for r in rows]
            if VAR.get("tensor"):
                import numpy as np
                for r in flat: r["image"] = torch.from_numpy(np.array(r["image"])).permute(2, 0, 1).contiguous()
            ds = Dataset.from_dict({"index": list(range(len(rows)))}).with_transform(
                lambda b: {k: [flat[i][k] for i in b["index"]] for k in ("prompt", "image", "answer")}
            )
        else:
            ds = Dataset.from_dict({"index": list(range(len(rows)))}).with_transform(
                lambda b: {"prompt": [rows[i]["prompt"] for i in b["index"]], "answer": [rows[i]["answer"] for i in b["index"]]}
            )
        self._tmp = tempfile.TemporaryDirectory()
        alg = run.algorithm
        per = run.rollout.prompts_per_iteration * run.rollout.group_size // alg.minibatches
        args = dict(
            output_dir=self._tmp.name, use_cpu=True, bf16=False, seed=run.seed,
            per_device_train_batch_size=per, steps_per_generation=alg.minibatches, gradient_accumulation_steps=1,
            num_generations=run.rollout.group_size, max_completion_length=run.rollout.max_new_tokens_per_turn,
            temperature=1.0, top_p=1.0, top_k=0,
            max_steps=alg.iterations * alg.minibatches,
            learning_rate=run.learner.lr, lr_scheduler_type="polynomial", lr_scheduler_kwargs={"lr_end": run.learner.lr * run.learner.lr_final_fraction, "power": 1.0},
            adam_beta1=run.learner.betas[0], adam_beta2=run.learner.betas[1], weight_decay=0.0, max_grad_norm=1.0,
            beta=0.0, epsilon=alg.clip_low, epsilon_high=alg.clip_high, loss_type=alg.loss, scale_rewards="none", reward_weights=[alg.advantage_scale],
            gradient_checkpointing=False, logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True,
            dataloader_pin_memory=False,
            generation_kwargs={"suppress_tokens": self.suppressed},
        )
        args.update(VAR.get("args", {}))
        self.rewards = 0.0
        self.gate = _Gate(alg.minibatches)
        lora = lora_config(run.model.lora.rank, run.model.lora.alpha, run.model.lora.target_modules)
        model = load_model(folder)
        if VAR.get("attn"):
            model.set_attn_implementation(VAR["attn"])
        if VAR.get("inject"):
            model.add_adapter(lora); lora = None
        self.trainer = _TimedTrainer(model, self._reward, GRPOConfig(**args), ds, processing_class=processor, callbacks=[self.gate], peft_config=lora)
        self.thread = threading.Thread(target=self._train, daemon=True)
        self.error = None
        self.threads = num_threads
        self.thread.start()

    def _train(self):
        torch.set_num_threads(self.threads)
        try:
            self.trainer.train()
        finally:
            self.error = sys.exception()
            self.gate.ended()

    def _row(self, split, i):
        item = shapes_item(self._env.task, split, i, self._env.seed, self._env.image_size)
        return {"prompt": [{"role": "user", "content": [{"type": "image", "image": item.image.to_pil()}, {"type": "text", "text": item.question}]}], "answer": item.answer}

    def _reward(self, completions, completion_ids, answer, **_):
        r = [float(ids[-1] == self.end and parse_answer(c[0]["content"]) == a) for c, ids, a in zip(completions, completion_ids, answer)]
        self.rewards = sum(r) / len(r)
        return r

    def step(self):
        self.trainer.sample_seconds = 0.0
        c0 = time.process_time()
        t = time.perf_counter()
        self.gate.one_rollout()
        total = time.perf_counter() - t
        cpu = time.process_time() - c0
        if self.error: raise RuntimeError from self.error
        s = self.trainer.sample_seconds
        return {"total": total, "cpu": cpu, "sample": s, "learn": total - s, "reward": self.rewards}
