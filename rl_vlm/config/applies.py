"""Which keys a run reads. Setting a key that its algorithm or engine ignores is an error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rl_vlm.config.section import Section


@dataclass(frozen=True, slots=True)
class Reads:
    """What an algorithm reads.

    keys: sections or single keys; a section stands for all that is in it.
    instead: a key that the algorithm ignores -> the key that it reads in its place.
    """

    keys: tuple[str, ...]
    instead: Mapping[str, str] = field(default_factory=dict)

    def __contains__(self, key: str) -> bool:
        return _is_in(key, (*_EVERY_RUN, *self.keys))

    def only(self, data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        """A nested configuration without what is not read."""
        found: dict[str, Any] = {}
        for name, value in data.items():
            key = prefix + name
            if key in self:
                found[name] = value
            elif isinstance(value, dict) and (inner := self.only(value, f"{key}.")):
                found[name] = inner
        return found


_EVERY_RUN = ("name", "plugins", "seed", "deterministic", "resources", "http")
# Keys that one engine alone reads.
_OF_ENGINE = {
    "vllm": ("serving.vllm",),
    "transformers": ("serving.max_rows", "serving.max_kv_gib", "serving.num_threads"),
}


def refuse_unread(config: Section, where: str, reads: Reads, engine: str | None = None) -> None:
    """Raise ValueError for a key that is set and that neither this kind of run nor this engine reads.

    `where` names the kind of run, such as "with algorithm.name grpo"; without an engine, all engines' keys are the same to it.

    An engine's keys may be set to their defaults under another engine: a saved configuration holds them all, and
    `rl-vlm serve` may choose another engine.
    """
    for key, is_default in _set_keys(config):
        if key not in reads:
            instead = reads.instead.get(key)
            advice = f"use {instead}" if instead else "remove it"
            raise ValueError(f"{key} has no effect {where}: {advice}")
        for other, keys in _OF_ENGINE.items():
            if engine is not None and other != engine and not is_default and _is_in(key, keys):
                raise ValueError(
                    f"{key} has no effect with the engine {engine}: remove it, or set serving.engine to {other} (auto means "
                    "vllm where serving.gpus_per_replica is above 0)"
                )


def _set_keys(section: Section, prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Keys that were given, and whether the value is the default; not those of sections that were left out."""
    for name, info in type(section).model_fields.items():
        if name in section.model_fields_set:
            value = getattr(section, name)
            if isinstance(value, Section):
                yield from _set_keys(value, f"{prefix}{name}.")
            else:
                yield prefix + name, value == info.get_default(call_default_factory=True)


def _is_in(key: str, sections: tuple[str, ...]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)
