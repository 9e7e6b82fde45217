"""The page docs/errors.md: the errors of this package, when they are raised and what to do, from their docstrings."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rl_vlm.config.reference import table

_PACKAGE = Path(__file__).resolve().parents[1]
_ROOT = "RLVLMError"


class DocumentedError(NamedTuple):
    """An error class: where it is, its nearest base of this package, when it is raised, and what to do."""

    module: str
    name: str
    base: str
    when: str
    remedy: str


def documented_errors() -> Iterator[DocumentedError]:
    """All public errors that derive from RLVLMError, read from the source: nothing is imported."""
    found = [
        (".".join(("rl_vlm", *path.relative_to(_PACKAGE).with_suffix("").parts)).removesuffix(".__init__"), node)
        for path in sorted(_PACKAGE.rglob("*.py"))
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    ]
    bases = {node.name: [base.id for base in node.bases if isinstance(base, ast.Name)] for _, node in found}

    def is_ours(name: str) -> bool:
        return name == _ROOT or any(map(is_ours, bases.get(name, ())))

    for module, node in found:
        base = next(filter(is_ours, bases[node.name]), "")
        if base and not node.name.startswith("_"):
            when, _, remedy = " ".join((ast.get_docstring(node) or "").split()).partition(" Do: ")
            yield DocumentedError(module, node.name, base, when, remedy[:1].upper() + remedy[1:])


def page() -> str:
    lines = ["# Errors", "", "<!-- Written by `rl-vlm config --markdown --page errors`. -->", ""]
    lines += [
        "Every error that rl_vlm raises on purpose, by the module that defines it. The command line prints its "
        "sentence, and ends with code 2 for a `UserInputError`, 130 or 143 after a signal, and 1 for all others. In "
        "Python, `rl_vlm.types.RLVLMError` is the base of all of them. [Troubleshooting](troubleshooting.md) begins "
        "at what you see in a run."
    ]
    known = list(documented_errors())
    for package in dict.fromkeys(one.module.split(".")[1] for one in known):
        rows = [
            (f"`{one.name}`", f"`{one.module}`", f"`{one.base}`", one.when, one.remedy)
            for one in known
            if one.module.split(".")[1] == package
        ]
        lines += ["", f"## `{package}`", "", *table(("error", "module", "is a", "when", "what to do"), rows)]
    return "\n".join(lines)
