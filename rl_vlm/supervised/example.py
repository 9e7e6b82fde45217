"""Conversations as files: the built-in ones as an example of the form, or right answers to an environment's items."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_vlm.envs.base import VisionEnv
from rl_vlm.files import write_atomic
from rl_vlm.supervised.sources import builtin_rows
from rl_vlm.types import Message, Split, Trajectory, UserInputError, images_of

EXAMPLE = "shapes"
SPLITS: tuple[Split, ...] = ("train", "test")

# A conversation's messages, and the PNG files of its images in order.
Conversation = tuple[list[dict[str, Any]], list[bytes]]


def write_example(folder: Path) -> dict[str, int]:
    """Write the built-in conversations as `write_conversations` does."""

    def built_in(split: Split) -> Iterator[Conversation]:
        rows = builtin_rows(EXAMPLE, split)
        return ((row["messages"], row["images"]) for row in map(rows.row, range(len(rows))))

    return write_conversations(folder, built_in)


def write_answers(folder: Path, env: VisionEnv, form: str, most: int, max_turns: int) -> dict[str, int]:
    """Write right answers to the environment's first items, `most` of them to learn and a fifth as many to test.

    An answer is what `env.example()` says, or `info["reference"]` in the `form`, whose {} it replaces. Returns and
    raises as `write_conversations` does, and UserInputError for an environment that states neither.
    """
    if form.count("{}") != 1:
        raise UserInputError(f"The form {form!r} must hold {{}} once, where the right answer stands.")

    def answered(split: Split) -> Iterator[Conversation]:
        size, wanted = env.num_items(split), most if split == "train" else max(most // 5, 1)
        count = wanted if size is None else min(size, wanted)
        return (_episode(env, split, index, form, max_turns) for index in range(count))

    return write_conversations(folder, answered)


def write_kept(folder: Path, episodes: Sequence[Trajectory], least: float) -> dict[str, int]:
    """Write the recorded episodes whose reward is at least that, every sixth of them to test (rejection sampling, as
    RAFT, arXiv 2304.06767). Returns and raises as `write_conversations` does, and UserInputError where there are not
    two."""
    kept = [one for one in episodes if one.reward >= least]
    if len(kept) < 2:
        raise UserInputError(f"{len(kept)} of {len(episodes)} episodes have a reward of {least:g} or more: play more.")

    def read(split: Split) -> Iterator[Conversation]:
        for number, one in enumerate(kept):
            if (number % 6 == 1) == (split == "test"):
                yield _conversation(one.messages)

    return write_conversations(folder, read)


def write_conversations(folder: Path, read: Callable[[Split], Iterator[Conversation]]) -> dict[str, int]:
    """Write train.jsonl, test.jsonl and images/. Returns conversations per split. Raises UserInputError."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserInputError(f"{folder} exists and is not an empty folder: choose another.")
    found = {split: [*read(split)] for split in SPLITS}  # what cannot be read leaves no folder behind
    counts: dict[str, int] = {}
    try:
        (folder / "images").mkdir(parents=True, exist_ok=True)
        for split, conversations in found.items():
            lines = []
            for index, (messages, images) in enumerate(conversations):
                names = [f"images/{split}-{index:03d}-{k}.png" for k in range(len(images))]
                for name, content in zip(names, images, strict=True):
                    (folder / name).write_bytes(content)
                lines.append(json.dumps({"messages": messages, "images": names}) + "\n")
            write_atomic(folder / f"{split}.jsonl", "".join(lines))
            counts[split] = len(lines)
    except OSError as error:
        raise UserInputError(f"Cannot write {folder}: {error.strerror or error}.") from error
    return counts


def _episode(env: VisionEnv, split: Split, index: int, form: str, max_turns: int) -> Conversation:
    """The episode of an item, with a right answer in each turn."""
    observation, info = env.reset(seed=index, options={"index": index, "split": split})
    messages: list[Message] = []
    for _ in range(max_turns):
        answer = _right_answer(env, info, form)
        messages += [*observation.messages, Message.of("assistant", answer)]
        observation, _, terminated, truncated, found = env.step(answer)
        info = {**info, **found}
        if terminated or truncated:
            break
    return _conversation(messages)


def _conversation(messages: Sequence[Message]) -> Conversation:
    return [_written(message) for message in messages], [image.png for image in images_of(messages)]


def _right_answer(env: VisionEnv, info: Mapping[str, Any], form: str) -> str:
    if (example := env.example()) is not None:
        return example
    if "reference" not in info:
        raise UserInputError(
            f"{type(env).__name__} states no right answers: give it a method example() that returns the right answer "
            'to what was shown last, or info["reference"] where it opens an episode.'
        )
    return form.replace("{}", str(info["reference"]))


def _written(message: Message) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in message.parts]
    return {"role": message.role, "content": content}
