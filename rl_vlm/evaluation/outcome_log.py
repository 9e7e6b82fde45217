"""The items file of an evaluation: each outcome is in it when its item is finished."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, Self

from pydantic import TypeAdapter

from rl_vlm.evaluation.outcomes import Outcome, Side
from rl_vlm.files import append_whole, open_own, to_jsonable, whole_lines
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.types import UserInputError

_OUTCOME = TypeAdapter(Outcome)


class OutcomeLog:
    """Outcomes in memory, and in a file where one is given, which no other process may be writing.

    The file's first line says what is measured (`identity_of`); later ones are outcomes, each written when its item is
    finished. A line that was cut short by a kill is dropped, and an item of which only some samples are there is asked
    again. A file that holds outcomes needs `resume` or `overwrite`.
    """

    def __init__(
        self, path: Path | None, identity: Mapping[str, Any], *, resume: bool = False, overwrite: bool = False
    ) -> None:
        self._path = path
        self._found: dict[tuple[Side, str, int], Outcome] = {}
        with ExitStack() as opened:
            if path is not None:
                file = opened.enter_context(open_own(path))
                self._open(path, file, dict(to_jsonable(identity)), resume, overwrite)
            self._opened = opened.pop_all()

    def _open(self, path: Path, file: BinaryIO, identity: dict[str, Any], resume: bool, overwrite: bool) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserInputError(
                f"Another evaluation is writing {path}: wait for its end, or choose another --out."
            ) from error
        lines = whole_lines(path)
        if resume and lines:
            try:
                known = dict(json.loads(lines[0]))
                for key in sorted(known.keys() | identity.keys()):
                    before, now = (json.dumps(values.get(key)) for values in (known, identity))
                    if before != now:
                        raise UserInputError(
                            f"{path} was measured with {key} {before[:80]}, and this evaluation has {now[:80]}: repeat "
                            "the former command with --resume, or choose another --out."
                        )
                self._remember([_OUTCOME.validate_json(line) for line in lines[1:]])
            except (ValueError, TypeError) as error:
                raise UserInputError(
                    f"{path} is no items file of an evaluation by this version: remove it, or choose another --out."
                ) from error
            file.truncate(sum(len(line) + 1 for line in lines))  # what a kill left of a line
            return
        if len(lines) > 1 and not overwrite:
            raise UserInputError(
                f"{path} holds {len(lines) - 1} outcomes of an evaluation: add --resume to go on with it, or "
                "--overwrite to begin again."
            )
        file.truncate(0)
        append_whole(path, json.dumps(identity).encode() + b"\n")

    @property
    def outcomes(self) -> list[Outcome]:
        return list(self._found.values())

    def _remember(self, outcomes: Sequence[Outcome]) -> None:
        self._found.update({(outcome.side, outcome.id, outcome.sample): outcome for outcome in outcomes})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def add(self, outcomes: Sequence[Outcome]) -> None:
        """Keep the outcomes of one finished item: in the file when this returns."""
        self._remember(outcomes)
        if self._path is not None:
            append_whole(self._path, b"".join(_OUTCOME.dump_json(outcome) + b"\n" for outcome in outcomes))

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
