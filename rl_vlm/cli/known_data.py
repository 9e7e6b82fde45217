"""The data sets of the environments by short name: `rl-vlm fetch --data geo3k` writes train.parquet and test.parquet for `env.data`.

Only so much is read from the hub as the rows that are asked for need. A file appears complete or not at all, and what is there is
not fetched again.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from rl_vlm.files import cache_folder
from rl_vlm.types import UserInputError

MAX_ROWS = 2000  # of each split, unless told otherwise
_SPARE_BYTES = 2**30  # stay free on the disk
_PATIENCE_S = 20.0  # for the hub's first answer
_BATCH = 64  # rows of a row group
_MAX_IMAGE_BYTES = 20 * 2**20
_SOURCE = b"rl_vlm.source"  # key of a file's metadata: what it was made from


@dataclass(frozen=True, slots=True)
class KnownData:
    """A data set of the hub and the environment that reads it.

    columns: the environment's column -> its names on the hub, the first that is there counts. shards: split -> how the names of
    its parquet files begin. last_is_test: there is one split, whose last file is the test split.
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
        {name: (name,) for name in ("latitude", "longitude", "country", "region", "city")},
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
    """The folder with train.parquet and test.parquet of a data set of KNOWN, at most `max_rows` of each split (MAX_ROWS).

    Raises UserInputError where there is no room or the data set has other columns, and what the hub's client raises.
    """
    rows = MAX_ROWS if max_rows is None else max_rows
    if rows < 1:
        raise UserInputError(f"--max-rows must be at least 1, not {rows}.")
    known = KNOWN[name]
    folder = cache_folder() / "data" / f"{name}-{rows}"
    folder.mkdir(parents=True, exist_ok=True)
    missing = [split for split in ("train", "test") if not _is_complete(folder / f"{split}.parquet", known)]
    if missing:
        from huggingface_hub import HfApi

        HfApi().dataset_info(known.repo, timeout=_PATIENCE_S)  # one question, without the client's many attempts
    for split in missing:
        tables = _street_views(known, split, rows) if name == "osv5m" else _shard_rows(known, split, rows, folder)
        _write(tables, folder / f"{split}.parquet", known)
    return folder


def _is_complete(target: Path, known: KnownData) -> bool:
    """Whether a file is there, was made from this source, and can be read: a crash of the machine may cut it short."""
    try:
        return target.is_file() and (pq.read_schema(target).metadata or {}).get(_SOURCE) == _source(known)
    except (pa.ArrowException, OSError):
        return False


def _source(known: KnownData) -> bytes:
    return json.dumps([known.repo, dict(known.columns), dict(known.shards)], sort_keys=True).encode()


def _write(tables: Iterator[pa.Table], target: Path, known: KnownData) -> None:
    """Write the tables as row groups of one file. Raises UserInputError where there are none."""
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(handle)
    draft, writer = Path(name), None
    try:
        for table in tables:
            if writer is None:
                metadata = {**(table.schema.metadata or {}), _SOURCE: _source(known)}
                writer = pq.ParquetWriter(draft, table.schema.with_metadata(metadata), write_page_checksum=True)
            writer.write_table(table.replace_schema_metadata(writer.schema.metadata))
        if writer is None:
            raise UserInputError(
                f"{known.repo} has no rows for {target.stem}: it may have changed since this was written."
            )
        writer.close()
        draft.chmod(0o644)
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)


def _shard_rows(known: KnownData, split: str, rows: int, folder: Path) -> Iterator[pa.Table]:
    """The first rows of a split from its parquet files, which are downloaded one after the other, and only while rows are missing."""
    from huggingface_hub import hf_hub_download

    missing = rows
    for file, size in _files(known, split, ".parquet"):
        _check_room(size, folder, known)
        reader = pq.ParquetFile(hf_hub_download(known.repo, file, repo_type="dataset"))
        chosen = _columns(known, reader.schema_arrow.names)
        for batch in reader.iter_batches(min(_BATCH, missing), columns=list(chosen.values())):
            table = pa.Table.from_batches([batch]).slice(0, missing).select(list(chosen.values()))
            missing -= table.num_rows
            yield table.rename_columns(list(chosen))
            if not missing:
                return


def _files(known: KnownData, split: str, ending: str) -> list[tuple[str, int]]:
    """(name, bytes) of a split's files on the hub, in order. Raises UserInputError without any."""
    from huggingface_hub import HfApi

    prefix = known.shards[split]
    entries = HfApi().list_repo_tree(known.repo, prefix.rpartition("/")[0], repo_type="dataset")
    found = sorted(
        (entry.path, int(getattr(entry, "size", 0)))
        for entry in entries
        if entry.path.startswith(prefix) and entry.path.endswith(ending)
    )
    if known.last_is_test:
        found = found[-1:] if split == "test" else found[:-1]
    if not found:
        raise UserInputError(
            f"{known.repo} has no files {prefix}*{ending}: it may have changed since this was written."
        )
    return found


def _columns(known: KnownData, found: Sequence[str]) -> dict[str, str]:
    """The environment's column -> the data set's. Raises UserInputError if one is missing."""
    chosen = {name: next((other for other in others if other in found), "") for name, others in known.columns.items()}
    if missing := [name for name, other in chosen.items() if not other]:
        raise UserInputError(
            f"{known.repo} has the columns {', '.join(found)} and none for {', '.join(missing)}: fetch it by its hub name and rename them."
        )
    return chosen


def _check_room(size: int, folder: Path, known: KnownData) -> None:
    from huggingface_hub.constants import HF_HUB_CACHE

    cache = Path(HF_HUB_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    free = min(shutil.disk_usage(place).free for place in (cache, folder))
    if free < 2 * size + _SPARE_BYTES:  # the file itself, and its rows in ours
        raise UserInputError(
            f"{known.repo}: the next file has {size / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free: free some, lower --max-rows, or set "
            "HF_HOME and RL_VLM_CACHE to another disk."
        )


def _street_views(known: KnownData, split: str, rows: int) -> Iterator[pa.Table]:
    """OpenStreetView-5M: pictures out of its archives, which are read in place, and their rows out of its tables."""
    from huggingface_hub import HfFileSystem

    hub, missing = HfFileSystem(), rows
    for file, _ in _files(known, split, ".zip"):
        with hub.open(f"datasets/{known.repo}/{file}", "rb") as remote, zipfile.ZipFile(remote) as archive:
            members = [
                one for one in archive.infolist() if one.filename.endswith(".jpg") and one.file_size <= _MAX_IMAGE_BYTES
            ]
            wanted = {Path(one.filename).stem: one for one in islice(members, missing)}
            with hub.open(f"datasets/{known.repo}/{split}.csv", "rb") as table:
                places = _places(table, known, set(wanted))
            missing -= len(wanted)
            named = [(identity, member) for identity, member in wanted.items() if identity in places]
            for start in range(0, len(named), _BATCH):
                yield pa.Table.from_pylist(
                    [
                        {"image": {"bytes": archive.read(member), "path": f"{identity}.jpg"}, **places[identity]}
                        for identity, member in named[start : start + _BATCH]
                    ],
                    schema=_STREET_VIEW,
                )
        if not missing:
            return


_STREET_VIEW = pa.schema(
    [
        ("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
        ("latitude", pa.float64()),
        ("longitude", pa.float64()),
        *((name, pa.string()) for name in ("country", "region", "city")),
    ]
)


def _places(table: Any, known: KnownData, wanted: set[str]) -> dict[str, dict[str, Any]]:
    """The rows of these ids, from a table that is read from its start until all are found."""
    kinds = {field.name: field.type for field in _STREET_VIEW if field.name != "image"}
    convert = pa.csv.ConvertOptions(column_types={"id": pa.string(), **kinds}, include_columns=["id", *known.columns])
    found: dict[str, dict[str, Any]] = {}
    try:
        for batch in pa.csv.open_csv(table, convert_options=convert):
            ids = batch.column("id").to_pylist()
            for place in [number for number, identity in enumerate(ids) if identity in wanted]:
                (row,) = batch.slice(place, 1).to_pylist()
                found[row.pop("id")] = row
            if len(found) == len(wanted):
                break
    except (pa.ArrowInvalid, KeyError) as error:
        raise UserInputError(f"{known.repo}: its table cannot be read ({str(error).splitlines()[0]}).") from error
    return found
