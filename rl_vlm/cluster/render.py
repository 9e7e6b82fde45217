"""Renders manifests from values: `rl-vlm cluster render`, and the commented file of values that people edit."""

from __future__ import annotations

import copy
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from jinja2 import DictLoader, Environment, StrictUndefined
from pydantic import ValidationError

from rl_vlm.cluster.gpus import check_gpus
from rl_vlm.cluster.values import PREEMPTIBLE, WORKER_TYPES, ClusterValues, WorkerSection
from rl_vlm.config.errors import explain
from rl_vlm.config.loading import read_yaml
from rl_vlm.config.section import Section, section_of
from rl_vlm.files import write_atomic
from rl_vlm.types import UserInputError

TARGETS: dict[str, tuple[str, ...]] = {
    "aws": ("aws/cluster.yaml",),
    "gcp": ("gcp/cluster.yaml",),
    "onprem": ("onprem/cluster.yaml",),
    "kuberay": tuple(
        f"kuberay/{name}.yaml" for name in ("storage", "networkpolicy", "raycluster", "rayjob", "rayservice")
    ),
    "docker": ("docker/Dockerfile.cpu", "docker/Dockerfile.gpu"),
    "apptainer": ("slurm/rl_vlm.def",),
}


def load_values(path: Path | None, overrides: Iterable[str] = ()) -> ClusterValues:
    """The values of a file (None: the defaults) with `key=value` changes. Raises UserInputError."""
    data = copy.deepcopy(ClusterValues().model_dump())
    _merge(data, read_yaml(path, ()))
    _merge(data, read_yaml(None, overrides))
    try:
        return ClusterValues.model_validate(data)
    except ValidationError as error:
        raise UserInputError(explain(error, ClusterValues)) from error


def _merge(data: dict[str, Any], changes: Mapping[str, Any], section: type[Section] | None = ClusterValues) -> None:
    """Lay changes over the values of sections, so that a file need not name all keys; lists and mappings are replaced."""
    for key, value in changes.items():
        field = section.model_fields.get(key) if section is not None else None
        inner = section_of(field.annotation) if field is not None else None
        if inner is not None and isinstance(value, dict) and isinstance(data.get(key), dict):
            _merge(data[key], value, inner)
        else:
            data[key] = value


def render(values: ClusterValues, targets: Iterable[str] = ()) -> dict[str, str]:
    """File names (below the folder of manifests) and contents of some targets, or of all. Raises UserInputError."""
    chosen = list(targets) or list(TARGETS)
    if unknown := [name for name in chosen if name not in TARGETS]:
        raise UserInputError(f"There is no target {unknown[0]}: choose from {', '.join(TARGETS)}.")
    workers = _workers(values)
    if "kuberay" in chosen:
        check_gpus(values, workers)
    environment = _environment()
    context = {"v": values, "workers": workers, "twin": PREEMPTIBLE, "ray_version": version("ray")}
    context["placement"] = placement(values)
    return {
        name: environment.get_template(f"{name}.j2").render(context) for target in chosen for name in TARGETS[target]
    }


def write(manifests: Mapping[str, str], folder: Path) -> list[Path]:
    """Write what has changed and return those files. Raises UserInputError."""
    changed = []
    for name, text in manifests.items():
        path = folder / name
        try:
            if path.is_file() and path.read_text() == text:
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, text)
        except OSError as error:
            raise UserInputError(
                f"Cannot write {path} ({error.strerror}): choose another folder with --out."
            ) from error
        changed.append(path)
    return changed


def placement(values: ClusterValues) -> list[str]:
    """The changes to a run's configuration that send its actors to the types of workers that there are."""
    found = _workers(values)
    kinds = {"replicas": "gpu_serving", "learners": "gpu_learner", "env_runners": "cpu_env_runner"}
    return [
        f"resources.{actors}_on={kind}"
        for actors, kind in kinds.items()
        if kind in found or kind + PREEMPTIBLE in found
    ]


def _workers(values: ClusterValues) -> dict[str, WorkerSection]:
    """The types of workers of which there may be nodes."""
    every = {name: getattr(values.workers, name) for name in WORKER_TYPES}
    return {name: worker for name, worker in every.items() if worker.max}


def _environment() -> Environment:
    root = files("rl_vlm.cluster") / "templates"
    templates = {"/".join(name): source.read_text("utf-8") for name, source in _tree(root) if name[-1].endswith(".j2")}
    environment = Environment(
        loader=DictLoader(templates),
        undefined=StrictUndefined,
        autoescape=False,  # the output is YAML and shell; `json` and `shell` quote
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # JSON's strings are YAML's double-quoted ones.
    environment.filters["json"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.filters["shell"] = shlex.quote
    return environment


def _tree(folder: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for item in sorted(folder.iterdir(), key=lambda item: item.name):
        if item.is_dir():
            yield from _tree(item, (*prefix, item.name))
        else:
            yield (*prefix, item.name), item


def commented_values(values: ClusterValues) -> str:
    """The values as YAML that says what each key is for."""
    head = "# What people change about a cluster. `make cluster` renders all manifests from it; edit no manifest by hand.\n"
    return head + "\n".join(_lines(ClusterValues, values.model_dump(mode="json"), "", set())) + "\n"


def _lines(section: type[Section], data: Mapping[str, Any], indent: str, told: set[type[Section]]) -> Iterator[str]:
    explains = section not in told  # the five types of workers have the same keys: the first explains them
    told.add(section)
    for name, field in section.model_fields.items():
        inner, value = section_of(field.annotation), data[name]
        if inner is not None:
            about = f" # {str(inner.__doc__).splitlines()[0]}" if inner not in told else ""
            yield from ("", f"{indent}{name}:{about}") if not indent else (f"{indent}{name}:{about}",)
            yield from _lines(inner, value, indent + "  ", told)
            continue
        text = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
        about = f" # {field.description}" if field.description and explains else ""
        yield f"{indent}{name}: {text.removesuffix('...' + chr(10)).strip()}{about}"
