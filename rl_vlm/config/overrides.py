"""Dotted overrides, `section.key=value`: read from text, and set in a nested dictionary."""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import NoneType
from typing import Any, get_args

import yaml

from rl_vlm.config.learner import without_preset_keys
from rl_vlm.config.policy import PolicyConfig
from rl_vlm.config.preference import PreferenceConfig
from rl_vlm.config.section import Section, section_of
from rl_vlm.config.sft import SFTConfig
from rl_vlm.config.yaml_text import load_yaml
from rl_vlm.types import UserInputError

logger = logging.getLogger(__name__)


def apply_overrides(data: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of nested `data` with dotted keys set, such as `{"learner.lr": 1e-3}`; a preset comes first. Keys that
    these make idle are left out, with a warning."""
    return _overridden(data, sorted(overrides.items(), key=lambda pair: pair[0] != "algorithm.preset"))


def apply_words(data: Mapping[str, Any], words: Iterable[str]) -> dict[str, Any]:
    """As `apply_overrides`, of `section.key=value` in this order. Raises UserInputError."""
    return _overridden(data, [parse_override(word) for word in words])


def _overridden(data: Mapping[str, Any], pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    result = copy.deepcopy(dict(data))
    for key, value in pairs:
        apply_override(result, key, value)
    for section, place in _SECTIONS:
        _drop_idle(result, section, place, {key for key, _ in pairs})
    return result


def apply_override(data: dict[str, Any], key: str, value: Any) -> None:
    """Set one dotted key, or remove it: null is for keys that can be null. A preset replaces what the file says about
    the keys that it sets; later keys win over it."""
    before = data.get("algorithm")
    replaced = before.get("preset") if isinstance(before, dict) else None
    _set(data, key, value)
    if key == "algorithm.preset":
        data["algorithm"] = without_preset_keys(data["algorithm"], value, replaced)


def parse_override(override: str) -> tuple[str, Any]:
    """The key and the YAML value of `key=value`. Raises UserInputError."""
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise UserInputError(f"Override {override!r} must have the form section.key=value, such as learner.lr=1e-3.")
    if not text.strip():
        raise UserInputError(f"Override {override!r} has no value: write null where none is meant.")
    try:
        value = load_yaml(text)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or error
        raise UserInputError(f"The value of override {override!r} is not valid YAML ({problem}): quote it.") from error
    return key.strip(), value


def _set(data: dict[str, Any], key: str, value: Any) -> None:
    node = data
    *parents, last = key.split(".")
    for parent in parents:
        child = node[parent] = {} if node.get(parent) is None else node[parent]
        if not isinstance(child, dict):
            raise UserInputError(f"Config key {key}: {parent} is a value, not a section.")
        node = child
    if value is None and key in _NEVER_NULL:
        node.pop(last, None)
    else:
        node[last] = value


def _drop_idle(data: dict[str, Any], section: type[Section], place: str, given: Collection[str]) -> None:
    """Leave out what the file says of keys that have no effect with a given one."""
    here: Any = data
    for part in place.split(".")[:-1]:
        here = here.get(part) if isinstance(here, dict) else None
    for rule in section.conditional if isinstance(here, dict) else ():
        chooser = f"{place}{rule.chooser}"
        unchecked = section.model_construct(**here)
        with suppress(TypeError):  # of a value of a wrong type, which is an error later
            if chooser not in given or unchecked.reads(rule):
                continue
            for key in [key for key in unchecked.changed(*rule.keys) if f"{place}{key}" not in given]:
                del here[key]
                logger.warning(
                    "%s%s is left out: it has no effect with %s=%s.", place, key, chooser, here.get(rule.chooser)
                )


def _sections(kind: type[Section], place: str = "") -> Iterator[tuple[type[Section], str]]:
    """The sections of a configuration, each with its name and a point."""
    yield kind, place
    for name, field in kind.model_fields.items():
        if inner := section_of(field.annotation):
            yield from _sections(inner, f"{place}{name}.")


_SECTIONS = tuple(dict.fromkeys(one for kind in (PolicyConfig, PreferenceConfig, SFTConfig) for one in _sections(kind)))
_NEVER_NULL = frozenset(
    f"{place}{name}"
    for section, place in _SECTIONS
    for name, field in section.model_fields.items()
    if NoneType not in get_args(field.annotation) and field.annotation is not Any
)


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict) or not value:
        yield prefix, value
        return
    for key, inner in value.items():
        yield from leaves(inner, f"{prefix}.{key}" if prefix else str(key))
