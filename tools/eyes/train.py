"""Train the model `eyes`: resumable, one process for each core.

    python -m tools.eyes.train FOLDER [--steps N] [--batch N] [--workers N] [--start MODEL]

At first the tower learns alone what it sees (`cells.py`). It goes on from FOLDER/newest.pt. The learning rate stays where it is until the last fifth of `--steps`, so a longer
training can start from any checkpoint before that. `grade.py` measures a checkpoint and `ship.py` makes a model of it.
"""

from __future__ import annotations

import argparse
import bisect
import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors import safe_open
from tools.eyes.cells import CellNames, Mosaics, draw_mosaics
from tools.eyes.lessons import Lessons
from tools.eyes.model import build_model, build_processor
from tools.eyes.muon import Optimizer
from tools.eyes.product import multiply_in_bfloat16
from torch import Tensor

from rl_vlm.files import replace_folder
from rl_vlm.models.families.qwen_fast import fast_vision
from rl_vlm.models.supervised import DialogueEncoder, Example, collate, token_logprobs

RATE, RISE, FALL = 2e-3, 300, 0.2  # the highest learning rate, steps until it, and the share of steps in which it falls
SEEING = 0.3  # of the steps are for the tower alone
EARLY = 0.4  # until this share of the steps come early lessons
MOSAICS = 0.3  # of the pictures later on, so that the tower keeps what it sees; with 0.125 it forgot letters
LENGTHS = (40, 64, 96, 144, 220)  # tokens: rows of similar length share a forward pass, so that little is padding
LOG_EVERY = 50


def rate_at(step: int, total: int, rise: int = RISE, fall: float = FALL) -> float:
    return RATE * min(1.0, (step + 1) / rise) * min(1.0, (total - step) / (fall * total))


def add_gradients(model: Any, examples: list[Example], pad: int, total: Tensor) -> float:
    """Add the gradient of the mean loss of all workers' `total` target tokens; returns this worker's part in nats."""
    rows: dict[int, list[Example]] = {}
    for example in examples:
        rows.setdefault(bisect.bisect_left(LENGTHS, len(example.token_ids)), []).append(example)
    loss = 0.0
    for part in rows.values():
        value = -token_logprobs(model, *collate(part, pad)).sum() / total
        value.backward()
        loss += float(value.detach())
    return loss


def add_cell_gradients(names: CellNames, mosaics: Mosaics, share: float) -> float:
    """Add that of `share` of the loss of what the cells of pictures are named; returns that share in nats."""
    loss = share * names.loss(mosaics)
    loss.backward()
    return float(loss.detach())


def sum_over_workers(model: Any, loss: float) -> float:
    """All workers' gradients and losses become their sums. Weights that no loss depends on have no gradient."""
    weights = [weight for weight in model.parameters() if weight.grad is not None]
    flat = torch.cat([*(weight.grad.flatten() for weight in weights), torch.tensor([loss])])
    dist.all_reduce(flat)
    for weight, part in zip(weights, flat[:-1].split([weight.numel() for weight in weights]), strict=True):
        weight.grad = part.view_as(weight).clone()
    return float(flat[-1])


def processor_of(folder: Path) -> Any:
    """That of the training so far: its words are those of the checkpoint."""
    from transformers import AutoProcessor

    if not (folder / "processor").exists():
        with replace_folder(folder / "processor") as draft:
            build_processor().save_pretrained(draft)
    return AutoProcessor.from_pretrained(folder / "processor")


class State:
    """What is trained, its optimizer and the step, kept in FOLDER/newest.pt."""

    def __init__(self, folder: Path, model: Any, rate: float) -> None:
        self.model, self.optimizer, self.step = model, Optimizer(model, rate), 0
        self._newest = folder / "newest.pt"
        if self._newest.exists():
            saved = torch.load(self._newest, weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.step = saved["step"]

    def save(self) -> None:
        parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}
        torch.save(parts, self._newest.with_suffix(".new"))
        os.replace(self._newest.with_suffix(".new"), self._newest)


def begin(start: Path, folder: Path) -> None:
    """Begin a training with the words, the weights and the step of a model of `ship.py`; the optimizer begins anew."""
    shutil.copytree(start, folder / "processor", ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    state = State(folder, build_model(processor_of(folder).tokenizer), RATE)
    with safe_open(start / "model.safetensors", "pt") as file:
        weights = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
        state.step = int(file.metadata()["step"])
    missing, unknown = state.model.load_state_dict(weights, strict=False)
    assert not unknown and set(missing) <= {"lm_head.weight"}  # which is tied
    state.save()


def work(rank: int, folder: Path, args: argparse.Namespace) -> None:
    """One worker's part: it draws and computes its share of each batch."""
    torch.set_num_threads(1)
    os.nice(args.nice)
    meeting = f"file://{folder.resolve()}/{args.meeting}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=args.workers)
    processor = processor_of(folder)
    state = State(folder, build_model(processor.tokenizer), RATE)
    model, encoder = state.model.train(), DialogueEncoder(processor)
    multiply_in_bfloat16(model)
    names = CellNames(model, processor.tokenizer)
    number, count = state.step * args.workers + rank, args.batch // args.workers  # others after each interruption
    lessons, rng = Lessons(number), Random(f"mosaics {number}")

    def draw(step: int) -> tuple[list[Example], Mosaics]:
        done = step / args.steps  # the same for all workers: weights that have gradients depend on it
        if done < SEEING:
            return [], draw_mosaics(rng, processor, count)
        examples = [encoder.encode_chat(lessons.draw(done < EARLY)) for _ in range(count)]
        return examples, draw_mosaics(rng, processor, int(MOSAICS * count))

    first, mean, of = state.step, 0.0, ""
    started = saved_at = time.monotonic()
    with fast_vision(model), ThreadPoolExecutor(1) as pool:  # a batch is drawn while the model computes the one before
        upcoming = pool.submit(draw, state.step)
        while state.step < args.steps:
            (examples, mosaics), upcoming = upcoming.result(), pool.submit(draw, state.step + 1)
            total = torch.tensor(float(sum(int(example.targets.sum()) for example in examples)))
            dist.all_reduce(total)
            loss = add_cell_gradients(names, mosaics, (MOSAICS if examples else 1.0) / args.workers)
            loss += add_gradients(model, examples, encoder.pad_token_id, total)
            loss = sum_over_workers(model, loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            state.optimizer.step(rate_at(state.step, args.steps))
            state.step += 1
            before, of = of, "loss" if examples else "loss of cells"
            mean = 0.98 * mean + 0.02 * loss if of == before else loss
            is_last, now = state.step == args.steps, time.monotonic()
            if rank == 0 and (is_last or state.step % LOG_EVERY == 0):
                seconds = (now - started) / (state.step - first)
                print(f"step {state.step} {of} {mean:.4f} {seconds:.2f} s/step", flush=True)
            if rank == 0 and (is_last or now - saved_at > args.save_every):
                state.save()
                saved_at = now
    dist.destroy_process_group()


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=60000)
    parser.add_argument("--batch", type=int, default=64, help="conversations per step, of all workers")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--save-every", type=float, default=300, help="seconds")
    parser.add_argument("--start", type=Path, help="where FOLDER is new: a model of ship.py to go on from")
    parser.add_argument("--nice", type=int, default=10)
    args = parser.parse_args(words)
    args.meeting = f"meeting-{time.time_ns()}"
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.start and not (args.folder / "newest.pt").exists():
        begin(args.start, args.folder)
    processor_of(args.folder)  # before the workers meet
    if args.workers == 1:
        work(0, args.folder, args)
    else:
        mp.spawn(work, (args.folder, args), args.workers)


if __name__ == "__main__":
    main()
