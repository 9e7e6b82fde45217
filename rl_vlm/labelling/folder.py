"""`rl-vlm label FOLDER`: labels pairs of pictures in a folder.

The pairs are the rows of `pairs.csv` (columns first, second, and the true returns if they are known); without that file
the pictures first_NAME and second_NAME, or NAME_1 and NAME_2.
"""

from __future__ import annotations

import asyncio
import csv
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rl_vlm.envs.images import BadImageError, check_header, image_bytes, pixels
from rl_vlm.envs.rows import chosen_columns
from rl_vlm.labelling.labels import Label, Labeller, Segment, SegmentPair, agreement
from rl_vlm.labelling.query_log import FILE_NAME, log_row, query_log
from rl_vlm.types import RLVLMError, UserInputError

_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
_NAME = re.compile(r"(first|second)[_-](.+)|(.+)[_-]([12])", re.IGNORECASE)
_PAIRS_PER_CALL = 64  # bounds memory: a folder may hold thousands
_PIXELS_PER_CALL = 64_000_000  # of all pictures; a single pair may have more
_COUNTED = ("not_understood", "questions", "prompt_tokens", "sampled_tokens")  # of what a labeller counts
T = TypeVar("T")


class NamedPair:
    """The names of a pair's pictures, the true returns (nan: not known), and the pixels of both pictures together,
    whose headers are read. Raises UserInputError."""

    def __init__(self, folder: Path, names: tuple[str, str], returns: tuple[float, float] = (np.nan, np.nan)) -> None:
        self.folder, self.names, self.returns = folder, names, returns
        self.pixels = sum(math.prod(_read(folder, name, check_header)) for name in names)

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
    pairs = _listed(folder) if (folder / "pairs.csv").is_file() else _by_name(folder)
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
        out.parent.mkdir(parents=True, exist_ok=True)  # fail before any question is asked
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


def accuracy_by_gap(pairs: Sequence[NamedPair], labels: Sequence[Label], bands: int = 3) -> list[float | None]:
    """The accuracy of decided labels in each band of pairs, from small to large differences of the true returns, of the
    pairs whose returns are known and differ."""
    known = [k for k, pair in enumerate(pairs) if np.isfinite(gap := pair.returns[1] - pair.returns[0]) and gap]
    known.sort(key=lambda k: abs(pairs[k].returns[1] - pairs[k].returns[0]))
    found: list[float | None] = []
    for band in np.array_split(known, bands):
        right = agreement([pairs[k].returns for k in band], [labels[k] for k in band])
        decided = len(right) - right.count(None)
        found.append(right.count(True) / decided if decided else None)
    return found


def comparison(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    """A table in Markdown: a row for each kind of label, from the summaries of `label_folder`."""

    def share(value: float | None) -> str:
        return "–" if value is None else f"{value:.2f}"

    head = ["labels", "accuracy", "by gap, small to large", "order bias", "undecided", "errors", "tokens per pair"]
    lines = [head, ["---"] * len(head)]
    for name, one in summaries.items():
        decided = one["pairs"] - one["errors"]
        tokens = one["prompt_tokens"] + one["sampled_tokens"]
        lines.append(
            [
                name,
                share(one["accuracy"]),
                " / ".join(map(share, one["accuracy_by_gap"])),
                f"{one['position_bias']:+.2f}",
                share(one["labels"]["-1"] / decided if decided else None),
                str(one["errors"]),
                f"{tokens / max(one['pairs'], 1):.0f}",
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


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
        "accuracy_by_gap": accuracy_by_gap(pairs, labels),
    }
    if stats is not None:
        found |= {"contradictions": stats.disagreements, "position_bias": round(stats.position_bias, 4)}
        found |= {name: getattr(stats, name) for name in _COUNTED} | {"seconds": round(stats.seconds, 3)}
    return found


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
    found = []
    for row in rows:
        returns = (_number(row.get("ground_truth_score_1")), _number(row.get("ground_truth_score_2")))
        found.append(NamedPair(folder, (row["first"], row["second"]), returns))
    return found


def _by_name(folder: Path) -> list[NamedPair]:
    pairs: dict[tuple[str | None, str | None], dict[str, str]] = {}
    for path in sorted(folder.iterdir()):
        match = _NAME.fullmatch(path.stem)
        if match is None or path.suffix.lower() not in _SUFFIXES:
            continue
        side = "second" if (match[1] or match[4]).lower() in ("second", "2") else "first"
        both = pairs.setdefault((match[2], match[3]), {})
        if side in both:
            raise UserInputError(f"{both[side]} and {path.name} in {folder} are the same side of one pair: rename one.")
        both[side] = path.name
    alone = [name for both in pairs.values() if len(both) < 2 for name in both.values()]
    if alone:
        raise UserInputError(f"The other picture of {alone[0]} is missing in {folder}.")
    return [NamedPair(folder, (both["first"], both["second"])) for both in pairs.values()]


def _read(folder: Path, name: str, use: Callable[[bytes], T]) -> T:
    try:
        return use(image_bytes(name, folder))
    except BadImageError as error:
        raise UserInputError(f"Cannot read the picture {folder / (name or '')}: it {error}.") from error


def _number(text: str | None) -> float:
    try:
        return float(text or "nan")
    except ValueError:
        return np.nan
