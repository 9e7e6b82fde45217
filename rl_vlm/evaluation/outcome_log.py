"""OutcomeLog: the items file of an evaluation, one JSON line per finished episode, from which a killed evaluation goes on."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from rl_vlm.evaluation.outcomes import Outcome, Side, read_outcome
from rl_vlm.files import append_whole, open_own, to_jsonable, whole_lines
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.types import UserInputError

_FORMAT = "rl-vlm evaluation items, 1"


def items_path(out: Path) -> Path:
    """`results.items.jsonl` beside `results.json`."""
    return out.with_name(f"{out.stem}.items.jsonl")


class OutcomeLog:
    """Outcomes in memory, and in a file where one is given.

    The file's first line says what is measured (`identity`); later ones are outcomes, each written when its item is finished. A line that
    was cut short by a kill is dropped, and an item of which only some samples are there is asked again.

    Args:
        path: the items file; None keeps outcomes in memory alone.
        identity: names and values that decide the outcomes: model, adapter, environment and the like.
        resume: go on from the file; without it an unfinished one is refused and a finished one replaced.
        finished: whether the evaluation of the file that is there has come to its end.
    """

    def __init__(
        self, path: Path | None, identity: Mapping[str, Any], *, resume: bool = False, finished: bool = False
    ) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._found: dict[tuple[Side, str, int], Outcome] = {}
        if path is None:
            return
        self._file = _locked(path)
        try:
            self._open(path, self._file, dict(to_jsonable(identity)), resume, finished)
        except BaseException:
            self._file.close()
            raise

    def _open(self, path: Path, file: BinaryIO, identity: dict[str, Any], resume: bool, finished: bool) -> None:
        lines = whole_lines(path)
        if resume and lines:
            _check_identity(path, lines[0], identity)
            self._remember([_parsed(path, number, line) for number, line in enumerate(lines[1:], 2)])
            file.truncate(sum(len(line) + 1 for line in lines))  # what a kill left of a line
            return
        if len(lines) > 1 and not finished:
            raise UserInputError(
                f"{path} holds {len(lines) - 1} outcomes of an evaluation that did not end: add --resume to go on with it, "
                "or remove the file to begin again."
            )
        file.truncate(0)
        append_whole(path, json.dumps({"format": _FORMAT, "identity": identity}).encode() + b"\n")

    @property
    def outcomes(self) -> list[Outcome]:
        """All that is finished."""
        return list(self._found.values())

    def _remember(self, outcomes: Sequence[Outcome]) -> None:
        self._found.update({(one.side, one.id, one.sample): one for one in outcomes})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, outcomes: Sequence[Outcome]) -> None:
        """Keep the outcomes of one finished item: in the file when this returns."""
        self._remember(outcomes)
        if self._path is not None:
            append_whole(self._path, "".join(json.dumps(one.line()) + "\n" for one in outcomes).encode())

    def missing(self, tasks: Sequence[RolloutTask], side: Side) -> list[RolloutTask]:
        """The tasks that are not finished. Outcomes of an item whose samples are incomplete are forgotten."""
        left = []
        for task in tasks:
            keys = [(side, task.group_id, sample) for sample in range(task.size)]
            if not all(key in self._found for key in keys):
                left.append(task)
                for key in keys:
                    self._found.pop(key, None)
        return left


def _locked(path: Path) -> BinaryIO:
    """The file, locked until it is closed or this process ends. Raises UserInputError where another process holds it."""
    file = open_own(path)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise UserInputError(
            f"Another evaluation is writing {path}: wait for its end, or choose another --out."
        ) from error
    return file


def _check_identity(path: Path, first: bytes, identity: dict[str, Any]) -> None:
    try:
        head = json.loads(first)
        known = dict(head["identity"])
        right = head["format"] == _FORMAT
    except (ValueError, TypeError, KeyError) as error:
        raise UserInputError(f"{path} is no items file of an evaluation: choose another --out.") from error
    if not right:
        raise UserInputError(f"{path} was written by another version: choose another --out.")
    for key in sorted(known.keys() | identity.keys()):
        if known.get(key) != identity.get(key):
            raise UserInputError(
                f"{path} was measured with {key} {_short(known.get(key))}, and this evaluation has {_short(identity.get(key))}: "
                "repeat the former command with --resume, or choose another --out."
            )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _parsed(path: Path, number: int, line: bytes) -> Outcome:
    try:
        return read_outcome(json.loads(line))
    except (ValueError, TypeError, KeyError) as error:
        raise UserInputError(
            f"{path}, line {number}, is no outcome ({error}): remove the file to begin again."
        ) from error
