"""The conversations of a job: checked and measured before anything starts, then drawn in the order of the seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rl_vlm.config import SFTConfig
from rl_vlm.envs.data import DataTable
from rl_vlm.envs.sources import reject_shared_rows, split_slice
from rl_vlm.models.images import TextSide
from rl_vlm.seeding import derive_seed
from rl_vlm.supervised.conversations import ConversationEncoder, SFTConversation
from rl_vlm.supervised.sources import has_split, open_conversations
from rl_vlm.types import Trajectory, UserInputError

_SPLIT_STREAM, _ORDER_STREAM = 8, 9  # random numbers of their own


@dataclass(frozen=True, slots=True)
class Measured:
    """The `rows` of a table that are used, int64 [N], and their tokens; `left_out` were too long."""

    table: DataTable[SFTConversation]
    rows: np.ndarray
    tokens: np.ndarray
    left_out: int

    def __len__(self) -> int:
        return len(self.rows)

    def conversations(self, numbers: Sequence[int]) -> list[SFTConversation]:
        """By number from 0 to N - 1."""
        return [self.table[int(self.rows[number])] for number in numbers]


@dataclass(frozen=True, slots=True)
class JobData:
    encoder: ConversationEncoder
    train: Measured
    held_out: Measured | None
    batch_size: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(len(self.train) / self.batch_size)

    def batch(self, step: int) -> list[Trajectory]:
        """What optimiser step 0, 1, ... trains on. Every epoch shows each conversation once. Raises BadRowError."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = np.random.default_rng(derive_seed(self.seed, _ORDER_STREAM, epoch)).permutation(len(self.train))
        numbers = order[place * self.batch_size : (place + 1) * self.batch_size]
        return [self.encoder.encode(one) for one in self.train.conversations(numbers.tolist())]


def open_job_data(job: SFTConfig, text: TextSide, progress: Callable[[str], None] = lambda _: None) -> JobData:
    """Open, check and measure all conversations of a job. Raises UserInputError, BadRowError."""
    sft = job.sft
    encoder = ConversationEncoder(text, sft.max_length, sft.too_long)
    train = open_conversations(sft.data, "train")
    rows, held_out, held_rows = np.arange(len(train)), None, np.arange(0)
    if sft.eval_fraction:
        count = max(1, round(sft.eval_fraction * len(train)))
        if count >= len(train):
            raise UserInputError(
                f"sft.eval_fraction leaves none of the {len(train)} conversations to train on: lower it."
            )
        shuffled = np.random.default_rng(derive_seed(job.seed, _SPLIT_STREAM)).permutation(len(train))
        rows, held_out, held_rows = np.sort(shuffled[count:]), train, np.sort(shuffled[:count])
    elif sft.eval_data is not None or has_split(sft.data, "test"):
        # A slice of `data` is one of its train split.
        held_out = open_conversations(sft.eval_data or split_slice(sft.data)[0], "test")
        held_rows = np.arange(len(held_out))
        if sft.eval_data is not None:
            chosen = {"train": train.selected, "test": held_out.selected}
            reject_shared_rows({"train": sft.data, "test": sft.eval_data}, chosen.__getitem__, "sft.data")
    measured = _measure(train, rows, encoder, progress)
    if not len(measured):
        raise UserInputError(
            f"All {len(rows)} conversations of {train.name} are longer than sft.max_length ({sft.max_length}): raise "
            "it."
        )
    spread = np.linspace(0, len(held_rows) - 1, min(len(held_rows), sft.eval_items)).astype(np.int64)
    tested = None if held_out is None else _measure(held_out, held_rows[spread], encoder, progress)
    return JobData(encoder, measured, tested, sft.batch_size, job.seed)


def _measure(
    table: DataTable[SFTConversation], rows: np.ndarray, encoder: ConversationEncoder, progress: Callable[[str], None]
) -> Measured:
    progress(f"Reading {len(rows)} conversations of {table.name} ...")
    lengths = [encoder.length(table.outline(int(row))) for row in rows]
    kept = np.array([length is not None for length in lengths], dtype=bool)
    tokens = np.array([length for length in lengths if length is not None], dtype=np.int64)
    return Measured(table, rows[kept], tokens, int((~kept).sum()))
