"""Loading a configuration from YAML and dotted overrides, and saving it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import yaml
from pydantic import ValidationError

from rl_vlm.config.complaints import explain
from rl_vlm.config.overrides import apply_words, leaves
from rl_vlm.config.policy import PolicyConfig
from rl_vlm.config.preference import PreferenceConfig
from rl_vlm.config.recipes import find_config
from rl_vlm.config.section import Section
from rl_vlm.config.sft import SFTConfig
from rl_vlm.config.yaml_text import Dumper, load_yaml
from rl_vlm.files import did_you_mean, write_atomic
from rl_vlm.types import UserInputError

_Config = TypeVar("_Config", bound=Section)
TrainConfig: TypeAlias = PolicyConfig | PreferenceConfig
_DATA = "data, which `rl-vlm train qa_tiny env.data=FILE` or `rl-vlm sft sft_tiny sft.data=FILE` reads"
_NO_YAML = {".toml": "TOML, which other systems read"} | dict.fromkeys((".jsonl", ".csv", ".tsv", ".parquet"), _DATA)
# The class of a configuration, by algorithm.name.
_CLASSES: dict[str, type[PolicyConfig] | type[PreferenceConfig]] = {
    "grpo": PolicyConfig,
    "ppo": PolicyConfig,
    "distill": PolicyConfig,
    "preference_sac": PreferenceConfig,
}


def load_config(path: str | Path | None, overrides: Iterable[str] = ()) -> TrainConfig:
    """Read a YAML file or a recipe, apply `section.key=value` overrides, check everything. Raises UserInputError."""
    return parse_config(read_yaml(path and find_config(path), overrides))


def load_sft_config(path: str | Path | None, overrides: Iterable[str] = ()) -> SFTConfig:
    """As `load_config`, for `rl-vlm sft`."""
    return validated(SFTConfig, read_yaml(path and find_config(path), overrides))


def load_served_config(path: str | Path, overrides: Iterable[str] = ()) -> PolicyConfig:
    """The configuration of a run folder whose model is to be served; of other runs only their model counts."""
    data = read_yaml(path, ())
    if "sft" in data or "preference" in data:
        kept = ("name", "seed", "plugins", "model", "serving", "resources", "http")
        data = {key: value for key, value in data.items() if key in kept}
    return of_policy(parse_config(apply_words(data, overrides)))


def read_yaml(path: str | Path | None, overrides: Iterable[str]) -> dict[str, Any]:
    """The content of a YAML file with overrides, unchecked."""
    data: dict[str, Any] = {}
    if path is not None:
        file = Path(path)
        if file.suffix in _NO_YAML:
            raise UserInputError(f"{file} is {_NO_YAML[file.suffix]}: give a YAML file or the name of a recipe.")
        data = load_yaml_file(file, "config")
        if data is None:
            raise UserInputError(f"The config {file} is empty: `rl-vlm recipes` lists recipes to begin with.")
        if not isinstance(data, dict):
            kind = type(data).__name__
            raise UserInputError(f"The config {file} must hold sections such as `model:`, not a {kind}.")
    return apply_words(data, overrides)


def load_yaml_file(file: Path, what: str) -> Any:
    """The content of a YAML file, which `what` names in an error. Raises UserInputError."""
    try:
        return load_yaml(file.read_text())
    except OSError as error:
        hint = did_you_mean(file, "*.y*ml")
        hint += " `rl-vlm recipes` lists what comes with the package." if what == "config" else ""
        raise UserInputError(f"Cannot read the {what} {file}: {error.strerror or error}.{hint}") from error
    except UnicodeDecodeError as error:
        raise UserInputError(f"The {what} {file} is not a text file ({error.reason}).") from error
    except yaml.YAMLError as error:
        where, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or error
        line = f" in line {where.line + 1}" if where else ""
        raise UserInputError(f"The {what} {file} is not valid YAML{line}: {problem}.") from error


def parse_config(data: Mapping[str, Any]) -> TrainConfig:
    """Check a nested dictionary. Raises UserInputError, a line for each error."""
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


def save_config(config: TrainConfig | SFTConfig, path: Path) -> None:
    write_atomic(path, _dumped(config))


def _dumped(config: TrainConfig | SFTConfig) -> str:
    return str(yaml.dump(config.model_dump(mode="json"), Dumper=Dumper, sort_keys=False, allow_unicode=True))


def changes_since(path: Path, config: TrainConfig | SFTConfig) -> dict[str, tuple[Any, Any]]:
    """The keys that a saved configuration has otherwise: key -> (saved, now)."""
    saved, now = (dict(leaves(load_yaml(text))) for text in (path.read_text(), _dumped(config)))
    values = {key: (saved.get(key), now.get(key)) for key in [*saved, *now]}
    return {key: pair for key, pair in values.items() if str(pair[0]) != str(pair[1])}  # as text nan equals itself
