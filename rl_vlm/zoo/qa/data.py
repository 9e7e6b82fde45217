"""Rows of any data set as images, a question and an answer, and which of them are the test split."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

import numpy as np

from rl_vlm.envs.data import DataTable, Row, Schema, TableSet, as_list, cell_text, open_table
from rl_vlm.envs.errors import plain_values
from rl_vlm.envs.messages import Picture, RawTurn, check_order, read_turns, with_images
from rl_vlm.envs.rows import BadRowError
from rl_vlm.envs.sources import DataSource
from rl_vlm.rewards.truths import bare_truth
from rl_vlm.seeding import derive_seed
from rl_vlm.types import Message, Split, UserInputError

Part = Literal["image", "question", "answer"]
# How data sets name their columns, the most telling name first.
NAMES: dict[str, tuple[str, ...]] = {
    "image": ("images", "image", "img", "picture", "photo", "image_path", "file_names", "file_name", "img_filename"),
    "question": ("question", "prompt", "messages", "conversations", "problem", "query", "instruction", "text"),
    "answer": ("answer", "answers", "ground_truth", "solution", "label", "target", "response", "output", "bbox"),
}
_SPLITS: dict[str, Split] = {
    "train": "train", "training": "train",
    "test": "test", "testing": "test", "validation": "test", "valid": "test", "val": "test", "dev": "test",
    "eval": "test",
}  # fmt: skip
_SHARE_STREAM = 31  # random numbers of the split by share


@dataclass(frozen=True, slots=True)
class QARow:
    """What a row asks.

    prompt: the question as TRL gives it to reward functions, a text or chat messages with places for the images.
    accepted: the right answers; none where the data have none. columns: the row's other cells, as far as they are JSON,
    for reward functions. image_columns: for each column of images the places of its images among the row's, a list or
    one number, as the cell is, or None.
    """

    messages: tuple[Message, ...]
    prompt: str | list[dict[str, Any]]
    accepted: tuple[str, ...]
    columns: dict[str, Any]
    image_columns: dict[str, list[int] | int | None]
    where: str


def _read(named: Mapping[str, tuple[str, ...]], question: str | None, conversational: bool, row: Row) -> QARow:
    roles = {part: _columns_of(part, row, named.get(part)) for part in NAMES}
    if question is None:
        question = _only(row, "question", roles["question"])
    chat = isinstance(question, list)
    turns: list[RawTurn] = [("user", [])]  # images alone
    if question is not None:
        turns = read_turns(question if chat else [{"role": "user", "content": cell_text(question)}])
    said = turns.pop() if turns[-1][0] == "assistant" else None  # SFT's data: the last message is the answer
    check_order([role for role, _ in turns])
    images: list[Any] = []
    image_columns: dict[str, list[int] | int | None] = {}
    for name in roles["image"] or ():
        cell, first = row.cells[name], len(images)
        images += as_list(cell)
        numbers = list(range(first, len(images)))
        image_columns[name] = numbers if isinstance(cell, list) else next(iter(numbers), None)
    messages = with_images(turns, images, row.image)
    shown = sum(len(message.images) for message in messages)
    if roles["image"] is None and not shown:
        raise _unknown("image", row)
    if shown != len(images):  # others stand in the messages, in between
        image_columns = {}
    answer = "".join(map(str, said[1])) if said else None
    if answer is None or roles["answer"]:
        answer = _only(row, "answer", roles["answer"])
    left_out = {"prompt", *(roles["image"] or ()), *((roles["question"] or ()) if chat else ())}
    columns = {
        name: cell
        for name, cell in row.cells.items()
        if name not in left_out and (cell is None or plain_values({name: cell}))
    }
    if not chat:
        columns.setdefault("question", question)
    columns.setdefault("answer", answer)
    if not plain_values({"columns": columns}):
        raise BadRowError("its cells beside the images have more than 65536 characters in all: leave some columns out.")
    prompt = _shown(turns) if chat or conversational else cell_text(question)
    return QARow(tuple(messages), prompt, _accepted(answer), columns, image_columns, row.where)


def _columns_of(part: str, row: Row, named: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """The columns of a part: the user's choice, else the first with a known name; None without one."""
    if named is None:
        return next(((column,) for name in NAMES[part] for column in row.cells if column.lower() == name), None)
    if missing := [name for name in named if name not in row.cells]:
        raise UserInputError(
            f"{row.where}: env.kwargs.columns names {missing[0]!r} for the {part}, and the columns are "
            f"{', '.join(row.cells)}."
        )
    return named


def _only(row: Row, part: str, columns: tuple[str, ...] | None) -> Any:
    """The cell of a part; None where the user says that the data have none. Raises BadRowError."""
    if columns is None:
        raise _unknown(part, row)
    if columns and row.cells[columns[0]] in (None, "", []):
        raise BadRowError(f"the {part} ({columns[0]}) is empty.")
    return row.cells[columns[0]] if columns else None


def _unknown(part: str, row: Row) -> UserInputError:
    return UserInputError(
        f"{row.where}: no column has a usual name of the {part} ({', '.join(NAMES[part])}); the columns are "
        f"{', '.join(row.cells)}. Name one in env.kwargs.columns, such as {{{part}: COLUMN}}, or {{{part}: null}} if "
        "there is none."
    )


def _shown(turns: Sequence[RawTurn]) -> list[dict[str, Any]]:
    """Messages with places in place of images."""
    return [
        {
            "role": role,
            "content": [
                {"type": "image"} if isinstance(part, Picture) else {"type": "text", "text": part} for part in parts
            ],
        }
        for role, parts in turns
    ]


def _accepted(answer: Any) -> tuple[str, ...]:
    """The answers that are right: one, or each of a list; numbers in a list are one box."""
    if answer is None:
        return ()
    cells = answer if isinstance(answer, list) else [answer]
    if len(cells) > 1 and all(isinstance(cell, int | float) for cell in cells):
        return (json.dumps(cells),)
    texts = tuple(str(cell).lower() if isinstance(cell, bool) else cell_text(cell) for cell in cells)
    if not all(texts):
        raise BadRowError(f"the answer {str(answer)[:80]!r} is neither a text, a number, nor a list of these.")
    return tuple(map(bare_truth, texts))


@lru_cache(maxsize=64)  # equal schemas are one, so that environments of a process share tables
def _schema(
    named: tuple[tuple[str, tuple[str, ...]], ...], question: str | None, conversational: bool
) -> Schema[QARow]:
    return Schema(partial(_read, dict(named), question, conversational), None)


class QARows(TableSet[QARow]):
    """The rows of `data`, whose test split is a file of its own, the rows that `split_column` marks, or a share."""

    def __init__(
        self,
        data: DataSource,
        columns: Mapping[Part, str | Sequence[str] | None],
        question: str | None,
        conversational: bool,
        split_column: str | None,
        test_share: float,
    ) -> None:
        if [bool(split_column), bool(test_share), not isinstance(data, str)].count(True) > 1:
            raise UserInputError(
                "QA-v0: env.data for each split, env.kwargs.split_column and env.kwargs.test_share exclude each other: "
                "give one of them."
            )
        named = {part: (one,) if isinstance(one, str) else tuple(one or ()) for part, one in columns.items()}
        super().__init__(_schema(tuple(sorted(named.items())), question, conversational), data)
        self._data, self._split_column, self._test_share = data, split_column, test_share

    def _open(self, split: Split) -> DataTable[QARow]:
        if not (self._split_column or self._test_share):
            return super()._open(split)
        assert isinstance(self._data, str)  # checked above
        whole = open_table(self._schema, self._data, "train")
        return _parts(whole, self._data, self._split_column, self._test_share)[split]


@lru_cache(maxsize=8)
def _parts(whole: DataTable[QARow], data: str, column: str | None, share: float) -> dict[Split, DataTable[QARow]]:
    if column:
        marks = open_table(_marks(column), data, "train")
        splits = [marks[number] for number in range(len(marks))]
    else:
        order = np.random.default_rng(derive_seed(_SHARE_STREAM)).permutation(len(whole))
        tested = set(order[: max(1, round(share * len(whole)))].tolist())
        splits = ["test" if number in tested else "train" for number in range(len(whole))]
    numbers = {one: [number for number, split in enumerate(splits) if split == one] for one in ("train", "test")}
    if empty := next((one for one, found in numbers.items() if not found), None):
        raise UserInputError(f"QA-v0: none of the {len(whole)} rows of {data} is of the {empty} split.")
    return {"train": whole.part(numbers["train"], "train"), "test": whole.part(numbers["test"], "test")}


@lru_cache(maxsize=8)
def _marks(column: str) -> Schema[Split]:
    def read(row: Row) -> Split:
        mark = cell_text(row.cells[column]).strip().lower()
        if mark not in _SPLITS:
            raise BadRowError(f"the {column} is {mark[:40]!r}; it must be one of {', '.join(_SPLITS)}.")
        return _SPLITS[mark]

    return Schema(read, (column,))
