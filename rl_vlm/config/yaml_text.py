"""Reads YAML that may come from elsewhere: plain values, of bounded size also after its aliases are followed."""

from __future__ import annotations

import re
from typing import Any

import yaml

MAX_CHARACTERS = 4 * 2**20
MAX_DEPTH = 64
MAX_VALUES = 200_000

_MERGE = "tag:yaml.org,2002:merge"


class _StrictLoader(yaml.SafeLoader):
    """Refuses deep nesting before Python's own limit (an error of that is too late for what is half made), and a key that stands twice.

    Of two equal keys YAML's libraries take the last: a section that was pasted a second time would lose the first without a word.
    """

    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """As the base class, at most `MAX_DEPTH` deep."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise yaml.YAMLError("it is nested too deeply")
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def compose_mapping_node(self, anchor: Any) -> Any:
        """As the base class, with keys that differ; what `<<` merges may be set anew."""
        node = super().compose_mapping_node(anchor)
        seen: set[Any] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                value = self.construct_object(key)
                if value in seen:
                    raise yaml.MarkedYAMLError(problem=f"{key.value[:80]!r} stands twice", problem_mark=key.start_mark)
                seen.add(value)
        return node


# YAML 1.1 wants a point and a sign in a number with an exponent: 1e-3 would be text.
EXPONENTS = ("tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789"))
_StrictLoader.add_implicit_resolver(*EXPONENTS)


def load_yaml(text: str) -> Any:
    """The document as plain values. Raises yaml.YAMLError, also for one that is too large, too deep or holds itself."""
    if len(text) > MAX_CHARACTERS:
        raise yaml.YAMLError(f"it has {len(text)} characters, more than {MAX_CHARACTERS}")
    try:
        value = yaml.load(text, Loader=_StrictLoader)
        if _count(value, {}) > MAX_VALUES:
            raise yaml.YAMLError(f"its aliases stand for more than {MAX_VALUES} values")
    except RecursionError as error:  # of aliases, one inside the other
        raise yaml.YAMLError("it is nested too deeply") from error
    except (
        ValueError,
        TypeError,
        OverflowError,
    ) as error:  # what the constructors of values raise, of dates for example
        raise yaml.YAMLError(str(error)) from error
    return value


def _count(value: Any, known: dict[int, int]) -> int:
    """Values below `value`, those behind aliases counted each time; `known` holds what was counted, 0 what is being."""
    if not isinstance(value, dict | list | set | tuple):
        return 1
    found = known.get(id(value))
    if found == 0:
        raise yaml.YAMLError("an alias stands inside what it stands for")
    if found is None:
        known[id(value)] = 0
        parts = [part for pair in value.items() for part in pair] if isinstance(value, dict) else value
        found = known[id(value)] = 1 + sum(_count(part, known) for part in parts)
    return found
