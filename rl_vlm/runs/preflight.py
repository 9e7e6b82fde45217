"""Checks before a run starts: model, data, environment, resources. Wrong input raises UserInputError."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rl_vlm.chat import expand_image_tokens
from rl_vlm.config import RunConfig
from rl_vlm.config.algorithm import BUILTIN_LOSSES
from rl_vlm.config.model import FLOAT16_UNTRAINABLE
from rl_vlm.envs.base import VisionEnv
from rl_vlm.envs.parts import make_part, train_size
from rl_vlm.envs.registry import portable_id
from rl_vlm.envs.wire import check_plain
from rl_vlm.learning.plan import ESTIMATORS
from rl_vlm.learning.strategies.needs import check_strategy
from rl_vlm.models.initial_adapter import check_initial_adapter
from rl_vlm.models.loading import (
    DType,
    TextSide,
    check_quantization,
    from_folder,
    load_text_side,
    quiet_libraries,
    resolve_model,
)
from rl_vlm.models.memory.parts import amount
from rl_vlm.plugins import load_plugins
from rl_vlm.rollout.stages import Stages
from rl_vlm.runs.env_demand import check_places
from rl_vlm.runs.memory import make_plan, object_store_mib, short_form
from rl_vlm.runs.reward_names import check_reward_names
from rl_vlm.types import RLVLMError, Split, UserInputError

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def inspect_run(run: RunConfig) -> dict[str, Any]:
    """Check everything that can be checked without starting Ray: model folder, data, environment, resources.

    Returns what was found, to be printed. Raises UserInputError.
    """
    load_plugins(run.plugins)
    check_quantization(run.serving.quantization)
    check_strategy(run.learner)
    return run.spec.load("preflight")(run)  # type: ignore[no-any-return]


def inspect_policy_run(run: RunConfig) -> dict[str, Any]:
    """Open one item of each split and encode it, and look up what learns from it."""
    if run.model.train == "lora" and run.model.lora.target_modules == "none":
        raise UserInputError(
            "model.lora.target_modules none leaves nothing to train: choose attn, mlp, all or vision; `rl-vlm eval` and `rl-vlm "
            "serve` take it."
        )
    if run.model.dtype == "float16":
        raise UserInputError(f"{FLOAT16_UNTRAINABLE}.")
    ESTIMATORS.get(run.algorithm.estimator)
    if run.algorithm.loss not in BUILTIN_LOSSES:
        from rl_vlm.learning.losses import LOSSES  # imports torch

        LOSSES.get(run.algorithm.loss)
    quiet_libraries()
    folder = resolve_model(run.model.path)
    text = load_text_side(folder, run.model.pixels)
    found: dict[str, Any] = {"model": str(folder), "env": run.env.title} | check_initial_adapter(run.model)
    sizes: dict[str, int | None] = {}
    for name, part in run.env.parts.items():
        figures = _inspect_part(run, name, text)
        sizes[name] = train_size(part, figures["train_items"])
        found |= {f"{name}_{key}" if name else key: value for key, value in figures.items()}
        for variant in run.evaluation.variants:
            _open_changed(
                run, name, f"evaluation.variants.{variant}", run.evaluation.split, run.variant_arguments(variant, name)
            )
    if run.curriculum.stages:
        for where, name, arguments in Stages(run.curriculum, run.env).all_arguments():
            _open_changed(run, name, where, "train", arguments, sizes[name])
        found["stages"] = ", ".join(run.curriculum.names)
    return found | _memory(run, folder)


def _inspect_part(run: RunConfig, name: str, text: TextSide) -> dict[str, Any]:
    """Open one item of each split of an environment and encode it."""
    env_id = run.env.parts[name].id
    env = _make_part(run, name)
    found: dict[str, Any] = {}
    try:
        for split in ("train", run.evaluation.split):
            validate = getattr(env, "validate", None)
            if callable(validate):
                validate(split)
            size = env.num_items(split)  # type: ignore[arg-type]
            if size == 0:
                raise UserInputError(f"The {split} split of {env_id} is empty: check env.data.")
            observation, _ = env.reset(seed=0, options={"index": 0, "split": split})
            span = text.codec.encode_prompt(observation.messages)
            counts = [text.count_image_tokens(image.width, image.height) for image in span.images]
            length = len(expand_image_tokens(span.token_ids, text.codec.image_token_id, counts))
            if length >= run.serving.max_context:
                raise UserInputError(
                    f"The first {split} prompt has {length} tokens and serving.max_context is "
                    f"{run.serving.max_context}: raise it, or shrink the images."
                )
            if split == run.evaluation.split:
                check_places(run, name, size, getattr(env, "max_sessions", None))
            if split == "train":
                check_reward_names(list(run.env.parts[name].reward.weights), env, run.rollout.max_turns)
            found |= {f"{split}_items": size, f"{split}_prompt_tokens": length, f"{split}_image_tokens": sum(counts)}
    except UserInputError:
        raise
    except RLVLMError as error:
        raise UserInputError(f"The environment {env_id} does not open: {error}") from error
    finally:
        env.close()
    return found


def _make_part(run: RunConfig, name: str, changes: Mapping[str, Any] | None = None) -> VisionEnv:
    """As `make_part`. Raises UserInputError for what the child process that will make it could not be told."""
    if run.env.isolation == "process":
        part = run.env.parts[name]
        portable_id(part.id)
        check_plain(part.id, part.make_kwargs(changes))
    return make_part(run.env, name, changes)


def _open_changed(
    run: RunConfig, name: str, where: str, split: Split, changes: Mapping[str, Any], items: int | None = None
) -> None:
    """Open an environment with the changed arguments that the key `where` names; it must have the `items` that are drawn from."""
    try:
        env = _make_part(run, name, changes)
        try:
            size = env.num_items(split)
            if items is not None and size is not None and size < items:
                raise UserInputError(
                    f"the {split} split has {size} items and the run draws from {items}: set env.num_items."
                )
            env.reset(seed=0, options={"index": 0, "split": split})
        finally:
            env.close()
    except RLVLMError as error:
        raise UserInputError(f"{where}: {error}") from error


def inspect_preference_run(run: RunConfig) -> dict[str, Any]:
    """Step the control environment once, look at its picture, and find the labeller. Raises UserInputError."""
    from rl_vlm.labelling.build import prompts_of
    from rl_vlm.labelling.store import label_cache
    from rl_vlm.preference.collection.collector import make_run_env
    from rl_vlm.preference.feedback.cached_labels import check_cache
    from rl_vlm.preference.schedule import check_segments

    settings = run.preference
    env = make_run_env(run)
    try:
        check_segments(settings, env.horizon)
        env.reset(seed=0)
        env.step(env.action_space.sample())
        found: dict[str, Any] = {
            "env": run.env.id,
            "observation_size": env.observation_space.shape[0],
            "action_size": env.action_space.shape[0],
            "horizon": env.horizon,
            "reward": settings.reward,
        }
        if settings.draws_frames or settings.evaluation.film:
            found["frame"] = "×".join(map(str, env.frame().shape))
    finally:
        env.close()
    if settings.learns_reward:
        cache = label_cache(settings.labels.cache)
        if cache is not None:
            check_cache(cache, settings, (found["observation_size"], found["action_size"]))
        found["labels"] = settings.labels.source
    if settings.learns_reward and settings.labels.source in ("vlm", "endpoint", "generate", "clip", "itm"):
        found["goal"] = prompts_of(settings.labels, run.env.id).goal
    if settings.asks_served_model:
        folder = resolve_model(run.model.path)
        found |= {"model": str(folder)} | _memory(run, folder)
    return found


def _memory(run: RunConfig, folder: Path) -> dict[str, Any]:
    """What the model weighs in the run's precision, and the GPU memory that the recipe states."""
    found = weights_size(count_parameters(folder), run.model.dtype)
    if run.needed_gpus:
        import torch

        here = torch.cuda.device_count()
        found["gpus"] = f"{run.needed_gpus:g} needed, {here} here"
        if run.model.gpu_memory_gib:
            found["gpu_memory_gib"] = f"{run.model.gpu_memory_gib:g} needed per GPU"
    object_store_mib(run)  # raises where it is too small
    return found | short_form(make_plan(run, folder=folder))


def weights_size(parameters: int, dtype: DType) -> dict[str, Any]:
    """What that many parameters weigh, to be printed."""
    return {
        "parameters": amount(parameters),
        "weights_gib": round(parameters * _BYTES[dtype] / 2**30, 2),
    }


def count_parameters(folder: Path) -> int:
    """The parameters of a model folder, from the headers of its safetensors files; without those from its configuration.

    Tied weights count once. Raises UserInputError when a file is damaged.
    """
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return sum(_elements(file) for file in files)
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(from_folder(AutoConfig, folder), trust_remote_code=False)
    return sum(parameter.numel() for parameter in model.parameters())


def _elements(file: Path) -> int:
    try:
        with safe_open(file, framework="numpy") as weights:  # reads the header; no tensor, and no torch
            return sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserInputError(
            f"The weights {file} cannot be read ({error}): fetch or export the model again."
        ) from error
