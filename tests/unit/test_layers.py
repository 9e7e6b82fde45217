"""The layers: the drawing in the docs is the contract, and every folder says what belongs there."""

from __future__ import annotations

import ast
import configparser
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def contract() -> list[list[str]]:
    parser = configparser.ConfigParser()
    parser.read(ROOT / ".importlinter")
    lines = parser["importlinter:contract:layers"]["layers"].split("\n")
    return [[name.strip() for name in line.split("|")] for line in lines if line.strip()]


def drawing() -> list[list[str]]:
    text = (ROOT / "docs" / "architecture.md").read_text()
    block = text.split("## Layers", 1)[1].split("```")[1]
    found = []
    for line in block.strip().splitlines():
        names = re.split(r"\s{2,}", line)[0]  # what stands after two spaces explains
        found.append([name.strip() for name in names.split("|")])
    return found


def test_the_drawing_in_the_docs_is_the_contract() -> None:
    assert drawing() == contract()


def test_every_folder_has_a_line_that_says_what_belongs_there() -> None:
    for folder in (ROOT / "rl_vlm").rglob("__init__.py"):
        line = ast.get_docstring(ast.parse(folder.read_text())) or ""
        assert len(line) > 30 and line.endswith("."), f"{folder} says nothing about what belongs there"


def test_every_module_of_the_package_has_its_layer() -> None:
    package = ROOT / "rl_vlm"
    modules = {path.name.removesuffix(".py") for path in package.iterdir() if not path.name.startswith(("_", "."))}
    assert {name for layer in contract() for name in layer} == modules
