"""`rl-vlm label FOLDER`: labels pairs of pictures in a folder.

The pairs are the rows of `pairs.csv` (columns first, second, and the true returns if they are known); without that file
those that are called first_NAME and second_NAME, or NAME_1 and NAME_2.
"""

from __future__ import annotations

import asyncio
import csv
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rl_vlm.envs.data import chosen_columns
from rl_vlm.envs.images import ImageError, check_header, image_bytes, pixels
from rl_vlm.labelling.store import (
    FILE_NAME,
    Label,
    Labeller,
    Segment,
    SegmentPair,
    agreement,
    log_row,
    query_log,
)
from rl_vlm.types import RLVLMError, UserInputError

_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
_PREFIXED = re.compile(r"^(first|second)[_-](.+)$", re.IGNORECASE)
_NUMBERED = re.compile(r"^(.+)[_-]([12])$")
_PAIRS_PER_CALL = 64  # bounds memory: a folder may hold thousands
_PIXELS_PER_CALL = 64_000_000  # of all pictures; a single pair may have more
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NamedPair:
    """The names of a pair's pictures, the true returns (nan: not known), and the pixels of both pictures together."""

    folder: Path
    names: tuple[str, str]
    returns: tuple[float, float]
    pixels: int

    @classmethod
    def of(cls, folder: Path, names: tuple[str, str], returns: tuple[float, float] = (np.nan, np.nan)) -> NamedPair:
        """The pair, whose pictures' headers are read. Raises UserInputError."""
        return cls(folder, names, returns, sum(math.prod(_read(folder, name, check_header)) for name in names))

    def load(self) -> SegmentPair:
        """Raises UserInputError."""
        empty = np.zeros((1, 0), np.float32)
        sides = (
            Segment(empty, empty, np.array([value], np.float32), _read(self.folder, name, pixels)[None])
            for name, value in zip(self.names, self.returns, strict=True)
        )
        return SegmentPair(*sides)


def find_pairs(folder: str | Path) -> list[NamedPair]:
    """All pairs of a folder. Raises UserInputError if there are none, or one has no readable header."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserInputError(f"There is no folder {folder}.")
    listed = (folder / "pairs.csv").is_file()
    pairs = _listed(folder) if listed else [NamedPair.of(folder, names) for names in _by_name(folder)]
    if not pairs:
        raise UserInputError(
            f"{folder} holds no pairs: name pictures first_X and second_X, or X_1 and X_2, or list them in pairs.csv "
            "with the columns first and second."
        )
    return pairs


def label_folder(folder: str | Path, labeller: Labeller, out: Path | None = None) -> dict[str, Any]:
    """Label all pairs, write the query log batch by batch with the names of the pictures, and return a summary."""
    pairs = find_pairs(folder)
    out = out or Path(folder) / FILE_NAME
    log, labels, started = query_log(out, ("first", "second")), list[Label](), time.time()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)  # fail before any label is paid for
        log.rewind(-1)
    except OSError as error:
        raise UserInputError(f"Cannot write {out}: {error.strerror or error}.") from error

    per_call = max(min(_PAIRS_PER_CALL, _PIXELS_PER_CALL // max(named.pixels for named in pairs)), 1)

    async def label_all() -> None:
        # The first alone: where it fails, the others would fail as it did, after many attempts each.
        for start, stop in pairwise((0, *range(1, len(pairs), per_call), len(pairs))):
            batch = pairs[start:stop]
            loaded = [named.load() for named in batch]
            new = await labeller.label(loaded)
            rows = zip(loaded, new, batch, strict=True)
            log.add(*(log_row(pair, label, 0, started, *named.names) for pair, label, named in rows))
            labels.extend(new)
            if labels[0].error:
                raise RLVLMError(f"The first pair could not be labelled: {labels[0].error}")

    asyncio.run(label_all())
    return {"out": str(out), **summary(pairs, labels, labeller.stats)}


def summary(pairs: Sequence[NamedPair], labels: Sequence[Label], stats: Any = None) -> dict[str, Any]:
    """Counts, the accuracy on pairs whose true returns are known and differ, and what a labeller has counted."""
    known = agreement([named.returns for named in pairs], labels)
    right, decided = known.count(True), len(known) - known.count(None)
    answered = [label.value for label in labels if not label.error]
    found = {
        "pairs": len(labels),
        "labels": {str(value): answered.count(value) for value in (0, 1, -1)},  # type: ignore[arg-type]
        "errors": len(labels) - len(answered),
        "accuracy": right / decided if decided else None,
        "accuracy_of_non_ties": right / len(known) if known else None,
    }
    if stats is None:
        return found
    counted = {
        name: getattr(stats, name) for name in ("not_understood", "questions", "prompt_tokens", "sampled_tokens")
    }
    bias, seconds = round(stats.position_bias, 4), round(stats.seconds, 3)
    return {**found, "contradictions": stats.disagreements, "position_bias": bias, **counted, "seconds": seconds}


def _listed(folder: Path) -> list[NamedPair]:
    path = folder / "pairs.csv"
    # utf-8-sig: spreadsheets begin a file with a mark of its encoding, which is not a part of the first column's name.
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as stream:
        reader = csv.DictReader(stream)
        try:
            rows = list(reader)
        except csv.Error as error:
            raise UserInputError(f"{path} cannot be read ({error}): a quotation mark may be missing.") from error
    chosen_columns(list(reader.fieldnames or ()), path, ("first", "second"))
    scores = ("ground_truth_score_1", "ground_truth_score_2")
    returns = [(_number(row.get(scores[0])), _number(row.get(scores[1]))) for row in rows]
    return [NamedPair.of(folder, (row["first"], row["second"]), both) for row, both in zip(rows, returns, strict=True)]


def _by_name(folder: Path) -> list[tuple[str, str]]:
    sides: dict[str, dict[str, str]] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() not in _SUFFIXES:
            continue
        if match := _PREFIXED.match(path.stem):
            pair, side = f"first {match[2]}", match[1].lower()
        elif match := _NUMBERED.match(path.stem):
            pair, side = f"number {match[1]}", "first" if match[2] == "1" else "second"
        else:
            continue
        both = sides.setdefault(pair, {})
        if side in both:
            raise UserInputError(f"{both[side]} and {path.name} in {folder} are the same side of one pair: rename one.")
        both[side] = path.name
    alone = [name for both in sides.values() if len(both) < 2 for name in both.values()]
    if alone:
        raise UserInputError(f"The other picture of {alone[0]} is missing in {folder}.")
    return [(both["first"], both["second"]) for both in sides.values()]


def _read(folder: Path, name: str, use: Callable[[bytes], T]) -> T:
    try:
        return use(image_bytes(name, folder))
    except ImageError as error:
        raise UserInputError(f"Cannot read the picture {folder / (name or '')}: it {error}.") from error


def _number(text: str | None) -> float:
    try:
        return float(text) if text else np.nan
    except ValueError:
        return np.nan
