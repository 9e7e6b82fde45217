"""Recipes: the configurations that come with the package, each known by a name such as `quickstart`.

A recipe begins with comments: a line that says what it is for, then what it needs, how long it takes and what is to be
expected. `rl-vlm recipes` prints these, so they stand nowhere else:

    # Count shapes in drawings: the first run.
    # Needs: 2 CPU cores
    # Takes: 1 minute
    # Expect: accuracy 0.25 → 1.00
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from rl_vlm.files import did_you_mean
from rl_vlm.registry import builtin_models
from rl_vlm.types import UserInputError

FOLDER = Path(__file__).resolve().parents[1] / "recipes"  # in a checkout a link to configs/
_FACT = re.compile(r"^# (Needs|Takes|Expect): (.+)$", re.MULTILINE)
_MODEL = re.compile(r"^model:\n +path: (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What the head of a recipe says. `model` is its `model.path`, or empty where no language model takes part."""

    name: str
    purpose: str
    model: str
    needs: str
    takes: str
    expect: str


def recipe_names() -> list[str]:
    """The names of all recipes, such as `quickstart` and `rl_vlm_f/drawer_open`, those of no subfolder first."""
    files = (path.relative_to(FOLDER) for path in FOLDER.glob("**/*.yaml"))
    return [file.with_suffix("").as_posix() for file in sorted(files, key=lambda file: (len(file.parts), file))]


def recipe_file(name: str) -> Path:
    """The file of a recipe. Raises UserInputError."""
    if name not in (names := recipe_names()):
        raise UserInputError(f"There is no recipe {name}{_hint(name, names)}.")
    return FOLDER / f"{name}.yaml"


def find_config(path: str | Path) -> Path:
    """The file that a CONFIG argument means: that of a run folder, the path as it is, or where there is no such file or
    folder and it has no suffix, the recipe of that name. Raises UserInputError."""
    path = Path(path)
    if path.is_dir():
        if not (path / "config.yaml").is_file():
            raise UserInputError(
                f"{path} is no run folder, because it holds no config.yaml: model.path names a model, and env.data, or "
                "sft.data of `rl-vlm sft`, names data."
            )
        return path / "config.yaml"
    if path.exists() or path.suffix:
        return path
    name, names = path.as_posix(), recipe_names()
    if name not in names:
        hint = f"{_hint(name, names)}."
        if name in builtin_models() or (name.count("/") == 1 and name.lower() != name):  # as hub names are written
            hint = f": a model is named behind a recipe, as in `quickstart model.path={name}`."
        elif name.startswith("runs/") or (len(path.parts) > 1 and path.parent.is_dir()):
            hint = f".{did_you_mean(path, '*/')}"
        raise UserInputError(f"There is no file, run folder or recipe {name}{hint}")
    return recipe_file(name)


def read_recipe(name: str) -> Recipe:
    """The head of a recipe. Raises UserInputError for an unknown name."""
    text = recipe_file(name).read_text()
    facts, model = dict(_FACT.findall(text)), _MODEL.search(text)
    purpose = text.partition("\n")[0].removeprefix("# ")
    return Recipe(name, purpose, model[1] if model else "", facts["Needs"], facts["Takes"], facts["Expect"])


def _hint(name: str, names: list[str]) -> str:
    """The end of a sentence about an unknown name: recipes with a name like it, or where all are listed."""
    last = {other.rpartition("/")[2]: other for other in reversed(names)}
    alike = difflib.get_close_matches(name.rpartition("/")[2], last, n=3)
    meant = f": did you mean {' or '.join(last[other] for other in alike)}?" if alike else ""
    return f"{meant or ':'} `rl-vlm recipes` lists the recipes"
