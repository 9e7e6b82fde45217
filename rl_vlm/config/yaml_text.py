"""YAML 1.2 as configurations use it: read within limits, and written so that 1.1 reads the same."""

from __future__ import annotations

import re
from typing import Any

import yaml

from rl_vlm.config.section import WrittenFloat

MAX_VALUES = 200_000  # of a document, those behind aliases counted each time


class _Loader(yaml.SafeLoader):
    """YAML in which a key that is given twice is an error: the first one would be lost without a word."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value[:80]!r} is given twice", problem_mark=key.start_mark)
            seen.add((key.tag, str(key.value)))
        return node


# YAML 1.2's core schema (chapter 10.3.2). PyYAML's own is that of YAML 1.1, where `off` is a boolean and `1:30` is 90.
# Digits that begin with 0 are text here, as a name's are; a field for numbers takes them all the same.
_CORE = (
    ("null", r"~|null|Null|NULL|", [*"~nN", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("int", r"[-+]?(0|[1-9][0-9]*)|0x[0-9a-fA-F]+", [*"-+0123456789"]),
    ("float", r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?", [*"-+0123456789."]),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", [*"-+."]),
    ("merge", r"<<", ["<"]),
)


class Dumper(yaml.SafeDumper):
    """Quotes texts that YAML 1.1 or 1.2 would read as something else."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in _CORE:
    for _class in (_Loader, Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), _first)


def _float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> WrittenFloat:
    value = WrittenFloat(loader.construct_yaml_float(node))
    value.spelling = node.value
    return value


_Loader.add_constructor("tag:yaml.org,2002:float", _float)


def load_yaml(text: str) -> Any:
    """The document as plain values. Raises yaml.YAMLError, also for one that is too large, too deep or holds itself."""
    try:
        value = yaml.load(text, Loader=_Loader)
        if _count(value, {}) > MAX_VALUES:
            raise yaml.YAMLError(f"its aliases stand for more than {MAX_VALUES} values")
        return value
    except RecursionError as error:
        raise yaml.YAMLError("it is nested too deeply") from error
    except (ValueError, TypeError, OverflowError) as error:  # of the constructors of values, such as dates
        raise yaml.YAMLError(str(error)) from error


def _count(value: Any, known: dict[int, int]) -> int:
    """Values below `value`, those behind aliases counted each time; `known` holds what was counted, 0 what is being."""
    if not isinstance(value, dict | list):
        return 1
    found = known.get(id(value))
    if found == 0:
        raise yaml.YAMLError("an alias stands inside what it stands for")
    if found is None:
        known[id(value)] = 0
        parts = [part for pair in value.items() for part in pair] if isinstance(value, dict) else value
        found = known[id(value)] = 1 + sum(_count(part, known) for part in parts)
    return found
