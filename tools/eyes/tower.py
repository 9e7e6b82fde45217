"""Teach the tower of a model of SmolVLM's form, such as smol-eyes, to say in the model's own words what it sees.

    python -m tools.eyes.tower MODEL FOLDER [--steps N] [--batch N]

Tower and connector learn alone, so that a step costs nothing in the language model. The feature of each cell of a
picture is to be the mean of the embeddings of its names (`cells.py`), which the language model reads as words. It goes
on from FOLDER/newest.pt, and FOLDER/model becomes MODEL with what was learned.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from tools.eyes.asking import LETTERS
from tools.eyes.brush import SHAPES
from tools.eyes.cells import GROUPS, SIDES, CellNames, Mosaics, mosaic, named
from tools.eyes.train import RATE, State, rate_at
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoProcessor

from rl_vlm.files import replace_folder
from rl_vlm.models.loading import load_model, resolve_model, save_model

RISE, FALL = 100, 0.3  # steps until the highest learning rate, and the share of steps in which it falls
READ = ("what", "colour")  # the groups whose words a feature is to be
LOG_EVERY = 50


class Cells(CellNames):
    """Of a model of SmolVLM's form. Its pictures are of one size, so each has `count` × `count` cells."""

    def __init__(self, model: Any, processor: Any) -> None:
        super().__init__(model, processor.tokenizer)
        self._processor, self.count = processor, round(processor.image_seq_len**0.5)
        table = model.get_input_embeddings().weight
        # Each dimension counts by its spread over all words: the language model fails at what differs from all of them.
        self._centre, self._spread = table.mean(0), table.std(0)

    def draw(self, rng: Random, pictures: int) -> Mosaics:
        drawn = [mosaic(rng, rng.choice(SIDES)) for _ in range(pictures)]
        images = [[np.array(picture.convert("RGB"))] for picture, _ in drawn]
        cells = [names for _, seen in drawn for names in named(seen, self.count)]
        targets = {
            group: torch.tensor([names.index(cell[group]) if group in cell else -1 for cell in cells])
            for group, names in GROUPS.items()
        }
        pixels = self._processor.image_processor(images, return_tensors="pt")["pixel_values"]
        return Mosaics(pixels, torch.empty(0), targets)

    def features(self, pixels: Tensor) -> Tensor:
        """[cells, width of the language model], as it sees them."""
        return self._model.get_image_features(pixels).pooler_output.flatten(0, 1)  # type: ignore[no-any-return]

    def losses(self, mosaics: Mosaics) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Of choosing the names in nats, the distance from their mean relative to a random one's, and the scores."""
        table, features = self._model.get_input_embeddings().weight, self.features(mosaics.pixels)
        whitened = (features - self._centre) / self._spread
        scores = {
            group: whitened @ ((table[ids] - self._centre) / self._spread).T / len(self._spread) ** 0.5
            for group, ids in self._ids.items()
        }
        chosen = [
            functional.cross_entropy(scores[group], target, ignore_index=-1)
            for group, target in mosaics.targets.items()
        ]
        shown = torch.stack([mosaics.targets[group] for group in READ])
        words = torch.stack([table[self._ids[group][mosaics.targets[group].clamp(min=0)]] for group in READ])
        weights = (shown >= 0).float() / (shown >= 0).sum(0)
        wanted = (weights[..., None] * words).sum(0)
        distance = ((features - wanted) / self._spread).square().mean()
        return torch.stack(chosen).mean(), distance, scores


@torch.no_grad()
def grade(cells: Cells, pictures: int = 256) -> dict[str, float]:
    """The share of cells of new pictures whose features are most like the right name."""
    found, rng = defaultdict[str, list[bool]](list), Random("held out cells")
    for _ in range(pictures // 32):
        mosaics = cells.draw(rng, 32)
        for group, scores in cells.losses(mosaics)[2].items():
            for guess, name in zip(scores.argmax(-1).tolist(), mosaics.targets[group].tolist(), strict=True):
                called = GROUPS[group][name]
                if name >= 0:
                    kind = "shape" if called in SHAPES else "letter" if called in LETTERS else "other things"
                    found[kind if group == "what" else group].append(guess == name)
    return {kind: sum(hits) / len(hits) for kind, hits in found.items()}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument("--batch", type=int, default=32, help="pictures per step")
    parser.add_argument("--save-every", type=float, default=300, help="seconds")
    args = parser.parse_args(words)
    args.folder.mkdir(parents=True, exist_ok=True)
    source = resolve_model(args.model)
    processor, model = AutoProcessor.from_pretrained(source), load_model(source)
    inner: Any = model.model
    learned = nn.ModuleDict({"tower": inner.vision_model, "connector": inner.connector}).requires_grad_(True)
    state = State(args.folder, learned, RATE)  # the language model is not kept: it stays as it is
    cells, rng = Cells(model, processor), Random(f"tower {state.step}")
    first, printed, sums = state.step, state.step, [0.0, 0.0]
    started = saved_at = time.monotonic()
    with ThreadPoolExecutor(1) as pool:  # a batch is drawn while the model computes the one before
        upcoming = pool.submit(cells.draw, rng, args.batch)
        while state.step < args.steps:
            mosaics, upcoming = upcoming.result(), pool.submit(cells.draw, rng, args.batch)
            chosen, distance, _ = cells.losses(mosaics)
            (chosen + distance).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(learned.parameters(), 1.0)
            state.optimizer.step(rate_at(state.step, args.steps, RISE, FALL))
            state.step += 1
            sums = [total + float(part.detach()) for total, part in zip(sums, (chosen, distance), strict=True)]
            now = time.monotonic()
            if state.step % LOG_EVERY == 0:
                means = [total / (state.step - printed) for total in sums]
                seconds = (now - started) / (state.step - first)
                print(
                    f"step {state.step} names {means[0]:.3f} distance {means[1]:.3f} {seconds:.2f} s/step", flush=True
                )
                printed, sums = state.step, [0.0, 0.0]
            if now - saved_at > args.save_every:
                state.save()
                saved_at = now
    state.save()
    print("right cells:", ", ".join(f"{kind} {share:.2f}" for kind, share in grade(cells).items()))
    with replace_folder(args.folder / "model") as draft:
        save_model(model.bfloat16(), draft)
        processor.save_pretrained(draft)


if __name__ == "__main__":
    main()
