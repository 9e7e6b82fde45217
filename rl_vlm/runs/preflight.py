"""What can be checked before a run starts: model, data, environment, resources. Wrong input ends here, with exit code 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_vlm.chat import expand_image_tokens
from rl_vlm.config import RunConfig
from rl_vlm.envs.registry import make
from rl_vlm.models.loading import load_text_side, quiet_libraries, resolve_model
from rl_vlm.types import RLVLMError, UserInputError


def inspect_run(run: RunConfig) -> dict[str, Any]:
    """Open one item of each split and encode it; returns figures for people. Raises UserInputError."""
    if run.algorithm.name == "preference_sac":
        return inspect_preference_run(run)
    env_kwargs = run.env.make_kwargs()
    env = make(run.env.id, **env_kwargs)
    try:
        folder = resolve_model(run.model.path)
        quiet_libraries()
        text = load_text_side(folder)
        found: dict[str, Any] = {"model": str(folder), "env": run.env.id}
        for split in ("train", run.evaluation.split):
            validate = getattr(env, "validate", None)
            if callable(validate):
                validate(split)
            size = env.num_items(split)  # type: ignore[arg-type]
            if size == 0:
                raise UserInputError(f"The {split} split of {run.env.id} is empty: check env.data.")
            observation, _ = env.reset(seed=0, options={"index": 0, "split": split})
            span = text.codec.encode_prompt(observation.messages)
            counts = [text.count_image_tokens(image.width, image.height) for image in span.images]
            length = len(expand_image_tokens(span.token_ids, text.codec.image_token_id, counts))
            if length >= run.serving.max_context:
                raise UserInputError(
                    f"The first {split} prompt has {length} tokens and serving.max_context is "
                    f"{run.serving.max_context}: raise it, or shrink the images."
                )
            found |= {f"{split}_items": size, f"{split}_prompt_tokens": length, f"{split}_image_tokens": sum(counts)}
    except UserInputError:
        raise
    except RLVLMError as error:
        raise UserInputError(f"The environment {run.env.id} does not open: {error}") from error
    finally:
        env.close()
    for variant, overrides in run.evaluation.variants.items():
        try:
            make(run.env.id, **run.env.make_kwargs(overrides)).close()
        except UserInputError as error:
            raise UserInputError(f"evaluation.variants.{variant}: {error}") from error
    return found | _memory(run, folder)


def inspect_preference_run(run: RunConfig) -> dict[str, Any]:
    """Step the control environment once, look at its picture, and find the labeller. Raises UserInputError."""
    from rl_vlm.labelling.build import prompts_of
    from rl_vlm.labelling.store import label_cache
    from rl_vlm.preference.collector import make_run_env

    settings = run.preference
    env = make_run_env(run)
    try:
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
        label_cache(settings.labels.cache)
        found["labels"] = settings.labels.source
    if settings.learns_reward and settings.labels.source in ("vlm", "endpoint", "generate", "clip", "itm"):
        found["goal"] = prompts_of(settings.labels, run.env.id).goal
    if settings.asks_served_model:
        folder = resolve_model(run.model.path)
        found |= {"model": str(folder)} | _memory(run, folder)
    return found


def _memory(run: RunConfig, folder: Path) -> dict[str, Any]:
    """What the model weighs, from its configuration alone, and the GPU memory that the recipe states."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    size = parameters * getattr(torch, run.model.dtype).itemsize / 2**30
    found = {"parameters": f"{parameters / 1e9:.2f} billion", "weights_gib": round(size, 2)}
    if run.needed_gpus:
        here = torch.cuda.device_count()
        found["gpus"] = f"{run.needed_gpus:g} needed, {here} here"
        if run.model.gpu_memory_gib:
            found["gpu_memory_gib"] = f"{run.model.gpu_memory_gib:g} needed per GPU"
    return found
