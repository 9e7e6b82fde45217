"""The runs that the page shows, and the answer to each of its questions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rl_vlm.runs.api import load_run
from rl_vlm.runs.run_folder import RunDir, is_remote
from rl_vlm.types import UserInputError
from rl_vlm.view.reader import SCHEMA, NotThereError, RunReader

MAX_SEARCH = 200  # characters


def run_folders(place: Path) -> list[Path]:
    """The run folders at or below a folder; none in checkpoints."""
    found = {path.parent for path in place.glob("**/config.yaml") if not {"checkpoints", "best"} & {*path.parts}}
    return sorted(path for path in found if (path / ".rl_vlm_run").exists() or (path / "progress.csv").exists())


class Library:
    """Runs by their ids, which are their places as text. Runs that begin later appear."""

    def __init__(self, places: Sequence[RunDir], *, live: bool = True) -> None:
        for place in places:  # a wrong one is told at once
            if not is_remote(place) and not Path(place).is_dir():
                raise UserInputError(f"{place} is no folder: give run folders, or a folder that holds some.")
        self._places, self._live = places, live
        self._readers: dict[str, RunReader] = {}

    def readers(self) -> dict[str, RunReader]:
        """All runs, by id."""
        for folder, name in self._found():
            if name not in self._readers:
                self._readers[name] = RunReader(load_run(folder))
        return self._readers

    def _found(self) -> Iterable[tuple[RunDir, str]]:
        for place in self._places:
            if is_remote(place):
                yield place, _id(str(place).partition("://")[2])
                continue
            for folder in run_folders(Path(place)):
                inside = folder.relative_to(place)
                yield folder, _id(str(inside) if inside.parts else folder.resolve().name)

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
        """All runs, the newest first, with the settings in which they differ."""
        configs = {name: reader.config() for name, reader in self.readers().items()}
        values = Counter(key for config in configs.values() for key in config)
        differ = [key for key in values if key != "name" and len({config.get(key) for config in configs.values()}) > 1]
        lines = [{"id": name, **reader.line()} for name, reader in self._readers.items()]
        for line in lines:
            line["settings"] = {key: configs[line["id"]][key] for key in differ if key in configs[line["id"]]}
        return sorted(lines, key=lambda line: -line["changed"])


def _id(place: str) -> str:
    return re.sub(r"[^\w.-]+", "~", place.strip("/"), flags=re.ASCII)
