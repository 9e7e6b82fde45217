"""Greedy accuracy of a checkpoint on new pictures, by kind: python -m tools.eyes.grade FOLDER [--of N]."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from tools.eyes.brush import SHAPES
from tools.eyes.cells import GLYPHS, GROUPS, CellNames, draw_mosaics
from tools.eyes.kinds import KINDS
from tools.eyes.lessons import OWN, Lessons, look_dialogue, pixels_of, scene_dialogue
from tools.eyes.model import build_model
from tools.eyes.train import processor_of

from rl_vlm.models.families.qwen_fast import fast_vision
from rl_vlm.models.supervised import DialogueEncoder, collate
from rl_vlm.zoo.tiny.teach import Exchange


def right(model: Any, encoder: DialogueEncoder, chats: Sequence[Sequence[Exchange]]) -> list[list[bool]]:
    """For each reply of each chat whether it is what greedy sampling writes, given the right replies before it."""
    found = []
    for start in range(0, len(chats), 32):
        arguments, targets = collate(
            [encoder.encode_chat(chat) for chat in chats[start : start + 32]], encoder.pad_token_id
        )
        with torch.no_grad(), fast_vision(model):
            hidden = model.model(**arguments, use_cache=False).last_hidden_state[:, :-1]
            hits = model.lm_head(hidden).argmax(-1) == arguments["input_ids"][:, 1:]
        for row, wanted in zip(hits.tolist(), targets[:, 1:].tolist(), strict=True):
            replies: list[bool] = []
            for hit, is_reply, before in zip(row, wanted, [False, *wanted], strict=False):
                if is_reply:
                    replies = [*replies, hit] if not before else [*replies[:-1], replies[-1] and hit]
            found.append(replies)
    return found


def print_cells(model: Any, processor: Any, count: int) -> None:
    """How many cells of new pictures have the name that their features are most like, of shapes, of letters and so on."""
    names, rng, found = (
        CellNames(model, processor.tokenizer),
        Random("held out cells"),
        defaultdict[str, list[bool]](list),
    )
    for _ in range(count):
        mosaics = draw_mosaics(rng, processor, 16)
        with torch.no_grad(), fast_vision(model):
            scores = names.scores(mosaics)
        for group, wanted in mosaics.targets.items():
            for name, guess in zip(wanted.tolist(), scores[group].argmax(-1).tolist(), strict=True):
                if name >= 0:
                    found[group].append(guess == name)
                if name >= 0 and group == "what":
                    called = GROUPS[group][name]
                    found["shape" if called in SHAPES else "letter" if called in GLYPHS else "other"].append(
                        guess == name
                    )
    for group, hits in found.items():
        print(f"cells: {group:8} {sum(hits) / len(hits):.2f} of {len(hits)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--of", type=int, default=40, help="new pictures of each kind")
    args = parser.parse_args()
    torch.set_num_threads(1)
    processor = processor_of(args.folder)
    model, encoder = build_model(processor.tokenizer), DialogueEncoder(processor)
    saved = torch.load(args.folder / "newest.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    model.eval()
    print_cells(model, processor, args.of)
    total = []
    for name, draw in KINDS.items():
        rng = Random(f"held out {name}")
        asked = [draw(rng) for _ in range(args.of)]
        chats = [[Exchange("user", (*map(pixels_of, one.pictures), one.question), one.answer)] for one in asked]
        total.append(sum(replies[-1] for replies in right(model, encoder, chats)) / args.of)
        chance = sum(1 / (1 + len(one.others)) for one in asked) / args.of
        print(f"{name:14} {total[-1]:.2f}  (chance {chance:.2f})")
    print(f"step {saved['step']}: mean {sum(total) / len(total):.3f}")
    rng, drawn = Random("held out"), defaultdict(list)
    for name, draw_chat in (("questions", scene_dialogue), ("looking", look_dialogue)):
        drawn[name] = [draw_chat(rng) for _ in range(3 * args.of)]
    lessons = Lessons(123456789)
    for module, own in zip(OWN, lessons.own, strict=True):
        drawn[module.__name__.split(".")[-2]] = [list(own()) for _ in range(3 * args.of)]
    for name, chats in drawn.items():
        replies = [one for chat in right(model, encoder, chats) for one in chat]
        print(f"{name:14} {sum(replies) / len(replies):.2f}  of {len(replies)} replies")


if __name__ == "__main__":
    main()
