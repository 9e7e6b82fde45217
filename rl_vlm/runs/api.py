"""`rl_vlm.train`: a run from Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_vlm.config import CommonConfig, RewardFunction, TrainConfig, apply_overrides, parse_config
from rl_vlm.config.loading import read_yaml
from rl_vlm.config.recipes import find_config
from rl_vlm.envs.loading import load_object
from rl_vlm.runs import train as training
from rl_vlm.runs.run_folder import RunDir
from rl_vlm.types import UserInputError

DATA_ENV = "QA-v0"
Reward = Callable[..., Any] | str | Mapping[str, Any]  # a function, what names one, or a part of `env.reward.functions`


@dataclass(frozen=True, slots=True)
class Run:
    """A run that has ended: its folder, and the figures of its `result.json`."""

    folder: RunDir
    metrics: dict[str, Any]


def train(
    config: str | Path | Mapping[str, Any] | TrainConfig,
    *,
    dataset: str | Path | Mapping[str, str] | None = None,
    reward: Reward | list[Reward] | None = None,
    overrides: Mapping[str, Any] | None = None,
    run_dir: RunDir | None = None,
    resume: bool = False,
    overwrite: bool = False,
) -> Run:
    """Train to the end, as `rl-vlm train` does.

    config: a YAML file, a recipe's name, the content of a file, or a configuration. dataset: data of your own, which
    QA-v0 asks in place of the configuration's environment. reward: functions with TRL's signature in place of the
    configuration's reward. overrides: dotted keys and their values, which win over all else.

    Raises UserInputError before anything starts, later InterruptedRun and RLVLMError.
    """
    if isinstance(config, CommonConfig):
        config = config.model_dump(exclude_unset=True)
    data = dict(config) if isinstance(config, Mapping) else read_yaml(find_config(config), ())
    env: dict[str, Any] = dict(data.get("env") or {})
    if dataset is not None:
        if not isinstance(dataset, str | Path | Mapping):
            raise UserInputError(
                f"dataset must be a path, a hub name, or one for each split, not a {type(dataset).__name__}: write it "
                "to a file, as datasets.Dataset.to_parquet does."
            )
        sources = dict(dataset) if isinstance(dataset, Mapping) else str(dataset)
        env = {**(env if env.get("id") == DATA_ENV else {}), "id": DATA_ENV, "data": sources}
    if reward is not None:
        env["reward"] = [_named(one) for one in (reward if isinstance(reward, list) else [reward])]
    run = parse_config(apply_overrides({**data, "env": env}, overrides or {}))
    folder = run_dir or Path("runs") / run.name
    return Run(folder, training.train(run, folder, resume=resume, overwrite=overwrite))


def _named(reward: Reward) -> Any:
    """A function by the name under which other processes import it, or as the object itself, as those of notebooks,
    scripts and other functions are."""
    if not callable(reward):
        return reward
    module, name = getattr(reward, "__module__", ""), getattr(reward, "__qualname__", ".")
    if module != "__main__" and "." not in name and load_object(f"{module}:{name}") is reward:
        return RewardFunction(function=f"{module}:{name}")
    return RewardFunction.of(reward, getattr(reward, "__name__", type(reward).__name__))
