"""Loading a configuration from YAML and dotted overrides, and saving it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import yaml
from pydantic import ValidationError
from pydantic_core import to_jsonable_python

from rl_vlm.config.algorithm import without_preset_keys
from rl_vlm.config.errors import explain
from rl_vlm.config.policy import PolicyConfig
from rl_vlm.config.preference import PreferenceConfig
from rl_vlm.config.section import Section
from rl_vlm.config.sft import SFTConfig
from rl_vlm.config.yaml_text import EXPONENTS, load_yaml
from rl_vlm.files import write_atomic
from rl_vlm.types import UserInputError

_Config = TypeVar("_Config", bound=Section)
TrainConfig: TypeAlias = PolicyConfig | PreferenceConfig
# The class of a configuration, by algorithm.name.
_CLASSES: dict[str, type[PolicyConfig] | type[PreferenceConfig]] = {
    "grpo": PolicyConfig,
    "ppo": PolicyConfig,
    "preference_sac": PreferenceConfig,
}


def load_config(path: str | Path | None, overrides: Iterable[str] = ()) -> TrainConfig:
    """Read a YAML file, apply `section.key=value` overrides, check everything. Raises UserInputError."""
    return parse_config(read_yaml(path, overrides))


def load_policy_config(path: str | Path | None, overrides: Iterable[str] = ()) -> PolicyConfig:
    """As `load_config`, for what needs a policy. Raises UserInputError for another kind of run."""
    return of_policy(load_config(path, overrides))


def load_sft_config(path: str | Path | None, overrides: Iterable[str] = ()) -> SFTConfig:
    """As `load_config`, for `rl-vlm sft`."""
    return validated(SFTConfig, read_yaml(path, overrides))


def load_served_config(path: str | Path, overrides: Iterable[str] = ()) -> PolicyConfig:
    """The configuration of a run folder whose model is to be served; of a run that trains no policy its model alone counts."""
    data = read_yaml(path, ())
    if "sft" in data or "preference" in data:
        data = {
            key: data[key]
            for key in ("name", "seed", "plugins", "model", "serving", "resources", "http")
            if key in data
        }
    for override in overrides:
        apply_override(data, *parse_override(override))
    return of_policy(parse_config(data))


def read_yaml(path: str | Path | None, overrides: Iterable[str]) -> dict[str, Any]:
    """The content of a YAML file with overrides, unchecked."""
    data: dict[str, Any] = {}
    if path is not None:
        file = Path(path)
        try:
            text = file.read_text()
        except OSError as error:
            raise UserInputError(f"Cannot read the config {file}: {error.strerror or error}.") from error
        except UnicodeDecodeError as error:
            raise UserInputError(f"The config {file} is not a text file ({error.reason}).") from error
        try:
            loaded = load_yaml(text)
        except yaml.YAMLError as error:
            where = getattr(error, "problem_mark", None)
            line = f" in line {where.line + 1}" if where else ""
            raise UserInputError(
                f"The config {file} is not valid YAML{line}: {getattr(error, 'problem', None) or error}."
            ) from error
        if loaded is not None and not isinstance(loaded, dict):
            raise UserInputError(
                f"The config {file} must hold sections such as `model:`, not a {type(loaded).__name__}."
            )
        data = loaded or {}
    for override in overrides:
        apply_override(data, *parse_override(override))
    return data


def parse_config(data: Mapping[str, Any]) -> TrainConfig:
    """Check a nested dictionary; algorithm.name chooses the class. Raises UserInputError, a line for each error."""
    algorithm = data.get("algorithm")
    name = algorithm.get("name") if isinstance(algorithm, Mapping) else None
    if name is not None and name not in _CLASSES:
        raise UserInputError(f"Config key algorithm.name: {name!r} is not one of {', '.join(_CLASSES)}.")
    return validated(_CLASSES[name or "grpo"], data)


def validated(kind: type[_Config], data: Mapping[str, Any]) -> _Config:
    """A configuration of this class. Raises UserInputError, a line for each error."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise UserInputError(explain(error, kind)) from error


def of_policy(config: TrainConfig) -> PolicyConfig:
    """The configuration, if it is one of a policy. Raises UserInputError."""
    if not isinstance(config, PolicyConfig):
        raise UserInputError(f"This needs a policy, and algorithm.name is {config.algorithm.name}: use grpo or ppo.")
    return config


def apply_overrides(data: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of nested `data` with dotted keys set, such as `{"learner.lr": 1e-3}`, a preset before the others."""
    result = copy.deepcopy(dict(data))
    for key in sorted(overrides, key=lambda key: key != "algorithm.preset"):
        apply_override(result, key, overrides[key])
    return result


def apply_override(data: dict[str, Any], key: str, value: Any) -> None:
    """Set one dotted key. A preset replaces what the file says about the keys that it sets; later keys win over it."""
    before = data.get("algorithm")
    replaced = before.get("preset") if isinstance(before, dict) else None
    _set(data, key, value)
    if key == "algorithm.preset":
        data["algorithm"] = without_preset_keys(data["algorithm"], value, replaced)


def save_config(config: TrainConfig | SFTConfig, path: Path) -> None:
    """Write the resolved configuration, atomically. What YAML holds comes back as it was: as JSON nan would be null, a date a text."""
    write_atomic(path, yaml.dump(config.model_dump(), Dumper=_Dumper, sort_keys=False, allow_unicode=True))


class _Dumper(yaml.SafeDumper):
    """Writes what only Python holds, such as a path or numpy's numbers, as JSON would."""


_Dumper.add_implicit_resolver(*EXPONENTS)  # a text that the loader would take for a number is quoted
_Dumper.add_multi_representer(object, lambda dumper, value: dumper.represent_data(to_jsonable_python(value)))


def parse_override(override: str) -> tuple[str, Any]:
    """The key and the YAML value of `key=value`. Raises UserInputError."""
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise UserInputError(f"Override {override!r} must have the form section.key=value, such as learner.lr=1e-3.")
    try:
        value = load_yaml(text) if text else None
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
    node[last] = value
