"""Tables of a data set with images: rows of parquet files or the hub, read lazily, checked and turned into items.

`open_table(table, "data/nlvr2", "train")` opens a folder, `"data/nlvr2/train.parquet"` a file, `"owner/name"` a data set of
the hub (from its cache when offline), and `"data/nlvr2@[0:100]"` the first hundred rows of any of them.
"""

from __future__ import annotations

import math
import re
import threading
import weakref
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from rl_vlm.envs.images import MAX_PIXELS, ImageError, check_header, decode, image_bytes
from rl_vlm.envs.rows import BadRowError, ParquetRows, Rows, hub_rows, local_files, split_hint
from rl_vlm.types import EncodedImage, Split, UserInputError

SHOWN_FINDINGS = 3
CACHED_ITEMS = 64  # decoded items kept per table: the copies of a group ask for the same one

T = TypeVar("T")
Item = TypeVar("Item")

HUB_NAME = re.compile(r"(?!.*\.parquet$)[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_SLICE = re.compile(r"(?P<path>.*)@\[(?P<range>[^\[\]]*)\]")

# Tables by class, source and version of their files, so that the environments of one process share tables; a table is
# freed with its last environment.
_TABLES: weakref.WeakValueDictionary[tuple[Any, ...], RowTable[Any]] = weakref.WeakValueDictionary()
_TABLES_LOCK = threading.Lock()

DataSource = str | Mapping[str, str]


class RowTable(Generic[Item]):
    """A sequence of items, one per row. A row is read, checked and decoded when it is asked for."""

    COLUMNS: ClassVar[Sequence[str]]
    OPTIONAL: ClassVar[Sequence[str]] = ()

    def __init__(self, rows: Rows, selected: range, name: str, max_pixels: int = MAX_PIXELS) -> None:
        self.name = name
        self._rows = rows
        self.selected = selected
        self._max_pixels = max_pixels
        self._recent: OrderedDict[int, Item] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.selected)

    def __getitem__(self, index: int) -> Item:
        """Item `index`; IndexError outside the table, BadRowError that names file and row if it is not usable."""
        row = self.selected[index]
        with self._lock:
            item = self._recent.get(row)
            if item is None:
                fields, images = self._read(row)
                item = self._recent[row] = self._make(
                    fields, tuple(self._each(row, images, decode)), self._rows.where(row)
                )
                if len(self._recent) > CACHED_ITEMS:
                    self._recent.popitem(last=False)
            return item

    def validate(self, limit: int | None = None) -> int:
        """Check `limit` rows spread over the table, or all, without decoding pixels; return how many.

        Finds damaged files and row groups, rows whose fields are missing or wrong, and images that are missing, not images
        or too large. Raises BadRowError with the first few findings. Damaged pixels show when the row is used.
        """
        total = len(self)
        count = total if limit is None else max(0, min(limit, total))
        findings: list[str] = []
        for number in range(count):
            row = self.selected[number * total // count]
            try:
                self._each(row, self._read(row)[1], check_header)
            except BadRowError as error:
                findings.append(str(error))
                if len(findings) == SHOWN_FINDINGS:
                    break
        if findings:
            raise BadRowError(f"{self.name} has rows that cannot be used. {' '.join(findings)}")
        return count

    @abstractmethod
    def _read(self, row: int) -> tuple[Any, list[Any]]:
        """The checked fields and the undecoded images of a row. Raises BadRowError."""

    @abstractmethod
    def _make(self, fields: Any, images: tuple[EncodedImage, ...], where: str) -> Item:
        """The item of what `_read` gave, with its images decoded, and the file and row in words."""

    def _each(self, row: int, images: list[Any], use: Callable[[bytes, int], T]) -> list[T]:
        """`use(bytes, max_pixels)` of every image of a row."""
        results = []
        for number, image in enumerate(images):
            try:
                results.append(use(image_bytes(image, self._rows.folder(row)), self._max_pixels))
            except ImageError as error:
                raise BadRowError(f"{self._rows.where(row)}: image {number} {error}.") from error
        return results


Table = TypeVar("Table", bound=RowTable[Any])


def open_table(table: type[Table], source: str, split: str, max_pixels: int = MAX_PIXELS) -> Table:
    """Open a folder, a parquet file or a data set of the hub, with an optional slice `source@[a:b]`.

    Raises UserInputError if it does not exist, lacks a column, or if the slice is empty.
    """
    files = source_files(source, split)
    with _TABLES_LOCK:
        key = (table, source, split, max_pixels, file_versions(files))
        found = _TABLES.get(key)
        if not isinstance(found, table):
            rows, chosen = open_rows(source, split, files, table.COLUMNS, table.OPTIONAL)
            found = _TABLES[key] = table(rows, chosen, f"{source} ({split})", max_pixels)
    return found


def source_files(source: str, split: str) -> list[Path]:
    """The parquet files of a split; none for a data set of the hub. Raises UserInputError if there is no such source."""
    path_text, _ = split_slice(source)
    path = Path(path_text).expanduser()
    if path.exists():
        return local_files(path, split)
    if not HUB_NAME.fullmatch(path_text):
        raise UserInputError(f"There is no file or folder {path_text!r}, and it is no name of a data set on the hub.")
    return []


def file_versions(files: Sequence[Path]) -> tuple[tuple[str, int, int], ...]:
    """What changes when one of the files does: path, time and size of each."""
    return tuple((str(file.absolute()), file.stat().st_mtime_ns, file.stat().st_size) for file in files)


def open_rows(
    source: str, split: str, files: Sequence[Path], columns: Sequence[str], optional: Sequence[str] = ()
) -> tuple[Rows, range]:
    """The rows of a source whose files are given (see `source_files`), and which of them its slice selects, at least one."""
    path_text, selected = split_slice(source)
    rows: Rows = ParquetRows(files, columns, optional) if files else hub_rows(path_text, split, columns, optional)
    return rows, select(range(len(rows)), selected, source, split)


def select(rows: range, selected: slice, source: str, split: str) -> range:
    """The rows of a slice. Raises UserInputError if there are none."""
    if not rows[selected]:
        raise UserInputError(f"{source} selects none of the {len(rows)} rows of its {split} split.")
    return rows[selected]


def open_split_table(table: type[Table], data: DataSource, split: Split) -> Table:
    """Open a split for an environment (see `split_source`)."""
    return open_table(table, split_source(data, split), split)


def split_source(data: DataSource, split: Split) -> str:
    """The source of a split: `data` is a source for both splits, or a mapping from split to source.

    A single file is one split: the one in its name, else train. To prevent evaluation on training rows by
    accident, the other split must then be named: `{"train": "a.parquet", "test": "b.parquet"}`.
    """
    if isinstance(data, Mapping):
        if split not in data:
            named = f"env.data names no {split} split; it names {', '.join(data) or 'none'}."
            raise UserInputError(f"{named} {split_hint(split_slice(next(iter(data.values()), 'FILE'))[0], split)}")
        return data[split]
    path = Path(split_slice(data)[0]).expanduser()
    if path.is_file():
        own = "test" if re.match(r"test(?![a-z])", path.stem) else "train"
        if own != split:
            raise UserInputError(f"{path} is a single file and holds the {own} split. {split_hint(path, split)}")
    return data


def refuse_shared_rows(data: DataSource, selected: Callable[[Split], range], key: str = "env.data") -> None:
    """Raise UserInputError where train and test are slices of one file that share rows; `selected` gives a split's rows.

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


class TableSet(Generic[Table]):
    """The data set of an environment: its splits as tables, each opened on first use (see `split_source`)."""

    def __init__(self, table: type[Table], data: DataSource) -> None:
        self._table = table
        self._data = data
        self._tables: dict[str, Table] = {}
        self._checked = False

    def split(self, split: Split) -> Table:
        """The items of a split. Raises UserInputError if there is no such split, or if train and test share rows."""
        if split not in ("train", "test"):
            raise UserInputError(f'There is no split {split!r}; use "train" or "test".')
        if not self._checked:
            refuse_shared_rows(self._data, lambda one: self._open(one).selected)
            self._checked = True
        return self._open(split)

    def _open(self, split: Split) -> Table:
        if split not in self._tables:
            self._tables[split] = open_split_table(self._table, self._data, split)
        return self._tables[split]

    def item(self, split: Split, index: int) -> Any:
        """Item `index` of a split. Raises UserInputError outside the split, BadRowError if the row cannot be used."""
        table = self.split(split)
        if not 0 <= index < len(table):
            raise UserInputError(f"Item {index} does not exist: the {split} split has {len(table)}.")
        return table[index]


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


def cell_text(value: Any) -> str:
    """A cell as text: strings as they are, finite numbers in digits, and "" for anything else."""
    if isinstance(value, str):
        return value if value.strip() else ""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return ""
    return str(value)
