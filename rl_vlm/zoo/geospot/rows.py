"""Street views in the layout of OpenStreetView-5M: image, latitude, longitude, country, region, city.

From parquet files, a data set of the hub, or a folder with `train.csv` and `test.csv`, whose column `image` holds paths
in that folder. Rows are read when they are asked for.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv

from rl_vlm.envs.images import check_header, one_line
from rl_vlm.envs.rows import BadRowError, Rows, check_columns
from rl_vlm.envs.tables import (
    DataSource,
    RowTable,
    TableSet,
    file_versions,
    open_rows,
    select,
    source_files,
    split_slice,
    split_source,
)
from rl_vlm.types import EncodedImage, Split, UserInputError
from rl_vlm.zoo.geospot.places import Position

COLUMNS = ("image", "latitude", "longitude", "country")
OPTIONAL = ("region", "city")
MAX_SKIPPED_IN_A_ROW = 100
_LISTED = 20  # unreadable rows that are named in the log

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StreetView:
    """A picture and where it was taken; region and city are None where the row has none."""

    image: EncodedImage
    position: Position
    country: str
    region: str | None
    city: str | None
    where: str  # file and row


class CsvRows:
    """Rows of a CSV file, without the images, kept in memory. As `ParquetRows`."""

    def __init__(self, file: Path) -> None:
        texts = {name: pa.string() for name in (*COLUMNS, *OPTIONAL)}
        try:
            table = pa.csv.read_csv(file, convert_options=pa.csv.ConvertOptions(column_types=texts))
        except (pa.ArrowException, OSError, ValueError) as error:
            raise UserInputError(f"{file} is not a readable CSV file ({one_line(error)}).") from error
        chosen = [*COLUMNS, *(name for name in OPTIONAL if name in table.column_names)]
        check_columns(table.column_names, file, chosen)
        self._file = file
        self._table = table.select(chosen)

    def __len__(self) -> int:
        return self._table.num_rows

    def row(self, index: int) -> dict[str, Any]:
        """Row `index` as a dict of the columns."""
        return self._table.slice(index, 1).to_pylist()[0]  # type: ignore[no-any-return]

    def where(self, index: int) -> str:
        """File and row in words."""
        return f"{self._file}, row {index}"

    def folder(self, index: int) -> Path:
        """The folder that image paths are relative to."""
        return self._file.parent


class StreetViewTable(RowTable[StreetView]):
    """A sequence of street views. Rows that cannot be read are skipped: the next one that can be stands in for them."""

    COLUMNS, OPTIONAL = COLUMNS, OPTIONAL

    def __init__(self, rows: Rows, selected: range, name: str) -> None:
        super().__init__(rows, selected, name)
        self.skipped: dict[int, str] = {}  # row -> what is wrong with it

    def __getitem__(self, index: int) -> StreetView:
        """View `index`, or the next one that can be read. Raises BadRowError after many that cannot."""
        if not 0 <= index < len(self):
            raise UserInputError(f"{self.name} has no view {index}: it has {len(self)}.")
        for step in range(min(MAX_SKIPPED_IN_A_ROW, len(self))):
            place = (index + step) % len(self)
            row = self.selected[place]
            if row in self.skipped:
                continue
            try:
                return super().__getitem__(place)
            except BadRowError as error:
                self._skip(row, str(error))
        raise BadRowError(f"{self.name}: {step + 1} rows in a row cannot be read. {self.skipped[row]}")

    def validate(self, limit: int | None = None) -> int:
        """Read `limit` rows spread over the table, or all, without decoding pixels; return how many can be read."""
        count = len(self) if limit is None else min(limit, len(self))
        good = 0
        for number in range(count):
            row = self.selected[number * len(self) // count]
            try:
                self._each(row, self._read(row)[1], check_header)
                good += 1
            except BadRowError as error:
                self._skip(row, str(error))
        if not good:
            raise BadRowError(f"{self.name}: none of {count} rows can be read. {next(iter(self.skipped.values()))}")
        return good

    def _read(self, row: int) -> tuple[tuple[Position, str, str | None, str | None], list[Any]]:
        """(position, country, region, city) and the undecoded image of a row."""
        values = self._rows.row(row)
        where = self._rows.where(row)
        try:
            latitude, longitude = float(values["latitude"]), float(values["longitude"])
        except (TypeError, ValueError):
            latitude = longitude = math.nan
        if not (abs(latitude) <= 90 and abs(longitude) <= 180):  # NaN fails as well
            raise BadRowError(f"{where}: latitude and longitude are no position.")
        country, region, city = (_text(values.get(name)) for name in ("country", "region", "city"))
        if country is None:
            raise BadRowError(f"{where}: the country is empty or not text.")
        return ((latitude, longitude), country, region, city), [values["image"]]

    def _make(
        self, fields: tuple[Position, str, str | None, str | None], images: tuple[EncodedImage, ...], where: str
    ) -> StreetView:
        return StreetView(images[0], *fields, where)

    def _skip(self, row: int, reason: str) -> None:
        self.skipped[row] = reason
        if len(self.skipped) <= _LISTED:
            more = " Further ones are counted, not named." if len(self.skipped) == _LISTED else ""
            logger.warning("skipped a row of %s: %s%s", self.name, reason, more)


class StreetViews(TableSet[StreetViewTable]):
    """The splits of a set of street views, which may be CSV files too."""

    def __init__(self, data: DataSource) -> None:
        super().__init__(StreetViewTable, data)

    def _open(self, split: Split) -> StreetViewTable:
        source = split_source(self._data, split)
        csv = _csv_file(source, split)
        files = (csv,) if csv else tuple(source_files(source, split))
        return _open(source, split, csv, files, file_versions(files))


@lru_cache(maxsize=8)
def _open(
    source: str, split: str, csv: Path | None, files: Sequence[Path], versions: tuple[tuple[str, int, int], ...]
) -> StreetViewTable:
    """The table of a split, which the environments of a process share until a file of it changes."""
    rows: Rows
    if csv is None:
        rows, chosen = open_rows(source, split, files, COLUMNS, OPTIONAL)
    else:
        rows = CsvRows(csv)
        chosen = select(range(len(rows)), split_slice(source)[1], source, split)
    return StreetViewTable(rows, chosen, f"{source} ({split})")


def _csv_file(source: str, split: str) -> Path | None:
    """The CSV file of a split, if the source is one or is a folder with one."""
    path = Path(split_slice(source)[0]).expanduser()
    file = path / f"{split}.csv" if path.is_dir() else path
    return file if file.suffix == ".csv" and file.is_file() else None


def _text(value: Any) -> str | None:
    return value.strip() or None if isinstance(value, str) else None
