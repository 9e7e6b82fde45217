"""The kinds of runs of `rl-vlm train`. The class of a configuration says which kind it is."""

from __future__ import annotations

from typing import Any

from rl_vlm.config import TrainConfig
from rl_vlm.models.loading import check_quantization
from rl_vlm.plugins import load_plugins
from rl_vlm.runs import policy, preference
from rl_vlm.runs.run_kind import RunKind

_KINDS: tuple[RunKind[Any], ...] = (policy.KIND, preference.KIND)


def kind_of(config: TrainConfig) -> RunKind[Any]:
    """What belongs to a configuration."""
    return next(kind for kind in _KINDS if isinstance(config, kind.config))


def inspect_run(config: TrainConfig) -> dict[str, Any]:
    """Check everything that can be checked without starting Ray: model folder, data, environment, resources.

    Returns what was found, to be printed. Raises UserInputError.
    """
    load_plugins(config.plugins)
    check_quantization(config.serving.quantization)
    return kind_of(config).inspect(config)
