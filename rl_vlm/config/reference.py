"""Every key of the configuration with its type, default and meaning, which is the comment beside it in the source."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import groupby
from typing import NamedTuple

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from rl_vlm.config.policy import PolicyConfig
from rl_vlm.config.preference import PreferenceConfig
from rl_vlm.config.section import Section, section_of
from rl_vlm.config.sft import SFTConfig
from rl_vlm.config.sweep import SweepConfig

KINDS: dict[str, type[Section]] = {
    "policy": PolicyConfig,
    "preference": PreferenceConfig,
    "sft": SFTConfig,
    "sweep": SweepConfig,
}
_TITLES = {
    "policy": "A run that trains the policy (`rl-vlm train`)",
    "preference": "A run with rewards from preferences (`rl-vlm train`, `algorithm.name: preference_sac`)",
    "sft": "Supervised fine-tuning (`rl-vlm sft`)",
    "sweep": "The space of a sweep (`rl-vlm sweep --space`)",
}

# Types of our own as a reader knows them.
_TYPES = {
    "Count": "int >= 1", "Natural": "int >= 0", "Positive": "float > 0", "NonNegative": "float >= 0",
    "Share": "float >= 0, <= 1", "Beta": "float >= 0, < 1", "Name": "str", "FilePath": "path",
    "Plugin": "module or file",
}  # fmt: skip
_OWN = re.compile(rf"\b({'|'.join(_TYPES)})\b")
_LITERAL = re.compile(r"Literal\[(.*?)\]")
_SEQUENCE = re.compile(r"tuple\[(.*), \.\.\.\]")
_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


class Key(NamedTuple):
    """A key of one kind of configuration."""

    name: str  # dotted, from the top
    type: str
    default: str  # as YAML; "" for a key that must be given
    meaning: str


def reference(section: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    """The keys of a section, or the fields of another model, and of sections below it, in the order of the source."""
    for name, field in section.model_fields.items():
        written, meaning = _written(section, name)
        if (inner := section_of(field.annotation)) is not None and "[" not in written:
            yield from reference(inner, f"{prefix}{name}.")
            continue
        default = field.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):
            default = default.model_dump(mode="json")
        shown = "" if default is PydanticUndefined else json.dumps(default, default=str, ensure_ascii=False)
        kind = _LITERAL.sub(lambda found: found[1].replace(", ", " | ").replace("'", ""), written)
        kind = _OWN.sub(lambda found: _TYPES[found[1]], kind).replace("None", "null")
        kind = _SEQUENCE.sub(r"list of \1", kind)
        number, _, other = kind.partition(" | ")
        if number in ("int", "float"):
            sides = ((sign, m, side) for m in field.metadata for side, sign in _BOUNDS.items() if hasattr(m, side))
            bounds = ", ".join(f"{sign} {getattr(m, side)}" for sign, m, side in sides)
            kind = f"{number} {bounds}".strip() + (f" | {other}" if other else "")
        yield Key(prefix + name, kind, shown, meaning)


def _written(section: type[BaseModel], name: str) -> tuple[str, str]:
    """The annotation of a key and its comment, where the key is declared or declared anew."""
    for base in section.__mro__:
        if issubclass(base, BaseModel) and name in (declared := _declarations(base)):
            return declared[name]
    raise LookupError(f"{section.__name__} declares no {name}")


@cache
def _declarations(section: type[BaseModel]) -> dict[str, tuple[str, str]]:
    source = inspect.getsource(section)
    lines = source.splitlines()
    found = {}
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            _, _, behind = lines[node.end_lineno - 1].rpartition("  # ")  # type: ignore[operator]
            above, line = list[str](), node.lineno - 2
            while lines[line].strip().startswith("# "):
                above.insert(0, lines[line].strip()[2:])
                line -= 1
            trailing = behind if behind != lines[node.end_lineno - 1] else ""  # type: ignore[operator]
            found[node.target.id] = ast.unparse(node.annotation), trailing or " ".join(above)
    return found


def table(head: Iterable[object], rows: Iterable[Iterable[object]]) -> list[str]:
    """The lines of a Markdown table."""
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in (head, *rows)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return [lines[0], "|---" * len(cells[0]) + "|", *lines[1:]]


def page() -> str:
    """All keys as a Markdown page. What the kinds share stands with the first."""
    lines = ["# Configuration", "", "<!-- Written by `rl-vlm config --markdown`. -->", ""]
    lines.append("Every key with its type, its default and its meaning. `rl-vlm config SECTION` shows the same.")
    shown = set[Key]()
    for kind, config in KINDS.items():
        lines += ["", f"## {_TITLES[kind]}"]
        new = [key for key in reference(config) if key not in shown]
        shown.update(new)
        for top, keys in groupby(new, lambda key: key.name.partition(".")[0] if "." in key.name else "general"):
            lines += ["", f"### `{kind}: {top}`", "", *key_table("key", keys)]
    return "\n".join(lines)


def key_table(head: str, keys: Iterable[Key]) -> list[str]:
    rows = ((f"`{key.name}`", f"`{key.type}`", f"`{key.default}`" if key.default else "", key.meaning) for key in keys)
    return table((head, "type", "default", "meaning"), rows)
