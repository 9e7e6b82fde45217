"""Ray metrics of one process, for Prometheus, which puts `ray_` in front of their names."""

from __future__ import annotations

from typing import TypeVar

from ray.util.metrics import Metric

PREFIX = "rl_vlm_"

M = TypeVar("M", bound=Metric)


class RayMetrics:
    """Makes metrics at their first use. Each carries the tags of the process."""

    def __init__(self, **tags: str) -> None:
        self._tags = tags
        self._made: dict[str, Metric] = {}

    def metric(self, kind: type[M], name: str, description: str, *options: object, keys: tuple[str, ...] = ()) -> M:
        """The metric `name`. `keys`: tags that come with each value, beside those of the process."""
        if name not in self._made:
            made = self._made[name] = kind(PREFIX + name, description, *options, tag_keys=(*self._tags, *keys))
            made.set_default_tags(self._tags)
        return self._made[name]  # type: ignore[return-value]
