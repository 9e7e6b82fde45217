"""Data sets with images: rows of files, image folders or the hub, read and checked when they are asked for.

`open_table(QUESTIONS, "data/geo3k", "train")` opens a folder, `"data/geo3k/train.parquet"` a file (parquet, Arrow,
JSON, CSV or TSV), `"owner/name"` a data set of the hub (from its cache when offline), and `"data/geo3k@[0:100]"` the
first hundred rows of any of them.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from rl_vlm.envs.images import MAX_PATH, BadImageError, check_header, decode, image_bytes
from rl_vlm.envs.rows import BadRowError, Rows, file_rows, hub_rows
from rl_vlm.envs.sources import DataSource, local_files, reject_shared_rows, split_hint, split_slice, split_sources
from rl_vlm.files import did_you_mean
from rl_vlm.rewards.truths import bare_truth, is_bare
from rl_vlm.types import EncodedImage, Split, UserInputError

logger = logging.getLogger(__name__)

HUB_NAME = re.compile(r"(?!.*\.(?:parquet|jsonl?|csv|tsv|arrow)(?:\.\w+)?$)[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
SHOWN_FINDINGS = 3
CACHED_ITEMS = 64  # decoded items kept per table: the copies of a group ask for the same one

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Row:
    """One row: its cells by column, and `image`, which decodes the content of a cell. All methods raise BadRowError."""

    cells: dict[str, Any]
    where: str  # file and row in words
    image: Callable[[Any], EncodedImage]

    def text(self, column: str) -> str:
        """A cell as text: strings as they are, finite numbers in digits."""
        text = cell_text(self.cells[column])
        if not text:
            raise BadRowError(f"the {column} is empty or neither text nor a number.")
        return text

    def truth(self, column: str) -> str:
        """The right answer in a cell, without what data sets wrap it in (see `bare_truth`)."""
        truth = bare_truth(self.text(column))
        if not is_bare(truth):
            raise BadRowError(f"the {column} {truth[:80]!r} is no bare value: store what the policy has to answer.")
        return truth


@dataclass(frozen=True)
class Schema(Generic[Item]):
    """What rows hold: `read` makes the item of a row, or raises BadRowError; `doubt` says what is odd about an item."""

    read: Callable[[Row], Item]
    columns: tuple[str, ...] | None  # None: all
    optional: tuple[str, ...] = ()
    doubt: Callable[[Item], str] = lambda item: ""


class DataTable(Generic[Item]):
    """The items of `rows` that `source@[a:b]` selects. A row is read, checked and decoded when it is asked for.

    Raises UserInputError if none is selected.
    """

    def __init__(self, schema: Schema[Item], rows: Rows, source: str, split: str) -> None:
        self.selected: Sequence[int] = range(len(rows))[split_slice(source)[1]]  # rows of the data set
        if not self.selected:
            raise UserInputError(f"{source} selects none of the {len(rows)} rows of its {split} split.")
        self.name = f"{source} ({split})"
        self.longest = 0  # the item of the most text that `validate` saw
        self._schema, self._rows = schema, rows
        self._decoded = lru_cache(CACHED_ITEMS)(partial(self._read, use=decode))

    def __len__(self) -> int:
        return len(self.selected)

    def __getitem__(self, index: int) -> Item:
        """Item `index`; IndexError outside the table, BadRowError that names file and row if it is not usable."""
        return self._decoded(self.selected[index])

    def part(self, numbers: Iterable[int], split: str) -> DataTable[Item]:
        """The items of these numbers, as a split of its own."""
        part = copy.copy(self)
        part.selected, part.name = [self.selected[number] for number in numbers], f"{self.name}, {split}"
        return part

    def outline(self, index: int) -> Item:
        """As item `index`, with images of which the header alone was read: their sizes, before a camera's rotation."""
        return self._read(self.selected[index], lambda data: EncodedImage("", b"", *check_header(data)))

    def validate(self, limit: int | None = None) -> int:
        """Check `limit` rows spread over the table, or all, without decoding pixels; return how many.

        Finds damaged files, fields that are missing or wrong, and images that are missing, too large or no images.
        Raises BadRowError with the first few findings. Damaged pixels show when the row is used. Doubts are logged.
        """
        count = len(self) if limit is None else max(0, min(limit, len(self)))
        findings: dict[str, list[str]] = {}  # what is wrong -> where
        doubts: list[str] = []
        most = 0
        for number in range(count):
            try:
                item = self.outline(number * len(self) // count)
                if (size := len(str(item))) > most:
                    most, self.longest = size, number * len(self) // count
                if doubt := self._schema.doubt(item):
                    doubts.append(doubt)
            except BadRowError as error:
                where, _, why = str(error).partition(": ")
                findings.setdefault(why, []).append(where)
                if sum(map(len, findings.values())) == SHOWN_FINDINGS:
                    break
        if findings:
            shown = " ".join(f"{'; '.join(places)}: {why}" for why, places in findings.items())
            raise BadRowError(f"{self.name} has rows that cannot be used. {shown}")
        if doubts:
            logger.warning("%s: %d of %d rows look odd, such as %s.", self.name, len(doubts), count, doubts[0])
        return count

    def _read(self, row: int, use: Callable[[bytes], EncodedImage]) -> Item:
        cells, folder, where = self._rows.row(row), self._rows.folder(row), self._rows.where(row)
        numbers = itertools.count()

        def image(cell: Any) -> EncodedImage:
            number, name = next(numbers), ""
            try:
                data = image_bytes(cell, folder)  # its errors name a path
                name = f" ({cell})" if isinstance(cell, str) and len(cell) <= MAX_PATH else ""
                return use(data)
            except BadImageError as error:
                raise BadRowError(f"image {number}{name} {error}.") from error

        try:
            return self._schema.read(Row(cells, where, image))
        except BadRowError as error:
            raise BadRowError(f"{where}: {error}") from error


def open_table(schema: Schema[Item], source: str, split: str) -> DataTable[Item]:
    """Open a folder, a file or a data set of the hub, with an optional slice `source@[a:b]`.

    Raises UserInputError if it does not exist, lacks a column, or if the slice is empty.
    """
    name = split_slice(source)[0]
    path, files = Path(name).expanduser(), []
    if path.exists():
        files = local_files(path, split)
    elif not HUB_NAME.fullmatch(name):
        hint = did_you_mean(path)
        raise UserInputError(f"There is no file or folder {name!r}, and it is no name of a data set on the hub.{hint}")
    versions = tuple((file.absolute(), file.stat().st_mtime_ns, file.stat().st_size) for file in files)
    return _opened(schema, source, split, versions)  # type: ignore[return-value]  # of this schema


@lru_cache(maxsize=8)  # the environments of one process share tables
def _opened(
    schema: Schema[Any], source: str, split: str, versions: tuple[tuple[Path, int, int], ...]
) -> DataTable[Any]:
    files, columns = [file for file, *_ in versions], (schema.columns, schema.optional)
    rows = file_rows(files, *columns) if files else hub_rows(split_slice(source)[0], split, *columns)
    return DataTable(schema, rows, source, split)


class TableSet(Generic[Item]):
    """The data set of an environment: `data` names one source for both splits, or one for each (env.data)."""

    def __init__(self, schema: Schema[Item], data: DataSource) -> None:
        self._schema, self._sources = schema, split_sources(data)
        self._tables: dict[str, DataTable[Item]] = {}

    def split(self, split: Split) -> DataTable[Item]:
        """The items of a split. Raises UserInputError if there is no such split, or if the two share rows."""
        if split not in self._tables:
            table = self._open(split)
            if self._tables:
                reject_shared_rows(self._sources, lambda one: self._open(one).selected)
            self._tables[split] = table
        return self._tables[split]

    def _open(self, split: Split) -> DataTable[Item]:
        if split not in self._sources:
            name = next((split_slice(source)[0] for source in self._sources.values()), "FILE")
            named = f"env.data names no {split} split; it names {', '.join(self._sources) or 'none'}."
            raise UserInputError(f"{named} {split_hint(name, split)}")
        return open_table(self._schema, self._sources[split], split)


def cell_text(value: Any) -> str:
    """A cell as text: strings as they are, finite numbers in digits, and "" for anything else.

    A float has the 15 digits that any decimal number keeps in it: a computed 0.30000000000000004 is 0.3.
    """
    if isinstance(value, str):
        return value if value.strip() else ""
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal) or not math.isfinite(value):
        return ""
    return f"{value:.15g}" if isinstance(value, float) else f"{value:f}" if isinstance(value, Decimal) else str(value)


def as_list(cell: Any) -> list[Any]:
    """The images of a cell, which holds none, one or a list of them."""
    return cell if isinstance(cell, list) else [] if cell is None else [cell]
