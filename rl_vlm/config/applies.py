"""Which keys a run reads. A key that its algorithm or engine ignores is an error where it is set, not a silent wish."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rl_vlm.config.section import Section


@dataclass(frozen=True, slots=True)
class Reads:
    """What an algorithm reads.

    keys: sections or single keys; a section stands for all that is in it.
    instead: a key that people set and the algorithm ignores -> the key that does the same there.
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


# By `algorithm.name`. Each algorithm has its line here, and nothing else in the configuration asks which one it is.
READS = {
    "grpo": Reads(
        ("model", "serving", "env", "rollout", "algorithm", "learner", "evaluation", "logging"),
        {
            "preference.total_steps": "algorithm.iterations",
            "preference.sac.lr": "learner.lr",
            "preference.collection.num_env_runners": "rollout.num_env_runners",
            "preference.evaluation.every": "evaluation.every",
        },
    ),
    "preference_sac": Reads(
        (
            "preference",
            "serving",
            *(f"model.{key}" for key in ("path", "dtype", "min_pixels", "max_pixels", "gpu_memory_gib")),
            *(f"env.{key}" for key in ("id", "kwargs")),
            "algorithm.name",
            *(
                f"learner.{key}"
                for key in ("num_learners", "cpus_per_learner", "gpus_per_learner", "num_threads", "max_restarts")
            ),
            "evaluation.timeout_s",
            *(f"logging.{key}" for key in ("checkpoint_every", "keep_checkpoints", "tensorboard", "wandb_project")),
        ),
        {
            "algorithm.iterations": "preference.total_steps",
            "learner.lr": "preference.sac.lr",
            "learner.betas": "preference.sac.betas",
            "env.data": "env.kwargs",
            "env.isolation": "preference.collection.num_env_runners",
            "rollout.num_env_runners": "preference.collection.num_env_runners",
            "rollout.cpus_per_env_runner": "preference.collection.cpus_per_env_runner",
            "rollout.timeout_s": "preference.collection.timeout_s",
            "rollout.temperature": "preference.labels.temperature",
            "evaluation.every": "preference.evaluation.every",
            "evaluation.num_items": "preference.evaluation.episodes",
        },
    ),
}
_EVERY_RUN = ("name", "seed", "deterministic", "resources", "http")
# Keys that one engine alone reads.
_OF_ENGINE = {"vllm": ("serving.vllm",), "transformers": ("serving.max_rows", "serving.num_threads")}


def refuse_unread(config: Section, algorithm: str, engine: str) -> None:
    """Raise ValueError for a key that is set and that neither this algorithm nor this engine reads.

    An engine's keys may be set to their defaults under another engine: a saved configuration holds them all, and whoever
    serves a run may choose another engine.
    """
    reads = READS[algorithm]
    for key, is_default in _set_keys(config):
        if key not in reads:
            instead = reads.instead.get(key)
            advice = f"use {instead}" if instead else "remove it"
            raise ValueError(f"{key} has no effect with algorithm.name {algorithm}: {advice}")
        for other, keys in _OF_ENGINE.items():
            if other != engine and not is_default and _is_in(key, keys):
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
