"""Data sets with images: rows of parquet and CSV files or of the hub, read when they are asked for, checked, and turned
into items.

`open_table(QuestionTable, "data/geo3k", "train")` opens a folder, `"data/geo3k/train.parquet"` a file, `"owner/name"` a
data set of the hub (from its cache when offline), and `"data/geo3k@[0:100]"` the first hundred rows of any of them.

A file from elsewhere cannot make us take memory without bound: every read has a budget. pyarrow reads the files; the
library `datasets` takes two seconds to import, copies each file into a cache first and knows no budget, so it serves
the hub only.
"""

from __future__ import annotations

import bisect
import math
import re
import threading
import weakref
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from rl_vlm.envs.images import ImageError, check_header, decode, image_bytes, one_line
from rl_vlm.types import EncodedImage, Part, Split, UserInputError

HUB_NAME = re.compile(r"(?!.*\.parquet$)[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_SLICE = re.compile(r"(?P<path>.*)@\[(?P<range>[^\[\]]*)\]")
SHOWN_FINDINGS = 3
CACHED_ITEMS = 64  # decoded items kept per table: the copies of a group ask for the same one
CACHE_BYTES = 256 * 2**20  # of recent row groups, per set of rows

FREE_BYTES = 256 * 2**20  # that a read may take whatever the size of the file
MAX_BYTES = 2**31  # that a read may take at most
MAX_RATIO = 100  # bytes in memory for a byte of the file; pictures have 1, tables of text up to 30
_FEWEST_ROWS, _MOST_ROWS = 64, 65_536  # that are read at once
# What pyarrow raises on a damaged file: its own errors, the system's, and bad UTF-8 when a value becomes a string.
_READ_ERRORS = (pa.ArrowException, OSError, ValueError)

T = TypeVar("T")
Item = TypeVar("Item")
DataSource = str | Mapping[str, str]


class BadRowError(UserInputError):
    """A row of a data set cannot be used; the message names file, row and what is wrong."""


class TooLargeError(UserInputError):
    """A part of a file is larger in memory than its budget."""


def read_parquet(
    reader: pq.ParquetFile,
    group: int | None = None,
    columns: Sequence[str] | None = None,
    free_bytes: int | None = None,
) -> pa.Table:
    """A row group, or the whole file, as a table. Raises TooLargeError, and pyarrow's errors for damaged files.

    The budget is `free_bytes` (FREE_BYTES by default), or more where the file is larger. What the file says of its size
    is compared with it first. The rows are then read piece by piece, because a file may lie: one value of a dictionary
    may stand in millions of rows.
    """
    groups = range(reader.num_row_groups) if group is None else [group]
    schema = reader.schema_arrow
    chosen = [name for name in schema.names if columns is None or name in columns]
    chunks = [
        chunk
        for metadata in map(reader.metadata.row_group, groups)
        for chunk in map(metadata.column, range(metadata.num_columns))
        if chunk.path_in_schema.split(".")[0] in chosen
    ]
    compressed = sum(chunk.total_compressed_size for chunk in chunks)
    budget = min(MAX_BYTES, max(FREE_BYTES if free_bytes is None else free_bytes, MAX_RATIO * compressed))
    size = sum(chunk.total_uncompressed_size for chunk in chunks)
    _check(max(size, 4 * sum(chunk.num_values for chunk in chunks)), budget)
    rows = min(max(budget // max(size, 1), _FEWEST_ROWS), _MOST_ROWS)  # whose values can hardly exceed the budget
    batches, held = [], 0
    for batch in reader.iter_batches(batch_size=rows, row_groups=list(groups), columns=columns, use_threads=False):
        held += batch.nbytes
        _check(held, budget)
        batches.append(batch)
    if batches:
        return pa.Table.from_batches(batches, batches[0].schema)
    return pa.schema([schema.field(name) for name in chosen], schema.metadata).empty_table()


def _check(size: int, budget: int) -> None:
    if size > budget:
        raise TooLargeError(
            f"takes more than {budget >> 20} MiB in memory: write the file with smaller row groups (row_group_size)"
        )


@dataclass(frozen=True, slots=True)
class _Block:
    """Rows that are read together: a row group, a CSV file, or a data set of the hub.

    name: of the file, or of the data set. first: the number of the first row in it. what: the block in words.
    """

    name: object
    first: int
    count: int
    what: str
    read: Callable[[], pa.Table]
    folder: Path | None


class Rows:
    """Rows of a data set by number; recently read blocks are kept in memory up to `CACHE_BYTES`."""

    def __init__(self, blocks: Iterable[_Block]) -> None:
        self._blocks = tuple(blocks)
        self._ends = list(accumulate(block.count for block in self._blocks))
        self._recent: OrderedDict[int, pa.Table] = OrderedDict()
        self._lock = threading.Lock()  # a reader may not be used by two threads at once

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def row(self, index: int) -> dict[str, Any]:
        """Row `index` as a dict of the columns, images still encoded; BadRowError if the file is damaged there."""
        number, place = self._find(index)
        block = self._blocks[number]
        try:
            with self._lock:
                table = self._table(number)
            return table.slice(place, 1).to_pylist()[0]  # type: ignore[no-any-return]
        except TooLargeError as error:
            raise BadRowError(f"{self.where(index)}: {block.what} {error}.") from error
        except _READ_ERRORS as error:
            raise BadRowError(f"{self.where(index)}: {block.what} is damaged ({one_line(error)}).") from error

    def where(self, index: int) -> str:
        """File and row in words."""
        number, place = self._find(index)
        return f"{self._blocks[number].name}, row {self._blocks[number].first + place}"

    def folder(self, index: int) -> Path | None:
        """The folder that the row's image paths are relative to; None for a data set of the hub."""
        return self._blocks[self._find(index)[0]].folder

    def _find(self, index: int) -> tuple[int, int]:
        """The block of a row, and its place in the block."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        number = bisect.bisect_right(self._ends, index)
        return number, index - self._ends[number] + self._blocks[number].count

    def _table(self, number: int) -> pa.Table:
        table = self._recent.pop(number, None)
        if table is None:
            table = self._blocks[number].read()
            if table.num_rows != self._blocks[number].count:
                raise ValueError(f"{table.num_rows} rows where the file promises {self._blocks[number].count}")
        self._recent[number] = table
        while len(self._recent) > 1 and sum(kept.nbytes for kept in self._recent.values()) > CACHE_BYTES:
            self._recent.popitem(last=False)
        return table


def file_rows(files: Sequence[Path], columns: Sequence[str], optional: Sequence[str] = ()) -> Rows:
    """The rows of parquet or CSV files. All have the columns, and the optional ones where the first has them. Raises
    UserInputError."""
    opened = [_open(file, [*columns, *optional]) for file in files]
    names = [one.column_names if isinstance(one, pa.Table) else one.schema_arrow.names for one in opened]
    columns = [*columns, *(name for name in optional if opened and name in names[0])]
    for file, found in zip(files, names, strict=True):
        check_columns(found, file, columns)
    return Rows(block for file, one in zip(files, opened, strict=True) for block in _blocks(file, one, columns))


def _open(file: Path, columns: Sequence[str]) -> pq.ParquetFile | pa.Table:
    """A parquet file, of which nothing but the end is read yet, or the table of a CSV file, whose `columns` are
    texts."""
    csv = file.suffix == ".csv"
    try:
        if not csv:
            return pq.ParquetFile(file, page_checksum_verification=True)
        types = pa.csv.ConvertOptions(column_types={name: pa.string() for name in columns})
        return pa.csv.read_csv(file, convert_options=types)
    except _READ_ERRORS as error:
        raise UserInputError(
            f"{file} is not a readable {'CSV' if csv else 'parquet'} file ({one_line(error)})."
        ) from error


def _blocks(file: Path, opened: pq.ParquetFile | pa.Table, columns: Sequence[str]) -> Iterator[_Block]:
    if isinstance(opened, pa.Table):
        chosen = opened.select(columns)
        yield _Block(file, 0, chosen.num_rows, "the file", lambda: chosen, file.parent)
        return

    def read(group: int) -> pa.Table:
        table = read_parquet(opened, group, columns)
        table.validate(full=True)
        return table

    first = 0
    for group in range(opened.num_row_groups):
        count = opened.metadata.row_group(group).num_rows
        yield _Block(file, first, count, f"row group {group} of the file", partial(read, group), file.parent)
        first += count


def hub_rows(name: str, split: str, columns: Sequence[str], optional: Sequence[str] = ()) -> Rows:
    """The rows of a data set of the hub: from the cache when there is no network, downloaded otherwise."""
    import datasets  # slow to import, and not needed for local files

    try:
        dataset = datasets.load_dataset(name, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserInputError(
            f"Cannot open data set {name!r}, split {split!r} ({one_line(error)}). There is no such local path; for a "
            "data set of the hub, fetch it once with `rl-vlm fetch` while online."
        ) from error
    check_columns(dataset.column_names, name, columns)
    chosen = [*columns, *(column for column in optional if column in dataset.column_names)]
    # The arrow format returns images as they are stored, from files that are mapped into memory; the default one
    # decodes them.
    stored = dataset.select_columns(chosen).with_format("arrow")
    return Rows([_Block(name, 0, len(stored), "the cached copy", lambda: stored[:], None)])


def check_columns(found: Sequence[str], where: object, columns: Sequence[str]) -> None:
    """Raise UserInputError if a column is missing, or there twice: which one counts would be chance."""
    missing = [column for column in columns if column not in found]
    if missing:
        raise UserInputError(
            f"{where} lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}; it has {', '.join(found)}. "
            f"Needed: {', '.join(columns)}."
        )
    for column in columns:
        if found.count(column) > 1:
            raise UserInputError(f"{where} has the column {column} more than once: keep one of them.")


def local_files(path: Path, split: str, kinds: Sequence[str] = ("parquet",)) -> list[Path]:
    """`path` itself if it is a file; else `{split}.parquet` or the shards `{split}-*.parquet` in it or in its
    `data`."""
    if path.is_file():
        return [path]
    for kind in kinds:
        for folder in (path, path / "data"):
            single = folder / f"{split}.{kind}"
            files = [single] if single.is_file() else sorted(folder.glob(f"{split}-*.{kind}"))
            if files:
                return files
    found = sorted(file for folder in (path, path / "data") for file in folder.glob("*.parquet"))
    raise UserInputError(
        f"{path} has neither {split}.parquet nor {split}-*.parquet; it holds "
        f"{', '.join(file.name for file in found[:8]) or 'no parquet file'}."
        + (f" {_split_hint(found[0], split)}" if found else "")
    )


def split_slice(source: str) -> tuple[str, slice]:
    """The path and the rows of `path@[a:b]`; all rows without a slice."""
    if not isinstance(source, str) or not source:
        raise UserInputError(f"A data set is named by a path or a hub name, not by {source!r}.")
    match = _SLICE.fullmatch(source)
    if match is None:
        return source, slice(None)
    ends = re.fullmatch(r"\s*(-?\d{1,12})?\s*:\s*(-?\d{1,12})?\s*", match["range"])
    if ends is None:
        raise UserInputError(
            f"{source!r}: a slice is written @[a:b] with whole numbers, either of which may be absent."
        )
    start, stop = (int(end) if end else None for end in ends.groups())
    return match["path"], slice(start, stop)


def _split_source(data: DataSource, split: Split) -> str:
    """The source of a split: `data` is a source for both splits, or a mapping from split to source.

    A single file is one split: the one in its name, else train. To prevent evaluation on training rows by
    accident, the other split must then be named: `{"train": "a.parquet", "test": "b.parquet"}`.
    """
    if isinstance(data, Mapping):
        if split not in data:
            named = f"env.data names no {split} split; it names {', '.join(data) or 'none'}."
            raise UserInputError(f"{named} {_split_hint(split_slice(next(iter(data.values()), 'FILE'))[0], split)}")
        return data[split]
    path = Path(split_slice(data)[0]).expanduser()
    if path.is_file():
        own = "test" if re.match(r"test(?![a-z])", path.stem) else "train"
        if own != split:
            raise UserInputError(f"{path} is a single file and holds the {own} split. {_split_hint(path, split)}")
    return data


def _split_hint(source: object, split: str) -> str:
    """The advice where `source` has rows, but none of `split`."""
    divided = f"\"env.data={{train: '{source}@[100:]', test: '{source}@[:100]'}}\""
    instead = ", or evaluate on training rows with evaluation.split=train" if split == "test" else ""
    return f"Name a source for each split, which may be rows of one file: {divided}{instead}."


def reject_shared_rows(data: DataSource, selected: Callable[[Split], range], key: str = "env.data") -> None:
    """Raise UserInputError where train and test are slices of one file that share rows; `selected` gives a split's
    rows.

    The splits of a folder or of the hub have files of their own, and a single file is one split.
    """
    if not isinstance(data, Mapping) or not {"train", "test"} <= data.keys():
        return
    paths = {Path(split_slice(source)[0]).expanduser().resolve() for source in data.values()}
    if len(paths) > 1 or not paths.pop().is_file():
        return
    train, test = selected("train"), selected("test")
    if max(train.start, test.start) < min(train.stop, test.stop):
        raise UserInputError(
            f"{key}: {data['train']} and {data['test']} share rows, so that tests would be trained on: give each split "
            "rows of its own, such as FILE@[100:] and FILE@[:100]."
        )


class RowTable(Generic[Item]):
    """A sequence of items, one per row. A row is read, checked and decoded when it is asked for.

    A subclass names its columns and writes `read` and `make`. KINDS: the endings of files in a folder, the preferred
    one first.
    """

    COLUMNS: ClassVar[Sequence[str]]
    OPTIONAL: ClassVar[Sequence[str]] = ()
    KINDS: ClassVar[Sequence[str]] = ("parquet",)

    def __init__(self, rows: Rows, selected: range, name: str) -> None:
        self.name = name
        self.selected = selected  # rows of the data set
        self._rows = rows
        self._recent: OrderedDict[int, Item] = OrderedDict()
        self._lock = threading.Lock()

    @abstractmethod
    def read(self, row: dict[str, Any]) -> tuple[Any, list[Any]]:
        """The checked fields and the undecoded images of a row. Raises BadRowError, whose message says what is
        wrong."""

    @abstractmethod
    def make(self, fields: Any, images: tuple[EncodedImage, ...], where: str) -> Item:
        """The item of what `read` returned, with its images decoded, and the file and row in words."""

    def __len__(self) -> int:
        return len(self.selected)

    def __getitem__(self, index: int) -> Item:
        """Item `index`; IndexError outside the table, BadRowError that names file and row if it is not usable."""
        row = self.selected[index]
        with self._lock:
            item = self._recent.get(row)
            if item is None:
                fields, images = self._each(row, decode)
                item = self._recent[row] = self.make(fields, tuple(images), self._rows.where(row))
                if len(self._recent) > CACHED_ITEMS:
                    self._recent.popitem(last=False)
            return item

    def validate(self, limit: int | None = None) -> int:
        """Check `limit` rows spread over the table, or all, without decoding pixels; return how many.

        Finds damaged files and row groups, rows whose fields are missing or wrong, and images that are missing, not
        images or too large. Raises BadRowError with the first few findings. Damaged pixels show when the row is used.
        """
        findings: list[str] = []
        rows = self.spread(limit)
        for row in rows:
            try:
                self._each(row, check_header)
            except BadRowError as error:
                findings.append(str(error))
                if len(findings) == SHOWN_FINDINGS:
                    break
        if findings:
            raise BadRowError(f"{self.name} has rows that cannot be used. {' '.join(findings)}")
        return len(rows)

    def spread(self, limit: int | None) -> list[int]:
        """`limit` rows spread over the table; all of them without a limit."""
        count = len(self) if limit is None else max(0, min(limit, len(self)))
        return [self.selected[number * len(self) // count] for number in range(count)]

    def _each(self, row: int, use: Callable[[bytes], T]) -> tuple[Any, list[T]]:
        """The checked fields of a row, and `use` of the bytes of each of its images. Raises BadRowError."""
        values, folder = self._rows.row(row), self._rows.folder(row)
        try:
            fields, images = self.read(values)
        except BadRowError as error:
            raise BadRowError(f"{self._rows.where(row)}: {error}") from error
        results = []
        for number, image in enumerate(images):
            try:
                results.append(use(image_bytes(image, folder)))
            except ImageError as error:
                raise BadRowError(f"{self._rows.where(row)}: image {number} {error}.") from error
        return fields, results


Table = TypeVar("Table", bound=RowTable[Any])

# Tables by class, source and version of their files, so that the environments of one process share tables; a table is
# freed with its last environment.
_TABLES: weakref.WeakValueDictionary[tuple[Any, ...], RowTable[Any]] = weakref.WeakValueDictionary()
_TABLES_LOCK = threading.Lock()


def open_table(table: type[Table], source: str, split: str) -> Table:
    """Open a folder, a file or a data set of the hub, with an optional slice `source@[a:b]`.

    Raises UserInputError if it does not exist, lacks a column, or if the slice is empty.
    """
    name, selected = split_slice(source)
    path, files = Path(name).expanduser(), []
    if path.exists():
        files = local_files(path, split, table.KINDS)
    elif not HUB_NAME.fullmatch(name):
        raise UserInputError(f"There is no file or folder {name!r}, and it is no name of a data set on the hub.")
    versions = tuple((str(file.absolute()), file.stat().st_mtime_ns, file.stat().st_size) for file in files)
    with _TABLES_LOCK:
        found = _TABLES.get((table, source, split, versions))
        if not isinstance(found, table):
            columns = table.COLUMNS, table.OPTIONAL
            rows = file_rows(files, *columns) if files else hub_rows(name, split, *columns)
            chosen = range(len(rows))[selected]
            if not chosen:
                raise UserInputError(f"{source} selects none of the {len(rows)} rows of its {split} split.")
            found = _TABLES[table, source, split, versions] = table(rows, chosen, f"{source} ({split})")
    return found


class TableSet(Generic[Table]):
    """The data set of an environment: its splits as tables, each opened on first use. `data` names both, or each
    (env.data)."""

    def __init__(self, table: type[Table], data: DataSource) -> None:
        self._table, self._data = table, data
        self._tables: dict[str, Table] = {}
        self._checked = False

    def split(self, split: Split) -> Table:
        """The items of a split. Raises UserInputError if there is no such split, or if train and test share rows."""
        if not self._checked:
            reject_shared_rows(self._data, lambda one: self._open(one).selected)
            self._checked = True
        return self._open(split)

    def _open(self, split: Split) -> Table:
        if split not in self._tables:
            self._tables[split] = open_table(self._table, _split_source(self._data, split), split)
        return self._tables[split]


def cell_text(value: Any) -> str:
    """A cell as text: strings as they are, finite numbers in digits, and "" for anything else."""
    if isinstance(value, str):
        return value if value.strip() else ""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return ""
    return str(value)


IMAGE_MARKER = "<image>"


@dataclass(frozen=True, slots=True)
class Question:
    """A problem with its `<image>` markers, the true answer, the images, and the file and row that it comes from.

    `kind` says what sort of problem it is, where that is known.
    """

    problem: str
    answer: str
    images: tuple[EncodedImage, ...]
    where: str
    kind: str = ""

    def parts(self) -> tuple[Part, ...]:
        """Text and images in reading order: each marker replaced by its image; images first without markers."""
        if IMAGE_MARKER not in self.problem:
            return (*self.images, self.problem)
        texts = self.problem.split(IMAGE_MARKER)
        parts: list[Part] = [texts[0]]
        for image, text in zip(self.images, texts[1:], strict=True):
            parts += [image, text]
        return tuple(part for part in parts if part != "")


class QuestionTable(RowTable[Question]):
    """Rows of `problem`, `answer` and `images`."""

    COLUMNS = ("problem", "answer", "images")

    def read(self, row: dict[str, Any]) -> tuple[tuple[str, str], list[Any]]:
        """(problem, answer) and the undecoded images."""
        problem, answer, images = cell_text(row["problem"]), cell_text(row["answer"]), row["images"]
        if not problem:
            raise BadRowError("the problem is empty or not text.")
        if not answer:
            raise BadRowError("the answer is empty or neither text nor a number.")
        images = images if isinstance(images, list) else [] if images is None else [images]
        markers = problem.count(IMAGE_MARKER)
        if markers and markers != len(images):
            raise BadRowError(f"{markers} {IMAGE_MARKER} markers in the problem, {len(images)} images.")
        return (problem, answer), images

    def make(self, fields: tuple[str, str], images: tuple[EncodedImage, ...], where: str) -> Question:
        """The question."""
        return Question(*fields, images, where)
