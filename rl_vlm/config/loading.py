"""Loading a configuration from YAML and dotted overrides, and saving it."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import yaml
from pydantic import ValidationError

from rl_vlm.config.elsewhere import counterpart
from rl_vlm.config.learner import without_preset_keys
from rl_vlm.config.policy import PolicyConfig
from rl_vlm.config.preference import PreferenceConfig
from rl_vlm.config.recipes import find_config
from rl_vlm.config.section import Section, WrittenFloat, keys_of, section_of
from rl_vlm.config.sft import SFTConfig
from rl_vlm.files import write_atomic
from rl_vlm.types import UserInputError

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


class _Dumper(yaml.SafeDumper):
    """Quotes texts that YAML 1.1 or 1.2 would read as something else."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in _CORE:
    for _class in (_Loader, _Dumper):
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


# What has the keys of each class, in error messages.
_KINDS: dict[type[Section], str] = {
    PolicyConfig: "with algorithm.name grpo or ppo",
    PreferenceConfig: "with algorithm.name preference_sac",
    SFTConfig: "in `rl-vlm sft`",
}


def explain(error: ValidationError, root: type[Section]) -> str:
    """All that is wrong with a configuration of class `root`, a sentence in each line."""
    sentences = (sentence for one in error.errors() for sentence in _sentences(one, root))
    return "\n".join(dict.fromkeys(sentences))


def _sentences(error: Mapping[str, Any], root: type[Section]) -> Iterator[str]:
    # Without the members of a union, of which each has an error.
    location = [str(part) for part in error["loc"] if part != "str" and "[" not in str(part)]
    key = ".".join(location)
    if error["type"] == "extra_forbidden":
        # The keys of a section that is another system's.
        inner = [] if len(location) > 1 or _of_any_kind(key) else [name for name, _ in leaves(error["input"], key)]
        for name in [name for name in inner if counterpart(name, [*keys_of(root)])] or [key]:
            yield _unknown(name.split("."), root)
    elif error["type"] == "value_error":
        for sentence in str(error["ctx"]["error"]).split("\n"):
            named = not key or sentence.startswith(key.split(".")[0])
            yield f"Config: {sentence}." if named else f"Config key {key}: {sentence}."
    else:
        shown = repr(error.get("input"))
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        yield f"Config key {key or 'file'}: {error['msg'][0].lower()}{error['msg'][1:]}; got {shown}."


def _unknown(location: Sequence[str], root: type[Section]) -> str:
    section = root
    for part in location[:-1]:
        if part in section.model_fields:  # and not a place in a list
            section = section_of(section.model_fields[part].annotation) or section
    key, parent = ".".join(location), "".join(f"{part}." for part in location[:-1])
    meant = _meant(key, parent, [*keys_of(section, parent)], [*keys_of(root)])
    if root in _KINDS and _of_any_kind(key):
        advice = f"{meant[0].lower()}{meant[1:]}" if meant else "remove it."
        return f"Config key {key} has no effect {_KINDS[root]}: {advice}"
    known = f"Known keys here: {', '.join(section.model_fields)}."
    return f"Unknown config key {key}. {meant or known}"


def _of_any_kind(key: str) -> bool:
    return any(key in keys_of(kind) for kind in _KINDS)


def _meant(key: str, parent: str, beside: Sequence[str], everywhere: Sequence[str]) -> str:
    """What to write in place of an unknown key, in a sentence; "" if there is no telling. The spelling leads to keys
    of the same section only."""
    name = key.removeprefix(parent).lower().replace("-", "_")
    siblings = [one for one in beside if "." not in one.removeprefix(parent)]
    typo = _nearest(name, siblings, 0.85)
    if not typo and (foreign := counterpart(key, everywhere)):
        return foreign
    meant = typo or _nearest(name, beside if parent else siblings, 0.78) or _nearest(name, everywhere, 1.0)
    return f"Did you mean {meant}?" if meant else ""


def _nearest(name: str, keys: Iterable[str], cutoff: float) -> str | None:
    """The first and outermost of the keys whose last part is most like the name, if one is as like as `cutoff`."""
    known: dict[str, str] = {}
    for key in sorted(keys, key=lambda key: key.count(".")):
        known.setdefault(key.rpartition(".")[2], key)
    alike = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return known[alike[0]] if alike else None


_Config = TypeVar("_Config", bound=Section)
TrainConfig: TypeAlias = PolicyConfig | PreferenceConfig
# The class of a configuration, by algorithm.name.
_CLASSES: dict[str, type[PolicyConfig] | type[PreferenceConfig]] = {
    "grpo": PolicyConfig,
    "ppo": PolicyConfig,
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
    for override in overrides:
        apply_override(data, *parse_override(override))
    return of_policy(parse_config(data))


def read_yaml(path: str | Path | None, overrides: Iterable[str]) -> dict[str, Any]:
    """The content of a YAML file with overrides, unchecked."""
    data: dict[str, Any] = {}
    if path is not None:
        file = Path(path)
        loaded = load_yaml_file(file, "config")
        if loaded is not None and not isinstance(loaded, dict):
            kind = type(loaded).__name__
            raise UserInputError(f"The config {file} must hold sections such as `model:`, not a {kind}.")
        data = loaded or {}
    for override in overrides:
        apply_override(data, *parse_override(override))
    return data


def load_yaml_file(file: Path, what: str) -> Any:
    """The content of a YAML file, which `what` names in an error. Raises UserInputError."""
    try:
        return load_yaml(file.read_text())
    except OSError as error:
        names = difflib.get_close_matches(file.name, [near.name for near in file.parent.glob("*.y*ml")], n=1)
        hint = f" Did you mean {file.parent / names[0]}?" if names else ""
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


def apply_overrides(data: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of nested `data` with dotted keys set, such as `{"learner.lr": 1e-3}`; a preset comes first."""
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
    write_atomic(path, _dumped(config))


def _dumped(config: TrainConfig | SFTConfig) -> str:
    return str(yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def changes_since(path: Path, config: TrainConfig | SFTConfig) -> dict[str, tuple[Any, Any]]:
    """The keys that a saved configuration has otherwise: key -> (saved, now)."""
    saved, now = (dict(leaves(load_yaml(text))) for text in (path.read_text(), _dumped(config)))
    values = {key: (saved.get(key), now.get(key)) for key in [*saved, *now]}
    return {key: pair for key, pair in values.items() if str(pair[0]) != str(pair[1])}  # as text nan equals itself


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict) or not value:
        yield prefix, value
        return
    for key, inner in value.items():
        yield from leaves(inner, f"{prefix}.{key}" if prefix else str(key))


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
