"""The regular expressions in an adapter's configuration, matched in a process with a deadline: some take forever."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from rl_vlm.limits import call_limited
from rl_vlm.types import UserInputError

_SECONDS, _MEMORY = 20.0, 2**29
_PLAIN = re.compile(r"\w+")


def without_patterns(config: dict[str, Any], modules: Iterable[str]) -> dict[str, Any]:
    """The configuration (peft's adapter_config.json) with each pattern replaced by the names of the modules that it matches.

    `modules` are the names of all modules of the model. Raises UserInputError for patterns that are invalid or do not end.
    """
    names, keys = sorted(modules), ("target_modules", "exclude_modules")
    single = [key for key in keys if isinstance(config.get(key), str) and config[key] != "all-linear"]
    tables = {key: config.get(key) or {} for key in ("rank_pattern", "alpha_pattern")}
    if not all(isinstance(table, dict) for table in tables.values()):
        raise UserInputError("The adapter's rank_pattern and alpha_pattern must map patterns to numbers.")
    # As peft does: the first pattern that matches a name, or its end, counts.
    wanted = [config[key] for key in single]
    wanted += [rf"(?:.*\.)?(?:{pattern})" for table in tables.values() for pattern in table]
    found = iter(_matching(wanted, names) if wanted else [])
    resolved = dict(config) | {key: next(found) for key in single}
    for key, table in tables.items():
        values: dict[str, Any] = {}
        for value in table.values():
            for name in next(found):
                values.setdefault(rf"^{re.escape(name)}", value)
        resolved[key] = values
    layers = config.get("layers_pattern") or []
    if not all(
        isinstance(one, str) and _PLAIN.fullmatch(one) for one in ([layers] if isinstance(layers, str) else layers)
    ):
        raise UserInputError("The adapter's layers_pattern must be names, such as layers.")
    return resolved


def _matching(patterns: list[str], names: list[str]) -> list[list[str]]:
    found: list[list[str]] = call_limited(
        f"{__name__}:match",
        (patterns, names),
        what="The adapter's configuration, with its patterns for names of modules,",
        seconds=_SECONDS,
        memory=_MEMORY,
    )
    return found


def match(patterns: list[str], names: list[str]) -> list[list[str]]:
    """For each pattern the names that match as a whole. Raises UserInputError for an invalid pattern."""
    found = []
    for pattern in patterns:
        try:
            compiled = re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise UserInputError(
                f"The adapter's pattern {pattern[:80]!r} is no regular expression ({error})."
            ) from error
        found.append([name for name in names if compiled.fullmatch(name)])
    return found
