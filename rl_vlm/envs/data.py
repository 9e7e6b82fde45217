"""Question sets: rows of `problem`, `answer` and `images` from parquet files or the hub, read lazily and checked.

`open_dataset("data/geo3k", "train")` opens a folder, `"data/geo3k/train.parquet"` a file, `"owner/name"` a data set of
the hub (from its cache when offline), and `"data/geo3k@[0:100]"` the first hundred rows of any of them.
"""

from __future__ import annotations

import math
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rl_vlm.envs.images import MAX_PIXELS, ImageError, check_header, decode, image_bytes
from rl_vlm.envs.rows import COLUMNS, BadRowError, HubRows, ParquetRows, hub_rows, local_files, split_hint
from rl_vlm.types import EncodedImage, Part, Split, UserInputError

IMAGE_MARKER = "<image>"
SHOWN_FINDINGS = 3
CACHED_QUESTIONS = 64  # decoded questions kept per table: the copies of a group ask for the same one

T = TypeVar("T")

HUB_NAME = re.compile(r"(?!.*\.parquet$)[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_SLICE = re.compile(r"(?P<path>.*)@\[(?P<range>[^\[\]]*)\]")

# Tables by source and version of their files, so that the environments of one process share tables; a table is
# freed with its last environment.
_TABLES: weakref.WeakValueDictionary[tuple[Any, ...], ImageTable] = weakref.WeakValueDictionary()
_TABLES_LOCK = threading.Lock()

DataSource = str | Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Question:
    """One row: the problem with its `<image>` markers, the true answer, the images, and the file and row."""

    problem: str
    answer: str
    images: tuple[EncodedImage, ...]
    where: str

    def parts(self) -> tuple[Part, ...]:
        """Text and images in reading order: each marker replaced by its image; images first without markers."""
        if IMAGE_MARKER not in self.problem:
            return (*self.images, self.problem)
        texts = self.problem.split(IMAGE_MARKER)
        parts: list[Part] = [texts[0]]
        for image, text in zip(self.images, texts[1:], strict=True):
            parts += [image, text]
        return tuple(part for part in parts if part != "")


class ImageTable:
    """A sequence of `Question`s. A row is read, checked and decoded when it is asked for."""

    def __init__(self, rows: ParquetRows | HubRows, selected: range, name: str, max_pixels: int = MAX_PIXELS) -> None:
        self.name = name
        self._rows = rows
        self._selected = selected
        self._max_pixels = max_pixels
        self._recent: OrderedDict[int, Question] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._selected)

    def __getitem__(self, index: int) -> Question:
        """Question `index`; IndexError outside the table, BadRowError that names file and row if it is not usable."""
        row = self._selected[index]
        with self._lock:
            question = self._recent.get(row)
            if question is None:
                problem, answer, images = self._read(row)
                decoded = tuple(self._each(row, images, decode))
                question = Question(problem, answer, decoded, self._rows.where(row))
                self._recent[row] = question
                if len(self._recent) > CACHED_QUESTIONS:
                    self._recent.popitem(last=False)
            return question

    def validate(self, limit: int | None = None) -> int:
        """Check `limit` rows spread over the table, or all, without decoding pixels; return how many.

        Finds damaged files and row groups, rows without problem or answer, and images that are missing, not images
        or too large. Raises BadRowError with the first few findings. Damaged pixels show when the row is used.
        """
        total = len(self)
        count = total if limit is None else max(0, min(limit, total))
        findings: list[str] = []
        for number in range(count):
            row = self._selected[number * total // count]
            try:
                self._each(row, self._read(row)[2], check_header)
            except BadRowError as error:
                findings.append(str(error))
                if len(findings) == SHOWN_FINDINGS:
                    break
        if findings:
            raise BadRowError(f"{self.name} has rows that cannot be used. {' '.join(findings)}")
        return count

    def _read(self, row: int) -> tuple[str, str, list[Any]]:
        """Problem, answer and the undecoded images of a row."""
        values = self._rows.row(row)
        where = self._rows.where(row)
        problem, answer = _text(values["problem"]), _text(values["answer"])
        if not problem:
            raise BadRowError(f"{where}: the problem is empty or not text.")
        if not answer:
            raise BadRowError(f"{where}: the answer is empty or neither text nor a number.")
        images = values["images"]
        images = images if isinstance(images, list) else [] if images is None else [images]
        markers = problem.count(IMAGE_MARKER)
        if markers and markers != len(images):
            raise BadRowError(f"{where}: {markers} {IMAGE_MARKER} markers in the problem, {len(images)} images.")
        return problem, answer, images

    def _each(self, row: int, images: list[Any], use: Callable[[bytes, int], T]) -> list[T]:
        """`use(bytes, max_pixels)` of every image of a row."""
        results = []
        for number, image in enumerate(images):
            try:
                results.append(use(image_bytes(image, self._rows.folder(row)), self._max_pixels))
            except ImageError as error:
                raise BadRowError(f"{self._rows.where(row)}: image {number} {error}.") from error
        return results


def open_dataset(source: str, split: str, max_pixels: int = MAX_PIXELS) -> ImageTable:
    """Open a folder, a parquet file or a data set of the hub, with an optional slice `source@[a:b]`.

    Raises UserInputError if it does not exist, lacks a column, or if the slice is empty.
    """
    files = source_files(source, split)
    with _TABLES_LOCK:
        key = (source, split, max_pixels, file_versions(files))
        table = _TABLES.get(key)
        if table is None:
            rows, chosen = open_rows(source, split, files)
            table = _TABLES[key] = ImageTable(rows, chosen, f"{source} ({split})", max_pixels)
    return table


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
    source: str, split: str, files: Sequence[Path], columns: Sequence[str] = COLUMNS, optional: Sequence[str] = ()
) -> tuple[ParquetRows | HubRows, range]:
    """The rows of a source whose files are given (see `source_files`), and which of them its slice selects, at least one."""
    path_text, selected = split_slice(source)
    rows = ParquetRows(files, columns, optional) if files else hub_rows(path_text, split, columns, optional)
    return rows, select(range(len(rows)), selected, source, split)


def select(rows: range, selected: slice, source: str, split: str) -> range:
    """The rows of a slice. Raises UserInputError if there are none."""
    if not rows[selected]:
        raise UserInputError(f"{source} selects none of the {len(rows)} rows of its {split} split.")
    return rows[selected]


def open_split(data: DataSource, split: Split) -> ImageTable:
    """Open a split for an environment (see `split_source`)."""
    return open_dataset(split_source(data, split), split)


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


class QuestionSet:
    """The question set of an environment: its splits as tables, each opened on first use (see `open_split`)."""

    def __init__(self, data: DataSource) -> None:
        self._data = data
        self._tables: dict[str, ImageTable] = {}

    def split(self, split: Split) -> ImageTable:
        """The questions of a split. Raises UserInputError if there is no such split."""
        if split not in ("train", "test"):
            raise UserInputError(f'There is no split {split!r}; use "train" or "test".')
        if split not in self._tables:
            self._tables[split] = open_split(self._data, split)
        return self._tables[split]

    def question(self, split: Split, index: int) -> Question:
        """Question `index` of a split. Raises UserInputError outside the split, BadRowError if the row cannot be used."""
        table = self.split(split)
        if not 0 <= index < len(table):
            raise UserInputError(f"Question {index} does not exist: the {split} split has {len(table)}.")
        return table[index]


def check_max_turns(max_turns: int) -> int:
    """Return `max_turns`; UserInputError unless it is a whole number of at least 1."""
    if isinstance(max_turns, bool) or not isinstance(max_turns, int) or max_turns < 1:
        raise UserInputError(f"env.max_turns is {max_turns!r}; it must be a whole number of at least 1.")
    return max_turns


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


def _text(value: Any) -> str:
    """A cell as text: strings as they are, finite numbers in digits, and "" for anything else."""
    if isinstance(value, str):
        return value if value.strip() else ""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return ""
    return str(value)
