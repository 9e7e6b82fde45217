"""One contender of `learner.py` in a process of its own: it makes a step for each line.

All contenders have the same model, LoRA weights and batch: rows of 16 prompt tokens and a completion of their own.
"""

from __future__ import annotations

import argparse
import gc
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from turns import serve

from rl_vlm.config import PolicyConfig, parse_config

PROMPT = 16
_FIRST_ID = 1000  # below are the tokens that stand for images


def run_config(folder: Path, rows: int, length: int, threads: int, **learner: Any) -> PolicyConfig:
    """GRPO's loss without corrections, averaged over the tokens of a row and then over rows."""
    return parse_config(
        {
            "model": {"path": str(folder)},
            "rollout": {
                "temperature": 1.0, "prompts_per_iteration": 1, "group_size": rows, "max_new_tokens_per_turn": length
            },
            "algorithm": {
                "tis_cap": None, "aggregation": "sequence_mean", "minibatches": 1, "advantage_normalization": "none"
            },
            "learner": {"micro_batch_tokens": rows * length, "num_threads": threads, **learner},
        }
    )  # fmt: skip


def batch(rows: int, length: int, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids [rows, length] and advantages float32 [rows]."""
    rng = np.random.default_rng(0)
    return rng.integers(_FIRST_ID, vocabulary, (rows, length)), rng.normal(size=rows).astype(np.float32)


@torch.no_grad()
def randomize(parameters: Mapping[str, Tensor]) -> list[Tensor]:
    """Draw LoRA weights by their names, so that every contender has the same; returned in the order of names."""
    named = {name[name.index("language_model") :]: tensor for name, tensor in parameters.items()}
    for name, tensor in named.items():
        tensor.normal_(0.0, 0.02, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    return [named[name] for name in sorted(named)]


def ours(
    folder: Path, rows: int, length: int, threads: int, **learner: Any
) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """The loss of the system's policy update, and the LoRA weights."""
    from rl_vlm.learning.batching import Minibatch
    from rl_vlm.learning.plan import UpdateBatch, UpdateStats
    from rl_vlm.learning.policy_model import PolicyModel
    from rl_vlm.learning.update import PolicyUpdater
    from rl_vlm.types import StopReason, Trajectory, TrajectoryStatus, Turn

    run = run_config(folder, rows, length, threads, **learner)
    policy = PolicyModel(folder, run)
    policy.backbone.token_bias.zero_()  # TRL knows no suppressed tokens
    ids, advantages = batch(rows, length, len(policy.backbone.token_bias))
    mask = np.arange(length) >= PROMPT
    turns = (Turn(PROMPT, length, 0, StopReason.LENGTH, 0.0),)
    sampled = length - PROMPT
    groups = [
        [
            Trajectory(
                str(row), ids[row].astype(np.int32), mask, np.zeros(length, np.float32), turns,
                TrajectoryStatus.COMPLETED, (),
            )
        ]
        for row in range(rows)
    ]  # fmt: skip
    updater = PolicyUpdater(policy, run)
    named = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
    parameters = randomize(named)
    weights = {str(row): 1 / (rows * sampled) for row in range(rows)}
    per_token = {str(row): np.full(sampled, advantages[row]) for row in range(rows)}
    ((micro,),) = updater.pack(UpdateBatch([Minibatch(groups, weights)], [True], per_token, {}, [0.0]))
    return lambda: updater.loss(micro, UpdateStats()), parameters


def trl(folder: Path, rows: int, length: int, threads: int) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """The loss of TRL's GRPOTrainer and the LoRA weights."""
    import tempfile

    from datasets import Dataset
    from transformers import AutoProcessor
    from trl_loop import GRPOTrainer, grpo_arguments

    from rl_vlm.models.loading import load_model, quiet_libraries
    from rl_vlm.models.lora import lora_config

    quiet_libraries()
    run = run_config(folder, rows, length, threads)
    lora = run.model.lora
    trainer = GRPOTrainer(
        load_model(folder), lambda completions, **_: [0.0] * len(completions),
        grpo_arguments(run, tempfile.mkdtemp(prefix="rl-vlm-trl-"), []), Dataset.from_dict({"prompt": ["text"] * rows}),
        processing_class=AutoProcessor.from_pretrained(folder, padding_side="left"),
        peft_config=lora_config(lora.rank, lora.alpha, lora.target_modules),
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1  # as `train` sets it
    model = trainer.model.train()
    vocabulary = model.config.get_text_config().vocab_size
    ids, advantages = batch(rows, length, vocabulary)
    tokens = torch.from_numpy(ids)
    ones = torch.ones_like(tokens)
    inputs = {
        "prompt_ids": tokens[:, :PROMPT], "prompt_mask": ones[:, :PROMPT],
        "completion_ids": tokens[:, PROMPT:], "completion_mask": ones[:, PROMPT:],
        "advantages": torch.from_numpy(advantages),
        "num_items_in_batch": torch.tensor(tokens[:, PROMPT:].numel()),
    }  # fmt: skip
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return lambda: trainer.compute_loss(model, dict(inputs)), randomize(named)


def _memory_mib(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}.")


def step(loss: Callable[[], Tensor], parameters: list[Tensor], gradients: Path | None) -> dict[str, Any]:
    """Forward and backward: seconds, CPU seconds, MiB of the process before and at its peak, and the loss."""
    for parameter in parameters:
        parameter.grad = None
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    base = _memory_mib("VmRSS")
    started, cpu = time.perf_counter(), time.process_time()
    value = loss()
    value.backward()  # type: ignore[no-untyped-call]
    figures = {"seconds": time.perf_counter() - started, "cpu": time.process_time() - cpu}
    if gradients is not None:
        np.save(gradients, torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).numpy())
    return {**figures, "base": base, "peak": _memory_mib("VmHWM"), "loss": float(value.detach())}


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("ours", "lean", "trl"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("rows", type=int)
    parser.add_argument("length", type=int)
    parser.add_argument("threads", type=int)
    parser.add_argument("--gradients", type=Path)
    args = parser.parse_args()

    def prepare() -> Callable[[str], dict[str, Any]]:
        torch.set_num_threads(args.threads)
        size = (args.folder, args.rows, args.length, args.threads)
        loss, parameters = trl(*size) if args.kind == "trl" else ours(*size, log_entropy=args.kind != "lean")
        return lambda _: step(loss, parameters, args.gradients)

    serve(prepare)


if __name__ == "__main__":
    main()
