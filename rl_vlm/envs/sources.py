"""Where the rows of a data set come from: its files, its splits, and the slice `path@[a:b]` of it."""

from __future__ import annotations

import filecmp
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rl_vlm.envs.tables import COMPRESSED, DELIMITERS, SUFFIXES, image_classes, suffix_of
from rl_vlm.safe_text import one_line
from rl_vlm.types import Split, UserInputError

_SLICE = re.compile(r"(?P<path>.*)@\[(?P<range>[^\[\]]*)\]")
_ENDS = re.compile(r"\s*(-?\d{1,12})?\s*:\s*(-?\d{1,12})?\s*")
DataSource = str | Mapping[str, str]


def local_files(path: Path, split: str) -> list[Path]:
    """`path` itself if it is a file; else what `datasets` saved there, `{split}.parquet` or the shards
    `{split}-*.parquet` (or .arrow) in it or its `data`, or one file or folder of another kind."""
    if path.is_file():
        return [path]
    saved = path / split if (path / "dataset_dict.json").is_file() else path
    if (saved / "state.json").is_file():
        return _saved_files(saved / "state.json")
    for suffix, start in itertools.product((".parquet", ".arrow"), (split, f"data/{split}")):
        if files := [*path.glob(f"{start}{suffix}"), *sorted(path.glob(f"{start}-*{suffix}"))]:
            return files
    if (other := _other_file(path, split)) is not None:
        return [other]
    places = (path, path / "data")
    found = sorted(
        file for place in places for file in place.glob("[!.]*.*") if suffix_of(file) in (*SUFFIXES, ".parquet")
    )
    raise UserInputError(
        f"{path} has neither {split}.parquet nor {split}-*.parquet, {split}.jsonl, {split}.json, {split}.csv, "
        f"{split}.tsv or a folder {split} of images; it holds "
        f"{', '.join(file.name for file in found[:8]) or 'no file of rows'}."
        + (f" {split_hint(found[0], split)}" if found else "")
    )


def _saved_files(state: Path) -> list[Path]:
    """The files beside the state of a data set that `datasets.save_to_disk` wrote."""
    try:
        names = [Path(one["filename"]).name for one in json.loads(state.read_text())["_data_files"]]
        return [(state.parent / name).resolve(strict=True) for name in names]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserInputError(f"{state} names no files of a saved data set here ({one_line(error)}).") from error


def _other_file(folder: Path, split: str) -> Path | None:
    """`{split}.jsonl` or of another kind, the metadata of an image folder, or a folder of images by class.

    What lies in `folder` itself, and not in a subfolder named by the split, is its train split.
    """
    own, beside = folder / split, [folder] if split == "train" else []
    for suffix in (f"{kind}{packed}" for kind in (".jsonl", ".json", *DELIMITERS) for packed in ("", *COMPRESSED)):
        metadata = [place / f"metadata{suffix}" for place in (own, *beside) if suffix != ".json"]
        for file in (folder / f"{split}{suffix}", *metadata):
            if file.is_file():
                return file
    by_class = [own] if own.is_dir() else beside
    return next((one for one in by_class if len(set(image_classes(one)["label"])) > 1), None)


def split_slice(source: str) -> tuple[str, slice]:
    """The path and the rows of `path@[a:b]`; all rows without a slice."""
    if not isinstance(source, str) or not source:
        raise UserInputError(f"A data set is named by a path or a hub name, not by {source!r}.")
    match = _SLICE.fullmatch(source)
    if match is None:
        return source, slice(None)
    ends = _ENDS.fullmatch(match["range"])
    if ends is None:
        raise UserInputError(
            f"{source!r}: a slice is written @[a:b] with whole numbers, either of which may be absent."
        )
    return match["path"], slice(*(int(end) if end else None for end in ends.groups()))


def split_sources(data: DataSource) -> dict[str, str]:
    """The source of each split.

    A single file is one split: the one in its name, else train. To prevent evaluation on training rows by accident,
    the other split must be named: `{"train": "a.parquet", "test": "b.parquet"}`.
    """
    if isinstance(data, Mapping):
        return dict(data)
    path = Path(split_slice(data)[0]).expanduser()
    own = ("test",) if re.match(r"test(?![a-z])", path.stem) else ("train",)
    return dict.fromkeys(own if path.is_file() else ("train", "test"), data)


def split_hint(source: object, split: str) -> str:
    """The advice if `source` has rows, but none of `split`."""
    divided = f"\"env.data={{train: '{source}@[100:]', test: '{source}@[:100]'}}\""
    instead = ", or evaluate on training rows with evaluation.split=train" if split == "test" else ""
    return f"Name a source for each split, which may be rows of one file: {divided}{instead}."


def reject_shared_rows(
    sources: Mapping[str, str], selected: Callable[[Split], Sequence[int]], key: str = "env.data"
) -> None:
    """Raise UserInputError if train and test share rows: of one file, or of a file and its copy.

    `selected` gives a split's rows. The hub has files of its own for each split.
    """
    paths = {split: Path(split_slice(source)[0]).expanduser() for split, source in sources.items()}
    if len(paths) < 2:
        return
    pairs: list[tuple[Path, Path]] = []
    with suppress(UserInputError):  # raised again when the split is opened
        pairs = list(itertools.product(local_files(paths["train"], "train"), local_files(paths["test"], "test")))
    shared = next((pair for pair in pairs if pair[0].samefile(pair[1]) or filecmp.cmp(pair[0], pair[1], False)), None)
    if shared is None:
        return
    train, test = selected("train"), selected("test")
    if len(pairs) > 1 or max(train[0], test[0]) <= min(train[-1], test[-1]):
        raise UserInputError(
            f"{key}: {shared[0]} and {shared[1]} are the same, and train and test share rows of them, so that tests "
            "would be trained on: give each split rows of its own, such as FILE@[100:] and FILE@[:100]."
        )
