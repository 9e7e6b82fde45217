"""Downloads models and data sets from the Hugging Face hub, so that runs work offline."""

from __future__ import annotations

import os
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
import pyarrow.parquet as pq

from rl_vlm.files import cache_folder
from rl_vlm.models.hub import FetchError, fetch_model, hub_errors
from rl_vlm.models.loading import builtin_models
from rl_vlm.types import UserInputError

if TYPE_CHECKING:
    from datasets import IterableDataset


def fetch(name: str, data: bool = False, max_rows: int | None = None) -> Path:
    """Download a model, or a data set with `data`, into the hub's cache; return its folder there.

    What is there already is not downloaded again. `tiny` builds the built-in model. With `data` a short name of `KNOWN`
    gives a folder for `env.data`, with at most `max_rows` of each split. Raises UserInputError for a name that is wrong
    or locked, FetchError when the hub cannot be reached.
    """
    if name in builtin_models() and not data:
        return builtin_models()[name].folder()
    if data and name in KNOWN:
        with hub_errors(KNOWN[name].repo, data=True):
            return fetch_known(name, max_rows)
    if data and "/" not in name:
        raise UserInputError(
            f"There is no data set {name!r}: give one of {', '.join(KNOWN)}, or owner/name of the hub such as "
            "hiyouga/geometry3k."
        )
    if max_rows is not None:
        raise UserInputError("--max-rows is for the data sets with short names, which `rl-vlm fetch --help` lists.")
    if name.count("/") != 1 or name.startswith((".", "/")):
        raise UserInputError(f"{name!r} is not a name of the hub: give owner/name, such as Qwen/Qwen3-VL-2B-Instruct.")
    if not data:
        return fetch_model(name)
    from huggingface_hub import snapshot_download

    with hub_errors(name, data=True):
        folder = snapshot_download(name, repo_type="dataset")
    _prepare(name)
    return Path(folder)


def _prepare(name: str) -> None:
    """Convert the data set once: offline, `datasets` finds a data set by its name only if it was converted before."""
    import datasets

    try:
        datasets.load_dataset(name)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FetchError(f"The data set {name} was fetched and cannot be opened ({reason}).") from error


# The data sets of the environments by short name: `rl-vlm fetch --data geo3k` writes train.parquet and test.parquet
# for `env.data`.
#
# Rows are streamed from the hub, so only those that are asked for are read. A file appears complete or not at all, and
# what is there is not fetched again.

MAX_ROWS = 2000  # of each split, unless told otherwise
_PATIENCE_S = 20.0  # for the hub's first answer
_BATCH = 64  # rows of a row group
_MAX_IMAGE_BYTES = 20 * 2**20
# The columns of a street view beside its image.
_LOCATION = {"latitude": pa.float64(), "longitude": pa.float64()} | dict.fromkeys(
    ("country", "region", "city"), pa.string()
)
_STREET_VIEW = pa.schema({"image": pa.struct({"bytes": pa.binary(), "path": pa.string()}), **_LOCATION})


@dataclass(frozen=True, slots=True)
class KnownData:
    """A data set of the hub and the environment that reads it.

    columns: the environment's column -> its names on the hub, the first that is there counts. shards: split -> how the
    names of its parquet files begin. last_is_test: there is one split, whose last file is the test split.
    """

    env: str
    repo: str
    about: str
    columns: Mapping[str, tuple[str, ...]]
    shards: Mapping[str, str]
    last_is_test: bool = False


KNOWN: dict[str, KnownData] = {
    "geo3k": KnownData(
        "Geo3k-v0",
        "hiyouga/geometry3k",
        "geometry problems with figures",
        {"images": ("images", "image"), "problem": ("problem", "question"), "answer": ("answer",)},
        {"train": "data/train-", "test": "data/test-"},
    ),
    "osv5m": KnownData(
        "GeoSpot-v0",
        "osv5m/osv5m",
        "street views with their places; its tables are read through, 3 GB for train, and only the pictures kept",
        {name: (name,) for name in _LOCATION},
        {"train": "images/train/", "test": "images/test/"},
    ),
    "nlvr2": KnownData(
        "NLVR2-v0",
        "lmms-lab/NLVR2",
        "sentences about two photographs; train is the unbalanced dev split, test the balanced public test split",
        {
            "sentence": ("sentence", "question", "query"),
            "left_image": ("left_image", "image_0", "image0"),
            "right_image": ("right_image", "image_1", "image1"),
            "label": ("label", "answer"),
        },
        {"train": "data/unbalanced_dev-", "test": "data/balanced_test_public-"},
    ),
    "flickr30k": KnownData(
        "Caption-v0",
        "lmms-lab/flickr30k",
        "photographs with five captions each; the last file is the test split",
        {"image": ("image",), "caption": ("caption", "captions")},
        {"train": "data/test-", "test": "data/test-"},
        last_is_test=True,
    ),
}


def fetch_known(name: str, max_rows: int | None = None) -> Path:
    """The folder with train.parquet and test.parquet of a data set of KNOWN, `max_rows` (MAX_ROWS) of each at most.

    Raises UserInputError where the data set has other files or columns, and what the hub's client raises.
    """
    rows = MAX_ROWS if max_rows is None else max_rows
    if rows < 1:
        raise UserInputError(f"--max-rows must be at least 1, not {rows}.")
    known = KNOWN[name]
    folder = cache_folder() / "data" / f"{name}-{rows}"
    folder.mkdir(parents=True, exist_ok=True)
    missing = [split for split in ("train", "test") if not _is_complete(folder / f"{split}.parquet")]
    if missing:
        from huggingface_hub import HfApi

        HfApi().dataset_info(known.repo, timeout=_PATIENCE_S)  # one question, without the client's many attempts
    for split in missing:
        with tempfile.TemporaryDirectory(prefix=".", dir=folder) as scratch:
            draft = f"{scratch}/{split}.parquet"
            if name == "osv5m":
                _write_street_views(known, split, rows, draft)
            else:
                _stream(known, split).take(rows).to_parquet(draft, batch_size=_BATCH, write_page_checksum=True)
            os.replace(draft, folder / f"{split}.parquet")
    return folder


def _is_complete(target: Path) -> bool:
    """Whether a file is there and can be read: a crash of the machine may cut it short."""
    try:
        return target.is_file() and pq.read_metadata(target).num_rows > 0
    except (pa.ArrowException, OSError):
        return False


def _files(known: KnownData, split: str, ending: str) -> list[str]:
    """The names of a split's files on the hub, in order. Raises UserInputError without any."""
    from huggingface_hub import HfApi

    prefix = known.shards[split]
    entries = HfApi().list_repo_tree(known.repo, prefix.rpartition("/")[0], repo_type="dataset")
    files = sorted(entry.path for entry in entries if entry.path.startswith(prefix) and entry.path.endswith(ending))
    if known.last_is_test:
        files = files[-1:] if split == "test" else files[:-1]
    if not files:
        raise UserInputError(
            f"{known.repo} has no files {prefix}*{ending}: it may have changed since this was written."
        )
    return files


def _stream(known: KnownData, split: str) -> IterableDataset:
    """The rows of a split under the environment's names of columns, images still encoded. Raises UserInputError."""
    import datasets

    # Parquet files named by address: the repository's own configuration, which may hold code, is not read.
    addresses = [f"hf://datasets/{known.repo}/{file}" for file in _files(known, split, ".parquet")]
    stream = datasets.load_dataset("parquet", data_files=addresses, split="train", streaming=True)
    features = stream.features or stream._resolve_features().features
    chosen = _columns(known, list(features))
    stream = stream.select_columns(list(chosen.values())).decode(False)
    return stream.rename_columns({theirs: ours for ours, theirs in chosen.items() if theirs != ours})


def _columns(known: KnownData, found: Sequence[str]) -> dict[str, str]:
    """The environment's column -> the data set's. Raises UserInputError if one is missing."""
    chosen = {name: next((other for other in others if other in found), "") for name, others in known.columns.items()}
    if missing := [name for name, other in chosen.items() if not other]:
        raise UserInputError(
            f"{known.repo} has the columns {', '.join(found)} and none for {', '.join(missing)}: fetch it by its hub "
            "name and rename them."
        )
    return chosen


def _write_street_views(known: KnownData, split: str, rows: int, draft: str) -> None:
    """OpenStreetView-5M: rows out of its table, and their pictures out of its archives, both read in place.

    The table names more pictures than the archives that are read hold, so rows count once their picture is there.
    """
    from huggingface_hub import HfFileSystem

    hub, missing = HfFileSystem(), rows
    with pq.ParquetWriter(draft, _STREET_VIEW, write_page_checksum=True) as writer:
        for file in _files(known, split, ".zip"):
            with hub.open(f"datasets/{known.repo}/{file}", "rb") as remote, zipfile.ZipFile(remote) as archive:
                pictures = {
                    Path(member.filename).stem: member
                    for member in archive.infolist()
                    if member.filename.endswith(".jpg") and member.file_size <= _MAX_IMAGE_BYTES
                }
                with hub.open(f"datasets/{known.repo}/{split}.csv", "rb") as table:
                    locations = _locations(table, known, set(islice(pictures, missing)))
                located = [(identity, member) for identity, member in pictures.items() if identity in locations]
                missing -= len(located)
                for start in range(0, len(located), _BATCH):
                    views = [
                        {"image": {"bytes": archive.read(member), "path": f"{identity}.jpg"}, **locations[identity]}
                        for identity, member in located[start : start + _BATCH]
                    ]
                    writer.write_table(pa.Table.from_pylist(views, schema=_STREET_VIEW))
            if not missing:
                return


def _locations(table: Any, known: KnownData, wanted: set[str]) -> dict[str, dict[str, Any]]:
    """The rows of these ids, from a table that is read from its start until all are found."""
    kinds = {"id": pa.string(), **_LOCATION}
    convert = pa.csv.ConvertOptions(column_types=kinds, include_columns=list(kinds))
    rows: dict[str, dict[str, Any]] = {}
    try:
        for batch in pa.csv.open_csv(table, convert_options=convert):
            for row in batch.filter(pa.compute.is_in(batch.column("id"), pa.array(wanted))).to_pylist():
                rows[row.pop("id")] = row
            if len(rows) == len(wanted):
                break
    except (pa.ArrowInvalid, KeyError) as error:
        raise UserInputError(f"{known.repo}: its table cannot be read ({str(error).splitlines()[0]}).") from error
    return rows
