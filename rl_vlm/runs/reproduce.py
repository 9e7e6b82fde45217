"""`rl-vlm reproduce`: trains a recipe on fresh seeds and once with a control, and says whether it does what is claimed.

`claims.yaml` holds the claims. Each run is `rl-vlm train` in a process of its own; a finished one is not repeated.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import Field

from rl_vlm.config import Section
from rl_vlm.files import write_atomic
from rl_vlm.registry import suggestion
from rl_vlm.types import RLVLMError, UserInputError

Bounds = dict[str, tuple[float, float]]  # of metrics: least and most
Figures = Mapping[str, Any]
_PACKAGES = ("rl_vlm", "ray", "torch", "transformers", "peft", "numpy")
_INTERVAL = ("accuracy", "reward")  # metrics of which an evaluation has the bounds of a 95 % interval
_SHUFFLED = "algorithm.shuffle_rewards=true"
_TIMEOUT_S = 6 * 3600.0  # of a run


class ReproductionError(RLVLMError):
    """A run of `rl-vlm reproduce` did not end.

    Do: read the end of its output, and give the same command again: finished runs are kept.
    """


class Expected(Section):
    before: Bounds = Field(default_factory=dict)
    after: Bounds = Field(default_factory=dict)
    gain: Bounds = Field(default_factory=dict)

    def misses(self, first: Figures, last: Figures) -> list[str]:
        """A sentence for each bound that the first and the last evaluation do not keep."""
        found = []
        for kind, bounds in (("before", self.before), ("after", self.after), ("gain", self.gain)):
            for name, (least, most) in bounds.items():
                value = {"before": first, "after": last}.get(kind, {name: last[name] - first.get(name, 0.0)})[name]
                if not least <= value <= most:
                    found.append(f"{name} {kind}: {value:.3f} is not within {least:g} and {most:g}")
        return found

    @property
    def metric(self) -> str:
        """The first one that is named."""
        return next(iter(self.after or self.gain or self.before))


class Control(Expected):
    change: tuple[str, ...] = (_SHUFFLED,)


class Claim(Expected):
    control: Control
    curve: dict[int, tuple[float, float]] = Field(default_factory=dict)
    teacher: str | None = None

    @property
    def described(self) -> str:
        """The bounds, in words."""
        kinds = {"before": self.before, "after": self.after, "gain": self.gain}
        return ", ".join(
            f"{name} {kind} {least:g} to {most:g}" for kind, own in kinds.items() for name, (least, most) in own.items()
        )


class Trained(NamedTuple):
    """Evaluations of a finished run in order; of the last one also what result.json holds."""

    evaluations: list[dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> Trained:
        path = folder / "eval.jsonl"
        lines = path.read_text().splitlines() if path.is_file() else []
        found = sorted(map(json.loads, lines), key=lambda entry: int(entry["iteration"])) or [{}]
        found[-1] |= json.loads((folder / "result.json").read_text())
        return cls(found)


def claims() -> dict[str, Claim]:
    """All claims by recipe."""
    data = yaml.safe_load(Path(__file__).with_name("claims.yaml").read_text())
    return {name: Claim.model_validate(claim) for name, claim in data.items()}


def chosen_seeds(given: str, folder: Path) -> list[int]:
    """The seeds that are given, those of the runs that are there, or two at random. Raises UserInputError."""
    try:
        chosen = [int(seed) for seed in given.split(",") if seed.strip()]
    except ValueError as error:
        raise UserInputError(f"--seeds {given!r} are no seeds: give whole numbers, such as 3,4.") from error
    there = sorted(int(path.name.removeprefix("seed-")) for path in folder.glob("seed-*") if path.is_dir())
    return chosen or there or [secrets.randbelow(10**6) for _ in range(2)]


def reproduce(name: str, seeds: Sequence[int], folder: Path, say: Callable[[str], None]) -> bool:
    """Whether the recipe keeps its claim on these seeds and its control does not learn. Writes verdict.json into the
    folder. Raises UserInputError for a recipe without a claim, ReproductionError."""
    known = claims()
    if name not in known:
        raise UserInputError(
            f"There is no claim about {name!r}.{suggestion(name, known)} There are claims about {', '.join(known)}."
        )
    claim, folder = known[name], folder.resolve()
    shared = []
    if claim.teacher is not None:
        say(f"{claim.teacher}: the teacher")
        _train(claim.teacher, folder / "teacher", (f"seed={seeds[0]}",))
        shared.append(f"teacher.adapter={folder / 'teacher'}")
    rows = []
    for number, seed in enumerate((*seeds, seeds[0])):
        is_control = number == len(seeds)
        what, wanted = ("control", claim.control) if is_control else (f"seed {seed}", claim)
        change = claim.control.change if is_control else ()
        run = _train(name, folder / what.replace(" ", "-"), (*shared, f"seed={seed}", *change))
        misses = wanted.misses(run.evaluations[0], run.evaluations[-1])
        changed = f" ({' '.join(change)})" if change else ""
        say(f"{name}, {what}{changed}: {_shown(wanted.metric, run)}; {'; '.join(misses) or 'as claimed'}")
        rows.append({"what": what, "changes": [*shared, *change], "misses": misses, "curve": _curve(claim.metric, run)})
    kept = not any(row["misses"] for row in rows)
    verdict = {
        "recipe": name, "reproduced": kept, "metric": claim.metric, "measured": claim.curve, "runs": rows,
        "versions": {package: version(package) for package in _PACKAGES},
    }  # fmt: skip
    write_atomic(folder / "verdict.json", json.dumps(verdict, indent=1))
    say(f"{name}: {'reproduced' if kept else 'NOT reproduced'}; see {folder}/verdict.json")
    return kept


def _train(recipe: str, folder: Path, overrides: Sequence[str]) -> Trained:
    result = folder / "result.json"
    if not (result.is_file() and json.loads(result.read_text())["status"] == "done"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        again = ("--overwrite",) if folder.exists() else ()
        command = [sys.executable, "-m", "rl_vlm.cli", "train", recipe, "--run-dir", str(folder), *again, *overrides]
        log = folder.with_suffix(".log")
        with log.open("w") as out:
            try:
                code = subprocess.run(command, stdout=out, stderr=out, timeout=_TIMEOUT_S, check=False).returncode
            except subprocess.TimeoutExpired as error:
                raise ReproductionError(f"{folder.name} took more than {_TIMEOUT_S:g} s; see {log}.") from error
        if code:
            ending = " ".join(log.read_text().splitlines()[-1:])
            raise ReproductionError(f"{folder.name} ended with code {code} ({ending}); see {log}.")
    return Trained.read(folder)


def _curve(metric: str, run: Trained) -> dict[int, float]:
    return {int(entry.get("iteration", 0)): entry[metric] for entry in run.evaluations if metric in entry}


def _shown(metric: str, run: Trained) -> str:
    """The metric before and after, with the interval of the last evaluation where it has one."""
    first, last = run.evaluations[0].get(metric), run.evaluations[-1]
    kind, _, variant = metric.partition("/")
    bounds = [last.get(f"{kind}_{side}/{variant}") for side in ("low", "high")] if kind in _INTERVAL else [None]
    interval = "" if None in bounds else f" ({bounds[0]:.2f} to {bounds[1]:.2f})"
    before = "" if first is None or len(run.evaluations) == 1 else f"{first:.3f} → "
    return f"{metric} {before}{last[metric]:.3f}{interval}"
