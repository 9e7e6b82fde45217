"""`rl-vlm sft`: supervised fine-tuning of one model in this process, without Ray."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rl_vlm.algorithms.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from rl_vlm.config import SFTConfig
from rl_vlm.imports import import_meanwhile, imports_done
from rl_vlm.models.loading import check_weights, load_text_side, quiet_libraries, resolve_model
from rl_vlm.models.memory.reading import read_shape
from rl_vlm.models.trained import check_initial_adapter
from rl_vlm.monitoring.display import SFT_ROWS
from rl_vlm.runs.lifecycle import BaseRun
from rl_vlm.runs.memory import weights_size
from rl_vlm.runs.remote_folder import RunDir
from rl_vlm.runs.run_folder import check_run_dir, opened_run_folder
from rl_vlm.runs.surroundings import check_gpus, found_obstacles, gpu_sizes
from rl_vlm.statistics import wilson_interval
from rl_vlm.supervised.dataset import JobData, Measured, open_job_data
from rl_vlm.types import Trajectory, UserInputError


def inspect_sft(job: SFTConfig, progress: Callable[[str], None] = lambda _: None) -> tuple[dict[str, Any], JobData]:
    """Check model, adapter and every conversation; return what was found, and the data. Raises UserInputError."""
    quiet_libraries()
    folder = resolve_model(job.model.path)
    summary: dict[str, Any] = {"model": str(folder)} | check_initial_adapter(job.model)
    if job.model.gpu_memory_gib:
        summary["gpu_memory_gib"] = f"{job.model.gpu_memory_gib:g} needed"
    data = open_job_data(job, load_text_side(folder, job.model.pixels), progress)
    for name, measured in {"train": data.train, "held_out": data.held_out}.items():
        if measured is not None:
            summary |= {f"{name}_conversations": len(measured), f"{name}_too_long": measured.left_out}
        if measured:
            summary |= {f"{name}_tokens": int(measured.tokens.sum()), f"{name}_longest": int(measured.tokens.max())}
    summary["steps"] = total_steps(job, data)
    return summary | weights_size(read_shape(folder).parameters, job.model.dtype), data


def sft_obstacles(job: SFTConfig, run_dir: RunDir, *, resume: bool, overwrite: bool) -> list[str]:
    """As `obstacles` of `rl-vlm train`."""
    needs_gpu = job.sft.device == "cuda"
    return found_obstacles(
        lambda: check_gpus(float(needs_gpu), len(gpu_sizes()) if needs_gpu else 0, job.model.gpu_memory_gib),
        lambda: check_weights(job.model.path),
        lambda: check_run_dir(run_dir, resume, overwrite),
    )


def total_steps(job: SFTConfig, data: JobData) -> int:
    return job.sft.steps or max(1, round(job.sft.epochs * data.steps_per_epoch))


def sft(
    job: SFTConfig, run_dir: RunDir | None = None, *, resume: bool = False, overwrite: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """Run to the end; returns `result.json`. Raises UserInputError first, later InterruptedRun and RLVLMError."""
    import_meanwhile("torch")
    _, data = inspect_sft(job, progress)
    import_meanwhile("transformers.modeling_utils", "peft")  # not earlier: the tokenizer imports parts of transformers
    with opened_run_folder(run_dir or Path("runs") / job.name, resume=resume, overwrite=overwrite) as folder:
        return SFTRun(job, data, folder, resume).execute()


class SFTRun(BaseRun):
    _unit, _length, _rows = "step", "sft.steps", SFT_ROWS

    def __init__(self, job: SFTConfig, data: JobData, folder: Path, resume: bool) -> None:
        self.job, self.data = job, data
        self.saved: Checkpoint | None = None
        self.skipped = self.done = 0
        super().__init__(job, folder, resume, total_steps(job, data))
        self.done = self.start

    def _changes(self) -> str:
        assert self.start_from is not None
        self.saved = read_checkpoint(self.start_from)
        state, now = self.saved.state, self._data_state()
        if changes := [f"{key} {state[key]} → {value}" for key, value in now.items() if state[key] != value]:
            raise UserInputError(
                f"The run in {self.folder} drew its batches with other settings ({', '.join(changes)}), so that rows "
                "would be left out: restore them, or start anew in another --run-dir."
            )
        self.skipped = int(state["skipped"])
        return super()._changes()

    def _data_state(self) -> dict[str, int]:
        """What decides which conversations are in which batch."""
        sizes = {"conversations": len(self.data.train), "batch_size": self.job.sft.batch_size}
        return sizes | {"seed": self.job.seed}

    def _train(self) -> None:
        imports_done()
        import torch

        from rl_vlm.learning.policy_model import PolicyModel
        from rl_vlm.supervised.trainer import SFTTrainer

        job = self.job
        torch.set_num_threads(job.learner.num_threads)
        present = "cuda" if torch.cuda.is_available() else "cpu"
        device = present if job.sft.device == "auto" else job.sft.device
        self.display.message(f"Loading {job.model.path} on {device} ...")
        policy = PolicyModel(resolve_model(job.model.path), job, device)
        self.trainer = SFTTrainer(policy, job)
        if self.saved is not None:
            self.trainer.restore(self.saved.adapter, self.saved.moments)
            self.display.message(f"Resumed from step {self.done}.")
        self._started()
        if not self.recorder.has_evaluation(self.done):
            self._evaluate()
        with self._timed(), ThreadPoolExecutor(1) as pool:
            try:
                self._take_steps(pool)
            except UserInputError:  # a row that reads well and cannot be decoded: mend it, and --resume
                self.checkpoint()
                raise
        self.checkpoint()
        self._save_trained(self.trainer.adapter(self.done))

    def _take_steps(self, pool: ThreadPoolExecutor) -> None:
        sft, logging = self.job.sft, self.job.logging
        upcoming = pool.submit(self.data.batch, self.done)
        while self.done < self.total and self.goes_on:
            batch = upcoming.result()
            if self.done + 1 < self.total:
                upcoming = pool.submit(self.data.batch, self.done + 1)  # decoded while the model computes
            self._step(batch)
            if self.done % logging.checkpoint_every == 0:
                self.checkpoint()
            if self.done == self.total or (sft.eval_every and self.done % sft.eval_every == 0):
                self._evaluate()

    def _step(self, batch: list[Trajectory]) -> None:
        from rl_vlm.supervised.trainer import learning_rate

        begun = time.perf_counter()
        lr = learning_rate(self.job, self.done, self.total)
        loss, targets, grad_norm = self.trainer.step(batch, lr)
        seconds = time.perf_counter() - begun
        self.done += 1
        self.skipped += grad_norm is None
        metrics = {
            "sft/loss": loss,
            "sft/lr": lr,
            "sft/epoch": self.done / self.data.steps_per_epoch,
            "sft/targets": float(targets),
            "sft/tokens_per_s": sum(map(len, batch)) / seconds,
            "sft/skipped_steps": float(self.skipped),
            "time/step": seconds,
        }
        if grad_norm is not None:
            metrics["sft/grad_norm"] = grad_norm
        self.recorder.log_iteration(self.done, metrics)
        self.display.update(self.done, metrics)
        self._notify_callbacks("on_iteration", self.done, metrics)

    def _evaluate(self) -> None:
        held_out = self.data.held_out
        if held_out is None or not len(held_out):
            return
        begun = time.perf_counter()
        encode, size = self.data.encoder.encode, self.job.sft.batch_size
        batches = (
            [encode(one) for one in held_out.conversations(range(start, min(start + size, len(held_out))))]
            for start in range(0, len(held_out), size)
        )
        loss, targets = self.trainer.evaluate(batches)
        results: dict[str, Any] = {"eval/loss": loss, "eval/targets": targets, "eval/conversations": len(held_out)}
        results |= self._answers(held_out)
        results["seconds"] = time.perf_counter() - begun
        self.recorder.log_evaluation(self.done, results)
        self.display.evaluation(self.done, results)
        self._notify_callbacks("on_evaluation", self.done, results)

    def _answers(self, held_out: Measured) -> dict[str, float]:
        """How many last turns are written greedily word for word."""
        count = min(self.job.sft.eval_answers, len(held_out))
        if not count:
            return {}
        asked = [self.data.encoder.encode(one) for one in held_out.conversations(range(count))]
        right = sum(self.trainer.writes(asked))
        low, high = wilson_interval(right, count)
        bounds = {"accuracy_low/default": low, "accuracy_high/default": high}
        return {"accuracy/default": right / count, **bounds, "items/default": count}

    def _write_checkpoint(self, folder: Path) -> None:
        state = {"updates": self.done, "skipped": self.skipped, **self._data_state()}
        write_checkpoint(folder, Checkpoint(self.trainer.adapter(self.done), self.trainer.moments(), state))

    def _position(self) -> int:
        return self.done

    def _outcome(self) -> dict[str, Any]:
        return {
            "unit": "steps",
            **self._before_and_after("eval_loss", "eval/loss"),
            **self._before_and_after("accuracy", "accuracy/default"),
            "conversations": len(self.data.train),
            "too_long": self.data.train.left_out,
            "skipped_steps": self.skipped,
        }
