"""`rl-vlm eval` of a preference run: the agent of a checkpoint plays in this process, without Ray or a labeller."""

from __future__ import annotations

import json
import time
from contextlib import closing
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load_file

from rl_vlm.algorithms.checkpoint import AGENT, latest_checkpoint, read_state
from rl_vlm.config import PreferenceConfig
from rl_vlm.evaluation.heldout import EvaluationOptions
from rl_vlm.files import write_atomic
from rl_vlm.preference.collector import NumpyActor, environment_errors, make_run_env
from rl_vlm.preference.evaluation import evaluate, evaluation_metrics, evaluation_seeds
from rl_vlm.types import UserInputError


def evaluate_preference_run(
    config: PreferenceConfig,
    *,
    adapter: Path | None = None,
    run_dir: Path | None = None,
    out: Path | None = None,
    options: EvaluationOptions | None = None,
) -> dict[str, Any]:
    """Play the evaluation episodes with the agent of `run_dir`, a run folder or a checkpoint. Raises UserInputError,
    CollectionError."""
    for option in fields(options) if options is not None else ():
        if option.name != "overwrite" and getattr(options, option.name) != option.default:
            raise UserInputError(
                f"--{option.name.replace('_', '-')}: this is for policies that see images, and the agent of a "
                "preference run sees the state."
            )
    if adapter is not None or run_dir is None:
        raise UserInputError(
            "A preference run has an agent and no adapter: name its run folder, or one of its checkpoints, with "
            "--run-dir."
        )
    found = (run_dir / AGENT).is_file()
    checkpoint = run_dir if found else latest_checkpoint(run_dir / "checkpoints", read_state)
    if checkpoint is None:
        raise UserInputError(
            f"{run_dir} holds no complete checkpoint: name the folder of a preference run, or a checkpoint."
        )
    step = int(read_state(checkpoint)["step"])
    actor = _load_actor(config, checkpoint)
    end_on_success, started = config.preference.evaluation.end_on_success, time.monotonic()
    with environment_errors(), closing(make_run_env(config)) as env:
        results = evaluate(env, actor, evaluation_seeds(config), end_on_success=end_on_success)
    episodes = [{name: value for name, value in asdict(result).items() if name != "frames"} for result in results]
    summary = {
        "env": config.env.id,
        "checkpoint": str(checkpoint),
        "step": step,
        **evaluation_metrics(results),
        "seconds": round(time.monotonic() - started, 2),
        "episodes": episodes,
    }
    if out is not None:
        write_atomic(out, json.dumps(summary, indent=2) + "\n")
    return summary


def _load_actor(config: PreferenceConfig, checkpoint: Path) -> NumpyActor:
    try:
        arrays = load_file(checkpoint / AGENT)
        depth = sum(name.startswith("actor.") and name.endswith(".weight") for name in arrays)
        layers = [(arrays[f"actor.{index}.weight"], arrays[f"actor.{index}.bias"]) for index in range(depth)]
        actor = NumpyActor(layers, config.preference.sac.log_std_bounds)
        sizes = (layers[0][0].shape[1], len(layers[-1][1]) // 2)
    except (OSError, ValueError, KeyError, IndexError, SafetensorError) as error:
        raise UserInputError(f"The checkpoint {checkpoint} is corrupt ({error}): use an older one.") from error
    with closing(make_run_env(config)) as env:
        wanted = (env.observation_space.shape[0], env.action_space.shape[0])
    if sizes != wanted:
        raise UserInputError(
            f"The checkpoint's agent takes {sizes[0]} observations and gives {sizes[1]} actions, {config.env.id} has "
            f"{wanted[0]} and {wanted[1]}: evaluate it with its own configuration (`rl-vlm eval RUN_FOLDER`)."
        )
    return actor
