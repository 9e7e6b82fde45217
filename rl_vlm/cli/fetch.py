"""Downloads models and data sets from the Hugging Face hub, so that runs work offline."""

from __future__ import annotations

import os
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
from huggingface_hub import HfApi, HfFileSystem, snapshot_download

from rl_vlm.files import cache_folder
from rl_vlm.models.hub import FetchError, fetch_model, hub_errors
from rl_vlm.registry import builtin_models
from rl_vlm.safe_text import one_line
from rl_vlm.types import UserInputError


def fetch(name: str, data: bool = False, max_rows: int | None = None) -> Path:
    """Download a model, or with `data` a data set, and return its folder; what is there is not fetched again. Raises
    UserInputError, FetchError."""
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
    with hub_errors(name, data=True):
        folder = snapshot_download(name, repo_type="dataset")
    try:
        datasets.load_dataset(name)  # offline, a data set is found by its name only if it was converted before
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise FetchError(f"The data set {name} was fetched and cannot be opened ({one_line(error)}).") from error
    return Path(folder)


# The data sets of the environments by short name, each a folder of train.parquet and test.parquet for `env.data`. Rows
# are streamed from the hub, so only the wanted ones are read.

MAX_ROWS = 2000  # of each split, by default
_PATIENCE_S = 20.0  # for the hub's first answer
_BATCH = 64  # rows of a row group
_MAX_IMAGE_BYTES = 20 * 2**20
# The columns of a street view beside its image.
_LOCATION = {"latitude": "float64", "longitude": "float64", "country": "string", "region": "string", "city": "string"}


class KnownData(NamedTuple):
    """A data set of the hub. columns: ours -> possible names there. shards: split -> prefix."""

    repo: str
    columns: Mapping[str, tuple[str, ...]]
    shards: Mapping[str, str]
    last_is_test: bool = False


KNOWN: dict[str, KnownData] = {
    "geo3k": KnownData(
        "hiyouga/geometry3k",
        {"images": ("images", "image"), "problem": ("problem", "question"), "answer": ("answer",)},
        {"train": "data/train-", "test": "data/test-"},
    ),
    # Its tables are read through, 3 GB for train, and only the pictures are kept.
    "osv5m": KnownData("osv5m/osv5m", {}, {"train": "images/train/", "test": "images/test/"}),
    "nlvr2": KnownData(
        "lmms-lab/NLVR2",
        {
            "sentence": ("sentence", "question", "query"),
            "left_image": ("left_image", "image_0", "image0"),
            "right_image": ("right_image", "image_1", "image1"),
            "label": ("label", "answer"),
        },
        {"train": "data/unbalanced_dev-", "test": "data/balanced_test_public-"},
    ),
    "flickr30k": KnownData(
        "lmms-lab/flickr30k",
        {"image": ("image",), "caption": ("caption", "captions")},
        {"train": "data/test-", "test": "data/test-"},
        last_is_test=True,
    ),
}


def fetch_known(name: str, max_rows: int | None = None) -> Path:
    """Fetch the splits that are missing; returns the folder for `env.data`. Raises what `hub_errors` knows."""
    known, rows = KNOWN[name], max_rows or MAX_ROWS
    folder = cache_folder() / "data" / f"{name}-{rows}"
    folder.mkdir(parents=True, exist_ok=True)
    missing = [split for split in ("train", "test") if not (folder / f"{split}.parquet").is_file()]
    if missing:
        HfApi().dataset_info(known.repo, timeout=_PATIENCE_S)  # one question, without the client's many attempts
    for split in missing:
        stream = _street_views(known, split, rows) if name == "osv5m" else _stream(known, split)
        with tempfile.TemporaryDirectory(prefix=".", dir=folder) as scratch:
            draft = f"{scratch}/{split}.parquet"
            stream.take(rows).to_parquet(draft, batch_size=_BATCH, write_page_checksum=True)
            os.replace(draft, folder / f"{split}.parquet")
    return folder


def _files(known: KnownData, split: str, ending: str) -> list[str]:
    prefix = known.shards[split]
    entries = HfApi().list_repo_tree(known.repo, prefix.rpartition("/")[0], repo_type="dataset")
    files = sorted(entry.path for entry in entries if entry.path.startswith(prefix) and entry.path.endswith(ending))
    if known.last_is_test:
        files = files[-1:] if split == "test" else files[:-1]
    if not files:
        raise UserInputError(
            f"{known.repo} has no files {prefix}*{ending}: it may have changed since this was written."
        )
    return [f"hf://datasets/{known.repo}/{file}" for file in files]


def _stream(known: KnownData, split: str) -> datasets.IterableDataset:
    """The rows of a split with our names of columns, images still encoded. Raises UserInputError."""
    # Parquet files named by address: the repository's own configuration, which may hold code, is not read.
    files = _files(known, split, ".parquet")
    stream = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    found = list(stream.features or stream._resolve_features().features)
    chosen = {name: next((other for other in others if other in found), "") for name, others in known.columns.items()}
    if missing := [name for name, other in chosen.items() if not other]:
        raise UserInputError(
            f"{known.repo} has the columns {', '.join(found)} and none for {', '.join(missing)}: fetch it by its hub "
            "name and rename them."
        )
    stream = stream.select_columns(list(chosen.values())).decode(False)
    return stream.rename_columns({theirs: ours for ours, theirs in chosen.items() if theirs != ours})


def _street_views(known: KnownData, split: str, rows: int) -> datasets.IterableDataset:
    columns = {name: datasets.Value(kind) for name, kind in _LOCATION.items()}
    features = datasets.Features({"image": datasets.Image(decode=False), **columns})
    table = f"hf://datasets/{known.repo}/{split}.csv"
    arguments = {"archives": _files(known, split, ".zip"), "table": table, "rows": rows}
    return datasets.IterableDataset.from_generator(_read_street_views, features, gen_kwargs=arguments)


def _read_street_views(archives: Sequence[str], table: str, rows: int) -> Iterator[dict[str, Any]]:
    hub = HfFileSystem()
    for address in archives:
        with hub.open(address, "rb") as remote, zipfile.ZipFile(remote) as archive:
            pictures = {
                Path(member.filename).stem: member
                for member in archive.infolist()
                if member.filename.endswith(".jpg") and member.file_size <= _MAX_IMAGE_BYTES
            }
            with hub.open(table, "rb") as lines:
                locations = _locations(lines, set(islice(pictures, rows)))
            for identity in islice(pictures, rows):
                if identity in locations:
                    image = {"bytes": archive.read(pictures[identity]), "path": f"{identity}.jpg"}
                    yield {"image": image, **locations[identity]}


def _locations(table: Any, wanted: set[str]) -> dict[str, dict[str, Any]]:
    kinds = {name: pa.type_for_alias(kind) for name, kind in {"id": "string", **_LOCATION}.items()}
    convert = pa.csv.ConvertOptions(column_types=kinds, include_columns=list(kinds))
    rows: dict[str, dict[str, Any]] = {}
    for batch in pa.csv.open_csv(table, convert_options=convert):
        for row in batch.filter(pa.compute.is_in(batch.column("id"), pa.array(wanted))).to_pylist():
            rows[row.pop("id")] = row
        if len(rows) == len(wanted):
            break
    return rows
