"""The runs that the page shows, and the answer to each of its questions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

from rl_vlm.files import did_you_mean
from rl_vlm.runs.api import Run, load_run
from rl_vlm.runs.remote_folder import RunDir, is_remote
from rl_vlm.types import UserInputError
from rl_vlm.view.reader import SCHEMA, NotThereError, RunReader
from rl_vlm.view.trials import TrialRun

MAX_SEARCH = 200  # characters


def runs_in(place: Path) -> Iterator[tuple[Path, str]]:
    """The folders of runs and of the trials of sweeps at or below a folder, each with its sweep's, or ""."""
    for path in sorted(place.glob("**/config.yaml")):
        folder = path.parent
        if (folder / "sweep.yaml").exists():
            yield from ((trial.parent, str(folder)) for trial in sorted(folder.glob("tune/*/params.json")))
        elif not {"checkpoints", "best"} & {*path.parts}:
            yield folder, ""


class Library:
    """Runs by their ids, which are their places as text. Runs that begin later appear."""

    def __init__(self, places: Sequence[RunDir], *, live: bool = True) -> None:
        for place in places:  # a wrong one is an error at once
            if is_remote(place):
                load_run(place)
            elif not Path(place).is_dir():
                raise UserInputError(
                    f"There is no folder {place}: give run folders, or a folder that holds some."
                    f"{did_you_mean(Path(place), '*/')}"
                )
        self._places, self._live = places, live
        self._readers: dict[str, RunReader] = {}

    def readers(self) -> dict[str, RunReader]:
        """All runs that are there now, by id."""
        known = {reader.folder: reader for reader in self._readers.values()}
        found: dict[str, RunReader] = {}
        for folder, sweep, name in self._found():
            place = str(folder if is_remote(folder) else Path(folder).resolve())
            if name in found and found[name].folder != place:  # runs of one name in several places
                name = f"{name}~{sha256(place.encode()).hexdigest()[:8]}"
            found[name] = known.get(place) or RunReader(TrialRun(folder) if sweep else Run(folder), place, sweep)
        self._readers = found
        return found

    def warm(self) -> None:
        """Read the lists of episodes before anybody asks for them."""
        for reader in self.readers().values():
            reader.episodes()

    def _found(self) -> Iterator[tuple[RunDir, str, str]]:
        """Folder, sweep and id of each run."""
        for place in self._places:
            if is_remote(place):
                yield place, "", _id(str(place).partition("://")[2])
                continue
            for folder, sweep in runs_in(Path(place)):
                inside = folder.relative_to(place)
                yield folder, sweep, _id(str(inside) if inside.parts else folder.resolve().name)

    def reader(self, run: str) -> RunReader:
        """Raises NotThereError."""
        found = self._readers.get(run) or self.readers().get(run)
        if found is None:
            raise NotThereError(f"There is no run {run[:100]!r} here.")
        return found

    def answer(self, path: str, text: str = "") -> dict[str, Any]:
        """What stands at `path` of the API, such as `runs/quickstart/episodes`. Raises NotThereError."""
        match path.split("/"):
            case ["runs"]:
                content: dict[str, Any] = {"live": self._live, "runs": self.lines()}
            case ["stamps"]:
                content = {"stamps": {name: reader.stamp() for name, reader in self.readers().items()}}
            case ["runs", run]:
                content = self.reader(run).run({"id": run, **self.reader(run).line()})
            case ["runs", run, "episodes"]:
                content = self.reader(run).episodes()
            case ["runs", run, "episodes", episode]:
                content = self.reader(run).episode(episode)
            case ["runs", run, "search"]:
                content = {"ids": self.reader(run).search(text[:MAX_SEARCH])}
            case ["runs", run, "pairs"]:
                content = self.reader(run).pairs()
            case ["runs", run, "films"]:
                content = {"films": self.reader(run).films()}
            case _:
                raise NotThereError("There is no such path.")
        return {"schema": SCHEMA, **content}

    def lines(self) -> list[dict[str, Any]]:
        """All runs, the newest first, with the settings in which those of a sweep, or those of none, differ."""
        readers = self.readers()
        lines = [{"id": name, **reader.line()} for name, reader in readers.items()]
        for sweep in {line["sweep"] for line in lines}:
            alike = [line for line in lines if line["sweep"] == sweep]
            configs = [readers[line["id"]].config() for line in alike]
            differ = [key for key in dict.fromkeys(chain(*configs)) if len({one.get(key) for one in configs}) > 1]
            for line, config in zip(alike, configs, strict=True):
                line["settings"] = {key: config[key] for key in differ if key in config and key != "name"}
        return sorted(lines, key=lambda line: -line["changed"])


def _id(place: str) -> str:
    return re.sub(r"[^\w.-]+", "~", place.strip("/"), flags=re.ASCII)
