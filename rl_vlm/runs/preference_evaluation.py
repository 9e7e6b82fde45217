"""`rl-vlm eval` of a preference run: the agent of a checkpoint plays in this process, without Ray, labeller or replay buffer."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load_file

from rl_vlm.algorithms.preference_checkpoint import AGENT, STATE, latest_checkpoint, read_state
from rl_vlm.config import PreferenceConfig
from rl_vlm.evaluation.options import EvaluationOptions
from rl_vlm.files import write_atomic
from rl_vlm.preference.collection.collector import (
    Evaluator,
    NumpyActor,
    environment_errors,
    evaluation_seeds,
    make_run_env,
)
from rl_vlm.preference.collection.episode_log import evaluation_metrics
from rl_vlm.types import UserInputError


def evaluate_preference_run(
    config: PreferenceConfig,
    *,
    adapter: Path | None = None,
    run_dir: Path | None = None,
    out: Path | None = None,
    options: EvaluationOptions | None = None,
) -> dict[str, Any]:
    """Play the evaluation episodes with a checkpoint's agent; written to `out` as JSON if given.

    `run_dir` is a run folder, whose latest checkpoint is used, or a checkpoint's own folder. The result holds the figures
    of eval.jsonl, and each episode under `episodes`. Raises UserInputError without a checkpoint that fits, CollectionError
    when an environment fails.
    """
    (options or EvaluationOptions()).refuse_any(
        "this is for policies that see images, and the agent of a preference run sees the state."
    )
    if adapter is not None or run_dir is None:
        raise UserInputError(
            "A preference run has an agent and no adapter: name its run folder, or one of its checkpoints, with --run-dir."
        )
    checkpoint = _find_checkpoint(run_dir)
    step = int(read_state(checkpoint)["step"])
    actor = _load_actor(config, checkpoint)
    settings = config.preference.evaluation
    evaluator = Evaluator(lambda: make_run_env(config), settings.parallel, settings.end_on_success)
    started = time.monotonic()
    try:
        with environment_errors():
            results = evaluator.run(actor, evaluation_seeds(config))
    finally:
        evaluator.close()
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


def _find_checkpoint(folder: Path) -> Path:
    if (folder / STATE).is_file():
        return folder
    found = latest_checkpoint(folder / "checkpoints")
    if found is None:
        raise UserInputError(
            f"{folder} holds no complete checkpoint: name the folder of a preference run, or a checkpoint."
        )
    return found


def _load_actor(config: PreferenceConfig, checkpoint: Path) -> NumpyActor:
    """The policy alone, in the shape that the checkpoint has; it must fit the environment."""
    try:
        arrays = load_file(checkpoint / AGENT)
        depth = sum(name.startswith("actor.") and name.endswith(".weight") for name in arrays)
        layers = [(arrays[f"actor.{place}.weight"], arrays[f"actor.{place}.bias"]) for place in range(depth)]
        actor = NumpyActor(layers, config.preference.sac.log_std_bounds)
        found = (layers[0][0].shape[1], actor.action_size)
    except (OSError, ValueError, KeyError, IndexError, SafetensorError) as error:
        raise UserInputError(f"The checkpoint {checkpoint} is corrupt ({error}): use an older one.") from error
    env = make_run_env(config)
    wanted = (env.observation_space.shape[0], env.action_space.shape[0])
    env.close()
    if found != wanted:
        raise UserInputError(
            f"The checkpoint's agent takes {found[0]} observations and gives {found[1]} actions, {config.env.id} has "
            f"{wanted[0]} and {wanted[1]}: evaluate it with its own configuration (`rl-vlm eval RUN_FOLDER`)."
        )
    return actor
