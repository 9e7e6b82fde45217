"""Conversations about scenes in plain English, for `rl-vlm sft` and QA-v0: python -m tools.eyes.captions FOLDER.

FOLDER/described has pictures with what they show. FOLDER/asked has questions, answered with what the picture shows as
the reason and then the answer in its tags: `rl-vlm train` reads the same files.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

from PIL import Image
from tools.eyes.scenes import Question, Thing, questions, scene

from rl_vlm.supervised.example import Conversation, write_conversations
from rl_vlm.types import Split

MOST = 4  # things in a picture: a reason that names them all stays short
ASKS = ("Describe the picture.", "What do you see?", "What is in the picture?", "Tell me what is where.")
FORM = "Say what you see, then the answer as <answer>...</answer>."


def shown(things: Sequence[Thing]) -> str:
    """A sentence that names all things from the top left to the bottom right, with their places."""
    ordered = sorted(things, key=lambda thing: (int(thing.y * 3), thing.x))
    named = [f"{'an' if thing.name[0] in 'aeiou' else 'a'} {thing.name} {_where(thing)}" for thing in ordered]
    listed = " and ".join([", ".join(named[:-1]), named[-1]] if len(named) > 1 else named)
    return f"There is {listed}."


def _where(thing: Thing) -> str:
    return f"{'in' if thing.place == 'middle' else 'at'} the {thing.place}"


def described(rng: Random, things: list[Thing]) -> Question:
    return rng.choice(ASKS), shown(things)


def asked(rng: Random, things: list[Thing]) -> Question:
    question, answer = next(pair for pair in questions(rng, things) if "," not in pair[1])  # no coordinates
    return f"{question} {FORM}", f"{shown(things)} <answer>{answer}</answer>"


def conversation(rng: Random, ask: Callable[[Random, list[Thing]], Question]) -> Conversation:
    picture, things = scene(rng)
    while len(things) > MOST:
        picture, things = scene(rng)
    question, answer = ask(rng, things)
    user = [{"type": "image"}, {"type": "text", "text": question}]
    return [{"role": "user", "content": user}, {"role": "assistant", "content": answer}], [png(picture)]


def png(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=4000, help="conversations to learn; a tenth as many to test")
    args = parser.parse_args(words)
    for ask in (described, asked):

        def read(split: Split, ask: Callable[[Random, list[Thing]], Question] = ask) -> Iterator[Conversation]:
            rng = Random(f"{ask.__name__} {split}")
            return (conversation(rng, ask) for _ in range(args.count if split == "train" else args.count // 10))

        write_conversations(args.folder / ask.__name__, read)


if __name__ == "__main__":
    main()
