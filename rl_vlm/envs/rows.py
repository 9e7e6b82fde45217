"""Raw rows of a question set: random access to parquet files, and to data sets of the hub."""

from __future__ import annotations

import bisect
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from rl_vlm.envs.images import one_line
from rl_vlm.envs.parquet_budget import TooLargeError, read_row_group
from rl_vlm.types import UserInputError

COLUMNS = ("problem", "answer", "images")
CACHE_BYTES = 256 * 2**20
# What pyarrow raises on a damaged file: its own errors, the system's, and bad UTF-8 when a value becomes a string.
_READ_ERRORS = (pa.ArrowException, OSError, ValueError)


class BadRowError(UserInputError):
    """A row of a data set cannot be used; the message names file, row and what is wrong."""


class Rows(Protocol):
    """Rows of a data set, read one by one."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> dict[str, Any]:
        """Row `index` as a dict of the columns."""
        ...

    def where(self, index: int) -> str:
        """File and row in words."""
        ...

    def folder(self, index: int) -> Path | None:
        """The folder that image paths are relative to; None where there is none."""
        ...


class ParquetRows:
    """Rows of parquet files, one row group at a time; recent row groups are kept in memory up to `CACHE_BYTES`.

    All files have the columns, and the optional ones where the first has them. Raises UserInputError.
    """

    def __init__(self, files: Sequence[Path], columns: Sequence[str] = COLUMNS, optional: Sequence[str] = ()) -> None:
        self._files = tuple(files)
        self._readers = [_open(file, columns) for file in files]
        present = self._readers[0].schema_arrow.names if self._readers else ()
        self._columns = [*columns, *(name for name in optional if name in present)]
        for file, reader in zip(self._files, self._readers, strict=True):
            check_columns(reader.schema_arrow.names, file, self._columns)
        self._groups: list[tuple[int, int, int]] = []  # (file, row group, its first row in that file)
        self._starts: list[int] = []  # first row of each group, counted over all files
        total = 0
        for number, reader in enumerate(self._readers):
            first = total
            for group in range(reader.metadata.num_row_groups):
                self._groups.append((number, group, total - first))
                self._starts.append(total)
                total += reader.metadata.row_group(group).num_rows
        self._total = total
        self._recent: OrderedDict[int, pa.Table] = OrderedDict()
        self._lock = threading.Lock()  # a reader may not be used by two threads at once

    def __len__(self) -> int:
        return self._total

    def row(self, index: int) -> dict[str, Any]:
        """Row `index` as a dict of the columns, images still encoded; BadRowError if the file is damaged there."""
        group = self._group(index)
        try:
            with self._lock:
                table = self._table(group)
            return table.slice(index - self._starts[group], 1).to_pylist()[0]
        except TooLargeError as error:
            raise BadRowError(f"{self.where(index)}: row group {self._groups[group][1]} {error}.") from error
        except _READ_ERRORS as error:
            number = self._groups[group][1]
            reason = one_line(error)
            raise BadRowError(f"{self.where(index)}: row group {number} of the file is damaged ({reason}).") from error

    def where(self, index: int) -> str:
        """File and row in words."""
        group = self._group(index)
        file, _, first = self._groups[group]
        return f"{self._files[file]}, row {first + index - self._starts[group]}"

    def folder(self, index: int) -> Path:
        """The folder that the row's image paths are relative to."""
        return self._files[self._groups[self._group(index)][0]].parent

    def _group(self, index: int) -> int:
        if not 0 <= index < self._total:
            raise IndexError(f"row {index} of {self._total}")
        return bisect.bisect_right(self._starts, index) - 1

    def _table(self, group: int) -> pa.Table:
        table = self._recent.pop(group, None)
        if table is None:
            file, number, _ = self._groups[group]
            table = read_row_group(self._readers[file], number, self._columns)
            table.validate(full=True)
            rows = self._readers[file].metadata.row_group(number).num_rows
            if table.num_rows != rows:
                raise ValueError(f"{table.num_rows} rows where the file promises {rows}")
        self._recent[group] = table
        while len(self._recent) > 1 and sum(kept.nbytes for kept in self._recent.values()) > CACHE_BYTES:
            self._recent.popitem(last=False)
        return table


class HubRows:
    """Rows of a `datasets.Dataset`, whose Arrow files are memory-mapped."""

    def __init__(self, dataset: Any, name: str, columns: Sequence[str] = COLUMNS, optional: Sequence[str] = ()) -> None:
        check_columns(dataset.column_names, name, columns)
        chosen = [*columns, *(column for column in optional if column in dataset.column_names)]
        # The arrow format returns images as they are stored; the default one would decode them.
        self._dataset = dataset.select_columns(chosen).with_format("arrow")
        self._name = name

    def __len__(self) -> int:
        return len(self._dataset)

    def row(self, index: int) -> dict[str, Any]:
        """As `ParquetRows.row`."""
        try:
            return self._dataset[index : index + 1].to_pylist()[0]
        except _READ_ERRORS as error:
            raise BadRowError(f"{self.where(index)}: the cached copy is damaged ({one_line(error)}).") from error

    def where(self, index: int) -> str:
        """Data set and row in words."""
        return f"{self._name}, row {index}"

    def folder(self, index: int) -> None:
        """There is none: image paths are refused."""


def local_files(path: Path, split: str) -> list[Path]:
    """`path` itself if it is a file; else `{split}.parquet` or the shards `{split}-*.parquet` in it or in its `data`."""
    if path.is_file():
        return [path]
    for folder in (path, path / "data"):
        single = folder / f"{split}.parquet"
        files = [single] if single.is_file() else sorted(folder.glob(f"{split}-*.parquet"))
        if files:
            return files
    found = sorted(file for folder in (path, path / "data") for file in folder.glob("*.parquet"))
    raise UserInputError(
        f"{path} has neither {split}.parquet nor {split}-*.parquet; it holds "
        f"{', '.join(file.name for file in found[:8]) or 'no parquet file'}."
        + (f" {split_hint(found[0], split)}" if found else "")
    )


def split_hint(source: object, split: str) -> str:
    """The advice where `source` has rows, but none of `split`."""
    divided = f"\"env.data={{train: '{source}@[100:]', test: '{source}@[:100]'}}\""
    instead = ", or evaluate on training rows with evaluation.split=train" if split == "test" else ""
    return f"Name a source for each split, which may be rows of one file: {divided}{instead}."


def hub_rows(name: str, split: str, columns: Sequence[str] = COLUMNS, optional: Sequence[str] = ()) -> HubRows:
    """The rows of a data set of the hub: from the cache when there is no network, downloaded otherwise."""
    import datasets  # slow to import, and not needed for local files

    try:
        dataset = datasets.load_dataset(name, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserInputError(
            f"Cannot open data set {name!r}, split {split!r} ({one_line(error)}). There is no such local path; for a data "
            f"set of the hub, fetch it once with `rl-vlm fetch` while online."
        ) from error
    return HubRows(dataset, name, columns, optional)


def check_columns(found: Sequence[str], where: object, columns: Sequence[str] = COLUMNS) -> None:
    """Raise UserInputError if a column is missing, or there twice."""
    missing = [column for column in columns if column not in set(found)]
    if missing:
        raise UserInputError(
            f"{where} lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}; it has {', '.join(found)}. "
            f"Needed: {', '.join(columns)}."
        )
    refuse_repeated(found, where, columns)


def refuse_repeated(found: Sequence[str], where: object, columns: Iterable[str]) -> None:
    """Raise UserInputError if one of the columns is there more than once: which one counts would be chance."""
    for column in columns:
        if found.count(column) > 1:
            raise UserInputError(f"{where} has the column {column} more than once: keep one of them.")


def _open(file: Path, columns: Sequence[str]) -> pq.ParquetFile:
    try:
        reader = pq.ParquetFile(file, page_checksum_verification=True)
    except _READ_ERRORS as error:
        raise UserInputError(f"{file} is not a readable parquet file ({one_line(error)}).") from error
    check_columns(reader.schema_arrow.names, file, columns)
    return reader
