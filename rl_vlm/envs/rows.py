"""Rows of files, image folders and data sets of the hub, by number, read when they are asked for.

A file from elsewhere cannot make us take memory without bound: every read has a budget. pyarrow reads the files; the
library `datasets` takes two seconds to import, copies each file into a cache first and knows no budget, so it serves
the hub only.
"""

from __future__ import annotations

import bisect
import codecs
import io
import itertools
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rl_vlm.envs.parquet import FREE_BYTES, READ_ERRORS, TooLargeError, read_parquet
from rl_vlm.envs.tables import (
    COMPRESSED,
    DELIMITERS,
    arrow_batches,
    check_kind,
    image_classes,
    suffix_of,
    text_table,
    unpacked,
)
from rl_vlm.files import did_you_mean
from rl_vlm.safe_text import one_line
from rl_vlm.types import UserInputError

CACHE_BYTES = 256 * 2**20  # of recent row groups, per set of rows
_BETWEEN = re.compile(r"[\s,]*")  # of two entries


class BadRowError(UserInputError):
    """A row of a data set cannot be used; the message names file, row and what is wrong.

    Do: repair the row, or leave it out.
    """


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Rows that are read together: a row group of a file (`name`), whose first row has the number `first`, or a data
    set of the hub. Paths of images are relative to `folder`."""

    name: object
    first: int
    count: int
    read: Callable[[], pa.Table]
    folder: Path | None = None


class Rows:
    """Rows of a data set by number; recently read blocks are kept in memory up to `CACHE_BYTES`."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._blocks = tuple(blocks)
        self._ends = list(itertools.accumulate(block.count for block in self._blocks))
        self._recent: OrderedDict[Block, pa.Table] = OrderedDict()
        self._lock = threading.Lock()  # a reader may not be used by two threads at once

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def row(self, index: int) -> dict[str, Any]:
        """Row `index` as a dict of the columns, images still encoded; BadRowError if the file is damaged there."""
        block, place = self._find(index)
        try:
            with self._lock:
                cells = self._table(block).slice(place, 1)
            return {name: _value(cells.column(name)[0]) for name in cells.column_names}
        except TooLargeError as error:
            raise BadRowError(f"{self.where(index)}: the row group {error}.") from error
        except READ_ERRORS as error:
            raise BadRowError(f"{self.where(index)}: the file is damaged there ({one_line(error)}).") from error

    def where(self, index: int) -> str:
        """File and row in words."""
        block, place = self._find(index)
        return f"{block.name}, row {block.first + place}"

    def folder(self, index: int) -> Path | None:
        """The folder that the row's image paths are relative to; None for a data set of the hub."""
        return self._find(index)[0].folder

    def _find(self, index: int) -> tuple[Block, int]:
        """The block of a row, and its place in the block."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        number = bisect.bisect_right(self._ends, index)
        return self._blocks[number], index - self._ends[number] + self._blocks[number].count

    def _table(self, block: Block) -> pa.Table:
        table = self._recent.pop(block, None)
        if table is None:
            table = block.read()
            if table.num_rows != block.count:
                raise ValueError(f"{table.num_rows} rows where the file promises {block.count}")
        self._recent[block] = table
        while len(self._recent) > 1 and sum(kept.nbytes for kept in self._recent.values()) > CACHE_BYTES:
            self._recent.popitem(last=False)
        return table


def _value(cell: pa.Scalar) -> Any:
    """The cell in Python; short floats as the decimal that they stand for, because 0.1 has other digits there."""
    value = cell.as_py()
    short = {pa.float16(): np.float16, pa.float32(): np.float32}.get(cell.type)
    return value if value is None or short is None else float(str(short(value)))


def file_rows(files: Sequence[Path], columns: Sequence[str] | None, optional: Sequence[str] = ()) -> Rows:
    """The rows of parquet or Arrow files, which are read when they are asked for, or of one file or folder of another
    kind. Raises UserInputError."""
    path = files[0]
    if path.is_dir():
        return _table_rows(path, path, image_classes(path), columns, optional)
    for file in files:
        check_kind(file)
    if suffix_of(path) in DELIMITERS:
        return _table_rows(path, path.parent, text_table(path), columns, optional)
    if suffix_of(path) in (".jsonl", ".json"):
        rows = JsonRows(path, (*(columns or ()), *optional))
        if len(rows):
            chosen_columns(rows.names, path, columns, optional)
        return rows
    read = _arrow_blocks if suffix_of(path) == ".arrow" else _parquet_blocks
    return Rows(block for file in files for block in read(file, columns, optional))


def _table_rows(
    path: Path, folder: Path, table: pa.Table, columns: Sequence[str] | None, optional: Sequence[str]
) -> Rows:
    table = table.select(chosen_columns(table.column_names, path, columns, optional))
    return Rows([Block(path, 0, len(table), lambda: table, folder)])


class JsonRows(Rows):
    """The objects of a file, which is an array of them or has one in each line; empty lines are passed over. Only their
    places are kept in memory, of a compressed file its content too.

    An object that lacks one of `columns` has None there.
    """

    def __init__(self, path: Path, columns: Sequence[str] = ()) -> None:
        self._path, self._columns = path, columns
        self._content = unpacked(path) if path.suffix.lower() in COMPRESSED else None
        try:
            with self._open() as file:
                is_array = file.read(64).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["
                file.seek(0)
                self._unit, found = ("entry", self._entries()) if is_array else ("line", _lines(file))
                self._places = list(found)  # (number, offset, bytes)
        except OSError as error:
            raise UserInputError(f"Cannot read {path}: {error.strerror or error}.") from error

    def _open(self) -> BinaryIO:
        return self._path.open("rb") if self._content is None else io.BytesIO(self._content)

    def _entries(self) -> Iterator[tuple[int, int, int]]:
        """Number, offset and bytes of each entry of an array."""
        text = (self._content or unpacked(self._path)).decode("latin-1")  # characters are bytes
        decode, place = json.JSONDecoder().raw_decode, text.index("[") + 1
        try:
            for number in itertools.count():
                place = _BETWEEN.match(text, place).end()  # type: ignore[union-attr]  # which may be empty
                if text[place] == "]" and not text[place + 1 :].strip():
                    return
                end = decode(text, place)[1]
                yield number, place, end - place
                place = end
        except (ValueError, IndexError, RecursionError) as error:
            raise UserInputError(
                f"{self._path} is an array that is damaged at entry {number} ({one_line(error)})."
            ) from error

    def __len__(self) -> int:
        return len(self._places)

    @property
    def names(self) -> list[str]:
        """The columns of the first object."""
        return list(self._object(0))

    def row(self, index: int) -> dict[str, Any]:
        return dict.fromkeys(self._columns) | self._object(index)

    def _object(self, index: int) -> dict[str, Any]:
        _, offset, size = self._places[index]
        try:
            with self._open() as file:
                file.seek(offset)
                row = json.loads(file.read(size))
        except (OSError, ValueError, RecursionError) as error:
            raise BadRowError(
                f"{self.where(index)}: not JSON ({one_line(error)}); a file is an array of objects or has one a line."
            ) from error
        if not isinstance(row, dict):
            raise BadRowError(f"{self.where(index)}: a {type(row).__name__} and not an object.")
        return row

    def where(self, index: int) -> str:
        return f"{self._path}, {self._unit} {self._places[index][0]}"

    def folder(self, index: int) -> Path:
        return self._path.parent


def _lines(file: BinaryIO) -> Iterator[tuple[int, int, int]]:
    """Number from 1, offset and bytes of each line that is not empty."""
    offset = 0
    for number, line in enumerate(file, start=1):
        if line.strip():
            yield number, offset, len(line)
        offset += len(line)


def _parquet_blocks(file: Path, columns: Sequence[str] | None, optional: Sequence[str]) -> Iterator[Block]:
    try:
        reader = pq.ParquetFile(file, page_checksum_verification=True)
    except READ_ERRORS as error:
        raise UserInputError(f"{file} is not a readable parquet file ({one_line(error)}).") from error
    chosen = chosen_columns(reader.schema_arrow.names, file, columns, optional)

    def read(group: int) -> pa.Table:
        table = read_parquet(reader, group, chosen, FREE_BYTES)
        table.validate(full=True)
        return table

    first = 0
    for group in range(reader.num_row_groups):
        count = reader.metadata.row_group(group).num_rows
        yield Block(file, first, count, partial(read, group), file.parent)
        first += count


def _arrow_blocks(file: Path, columns: Sequence[str] | None, optional: Sequence[str]) -> Iterator[Block]:
    first = 0

    def checked(table: pa.Table) -> pa.Table:
        table.validate(full=True)
        return table

    for batch in arrow_batches(file):
        table = pa.Table.from_batches([batch])
        table = table.select(chosen_columns(table.column_names, file, columns, optional))
        yield Block(file, first, len(table), partial(checked, table), file.parent)
        first += len(table)


def hub_rows(name: str, split: str, columns: Sequence[str] | None, optional: Sequence[str] = ()) -> Rows:
    """The rows of a data set of the hub: from the cache when there is no network, downloaded otherwise."""
    import datasets  # slow to import, and not needed for local files

    try:
        dataset = datasets.load_dataset(name, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        if "/" not in name:  # those of the hub have one
            hint = f"{did_you_mean(Path(name))} `rl-vlm sft-example {name}` would write one to begin with."
        else:
            hint = f" Nor does it open as a data set of the hub, split {split!r} ({one_line(error)}): fetch it once "
            hint += "with `rl-vlm fetch` while online."
        raise UserInputError(f"There is no file or folder {name!r} here.{hint}") from error
    # Arrow keeps images as they are stored, in files that are mapped into memory; the default format decodes them.
    stored = dataset.select_columns(chosen_columns(dataset.column_names, name, columns, optional)).with_format("arrow")
    return Rows([Block(name, 0, len(stored), lambda: stored[:])])


class MissingColumnError(UserInputError):
    """A table lacks a column that is needed; the message names the columns that it has.

    Do: name the right column, or add it.
    """


def chosen_columns(
    found: Sequence[str], where: object, columns: Sequence[str] | None, optional: Sequence[str] = ()
) -> list[str]:
    """The columns, and the optional ones that are there; None: all.

    Raises MissingColumnError, or UserInputError for one that is there twice: which one counts would be chance.
    """
    columns = found if columns is None else columns
    missing = [column for column in columns if column not in found]
    if missing:
        raise MissingColumnError(
            f"{where} lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}; it has {', '.join(found)}. "
            f"Needed: {', '.join(columns)}."
        )
    chosen = [*columns, *(column for column in optional if column in found)]
    if optional and not chosen:
        raise MissingColumnError(f"{where} lacks the column {optional[0]}; it has {', '.join(found)}.")
    for column in chosen:
        if found.count(column) > 1:
            raise UserInputError(f"{where} has the column {column} more than once: keep one of them.")
    return chosen
