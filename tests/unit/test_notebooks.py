"""Notebooks are valid, their code parses, what they import exists, and they hold neither large outputs nor paths of a machine."""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)


def cells(path: Path, kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def code(path: Path) -> ast.Module:
    """The code cells as one module; magics are left out."""
    lines = [line for cell in cells(path, "code") for line in cell.splitlines() if not line.startswith("%")]
    return ast.parse("\n".join(lines))


@notebooks
def test_what_is_imported_exists(path: Path) -> None:
    imported: set[tuple[str, str | None]] = set()
    for node in ast.walk(code(path)):
        if isinstance(node, ast.Import):
            imported |= {(alias.name, None) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None and node.level == 0
            imported |= {(node.module, alias.name) for alias in node.names}
    assert imported
    for module, name in imported:
        package = module.partition(".")[0]
        assert importlib.util.find_spec(package) is not None, package
        if package == "rl_vlm" and name is not None:  # importing the others would take longer than all else here
            assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


@notebooks
def test_names_are_defined_before_they_are_used(path: Path) -> None:
    """Cells run from top to bottom: compiling them in this order must not read a name that nothing has bound."""
    tree = code(path)
    bound = set(vars(builtins)) | {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    for statement in tree.body:
        names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
        bound |= {alias.asname or alias.name.split(".")[0] for node in ast.walk(statement)
                  if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}  # fmt: skip
        bound |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
        bound |= {node.name for node in ast.walk(statement) if isinstance(node, ast.FunctionDef)}
        assert {node.id for node in names} <= bound


@notebooks
def test_its_links_and_configurations_exist(path: Path) -> None:
    text = "\n".join(cells(path, "markdown") + cells(path, "code"))
    named = re.findall(r"\]\(([^)#]+)\)", text) + re.findall(r"\.\./configs/[a-z0-9_]+\.yaml", text)
    assert named
    for target in named:
        assert target.startswith("http") or (path.parent / target).exists(), target
