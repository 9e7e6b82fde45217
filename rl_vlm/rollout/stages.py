"""The environment arguments and weights of a curriculum's stages, blended between stages where asked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from rl_vlm.config import CurriculumSection, EnvSection


def blend(here: Any, there: Any, share: float) -> Any:
    """`here` moved by `share` (0 to 1) of the way to `there`.

    Numbers move linearly, and stay integers (rounded, halves up) where both are. Lists of the same length and mappings move item by item.
    Whatever else differs stays as it is here.
    """
    if _is_number(here) and _is_number(there):
        value = here + (there - here) * share
        return math.floor(value + 0.5) if isinstance(here, int) and isinstance(there, int) else value
    if isinstance(here, list) and isinstance(there, list) and len(here) == len(there):
        return [blend(one, other, share) for one, other in zip(here, there, strict=True)]
    if isinstance(here, Mapping) and isinstance(there, Mapping):
        return {name: blend(value, there[name], share) if name in there else value for name, value in here.items()}
    return here


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def numbers_in(arguments: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of arguments, with dotted names: `weights.0`."""
    for name, value in arguments.items():
        if _is_number(value):
            yield prefix + name, float(value)
        elif isinstance(value, Mapping):
            yield from numbers_in(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            yield from numbers_in({str(place): item for place, item in enumerate(value)}, f"{prefix}{name}.")


class Stages:
    """What each stage sets. A stage's arguments are laid over the environment's own, not over those of the stage before.

    A number that one of two stages leaves out moves from or to the environment's own argument, where it has one.
    """

    def __init__(self, settings: CurriculumSection, env: EnvSection) -> None:
        self._settings = settings
        self._own = {name: part.kwargs for name, part in env.parts.items()}
        self._weights = {part.name: part.weight for part in env.mixture} or {"": 1.0}

    def __len__(self) -> int:
        return len(self._settings.stages)

    def share(self, stage: int, done: int) -> float:
        """How far a run with `done` episodes or iterations is from the stage's start to the next one's: 0 to below 1.

        In steps of 1 / blend_levels; 0 without blending and in the last stage.
        """
        settings = self._settings
        if not settings.blend or stage + 1 >= len(settings.stages):
            return 0.0
        start, end = settings.stages[stage].start or 0, settings.stages[stage + 1].start or 0
        level = (done - start) * settings.blend_levels // (end - start)
        return min(max(level, 0), settings.blend_levels - 1) / settings.blend_levels

    def arguments(self, stage: int, share: float = 0.0) -> dict[str, dict[str, Any]]:
        """By name of the environment: what the stage changes in its arguments."""
        here = {name: self._of(stage, name) for name in self._own}
        if not share:
            return here
        found = {}
        for name, own in self._own.items():
            there = self._of(stage + 1, name)
            before, after = {**own, **here[name]}, {**own, **there}
            # An argument that only the next stage knows has no value to move from.
            keys = [key for key in before if key in here[name] or key in there]
            found[name] = {key: blend(before[key], after[key], share) if key in after else before[key] for key in keys}
        return found

    def values(self, stage: int, share: float = 0.0) -> dict[str, dict[str, Any]]:
        """By name of the environment: the value now of every argument that any stage sets, where it has one."""
        found = {}
        for name, arguments in self.arguments(stage, share).items():
            now = {**self._own[name], **arguments}
            ever = dict.fromkeys(key for place in range(len(self)) for key in self._of(place, name))
            found[name] = {key: now[key] for key in ever if key in now}
        return found

    def _of(self, stage: int, name: str) -> dict[str, Any]:
        given = self._settings.stages[stage].env
        return dict(given.get(name, {})) if name else given

    def weights(self, stage: int, share: float = 0.0) -> dict[str, float]:
        """By name of the environment: its weight."""
        here = self._weights | self._settings.stages[stage].mixture
        if not share:
            return here
        return dict(blend(here, self._weights | self._settings.stages[stage + 1].mixture, share))

    def all_arguments(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """All that will ever be set: where it comes from, the environment's name, the arguments; equal ones once."""
        levels = self._settings.blend_levels if self._settings.blend else 1
        seen: list[tuple[str, dict[str, Any]]] = []
        for stage, title in enumerate(self._settings.names):
            for level in range(levels if stage + 1 < len(self) else 1):
                for name, arguments in self.arguments(stage, level / levels).items():
                    if (name, arguments) not in seen:
                        seen.append((name, arguments))
                        between = f", {level}/{levels} of the way to the next" if level else ""
                        yield f"curriculum.stages, stage {title}{between}", name, arguments
