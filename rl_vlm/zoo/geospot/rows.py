"""Street views in the layout of OpenStreetView-5M: image, latitude, longitude, country, region, city.

From parquet files, a data set of the hub, or a folder with `train.csv` and `test.csv`, whose column `image` holds paths
in that folder.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

from rl_vlm.envs.data import BadRowError, Rows, RowTable
from rl_vlm.envs.images import check_header
from rl_vlm.types import EncodedImage, UserInputError
from rl_vlm.zoo.geospot.places import Position

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


class StreetViewTable(RowTable[StreetView]):
    """A sequence of street views. Rows that cannot be read are skipped: the next one that can be stands in for them."""

    COLUMNS = ("image", "latitude", "longitude", "country")
    OPTIONAL = ("region", "city")
    KINDS = ("csv", "parquet")

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
        rows, good = self.spread(limit), 0
        for row in rows:
            try:
                self._each(row, check_header)
                good += 1
            except BadRowError as error:
                self._skip(row, str(error))
        if not good:
            raise BadRowError(f"{self.name}: none of {len(rows)} rows can be read. {next(iter(self.skipped.values()))}")
        return good

    def read(self, row: dict[str, Any]) -> tuple[tuple[Position, str, str | None, str | None], list[Any]]:
        """(position, country, region, city) and the undecoded image."""
        try:
            latitude, longitude = float(row["latitude"]), float(row["longitude"])
        except (TypeError, ValueError):
            latitude = longitude = math.nan
        if not (abs(latitude) <= 90 and abs(longitude) <= 180):  # NaN fails as well
            raise BadRowError("latitude and longitude are no position.")
        country, region, city = (_text(row.get(name)) for name in ("country", "region", "city"))
        if country is None:
            raise BadRowError("the country is empty or not text.")
        return ((latitude, longitude), country, region, city), [row["image"]]

    def make(
        self, fields: tuple[Position, str, str | None, str | None], images: tuple[EncodedImage, ...], where: str
    ) -> StreetView:
        """The street view."""
        return StreetView(images[0], *fields, where)

    def _skip(self, row: int, reason: str) -> None:
        self.skipped[row] = reason
        if len(self.skipped) <= _LISTED:
            more = " Further ones are counted, not named." if len(self.skipped) == _LISTED else ""
            logger.warning("skipped a row of %s: %s%s", self.name, reason, more)


def _text(value: Any) -> str | None:
    return value.strip() or None if isinstance(value, str) else None
