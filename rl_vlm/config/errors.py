"""Error messages for configurations: a line for each error; for an unknown key they suggest the nearest known one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from rl_vlm.config.policy import PolicyConfig
from rl_vlm.config.preference import PreferenceConfig
from rl_vlm.config.section import Problems, Section, keys_of, section_of
from rl_vlm.config.sft import SFTConfig

# What has the keys of each class, in error messages.
_KINDS: dict[type[Section], str] = {
    PolicyConfig: "with algorithm.name grpo or ppo",
    PreferenceConfig: "with algorithm.name preference_sac",
    SFTConfig: "in `rl-vlm sft`",
}
# Keys of one kind of run, and what another kind has in their place.
_COUNTERPARTS = (
    ("algorithm.iterations", "preference.total_steps"),
    ("learner.lr", "preference.sac.lr"),
    ("learner.betas", "preference.sac.betas"),
    ("rollout.num_env_runners", "preference.collection.num_env_runners"),
    ("rollout.cpus_per_env_runner", "preference.collection.cpus_per_env_runner"),
    ("rollout.timeout_s", "preference.collection.timeout_s"),
    ("evaluation.every", "preference.evaluation.every"),
    ("evaluation.num_items", "preference.evaluation.episodes"),
    ("env.isolation", "preference.collection.num_env_runners"),
    ("env.data", "env.kwargs"),
    ("learner.gpus_per_learner", "sft.device"),
)

# Names of a key in other libraries (TRL, verl, slime, vLLM, RLlib, Stable-Baselines3, RL-VLM-F). A name may stand for
# several keys: the one in the section where the unknown key was found is suggested.
_SYNONYMS: dict[str, tuple[str, ...]] = {
    "alpha": ("lora_alpha",),
    "batch_size": ("train_batch_size", "minibatch_size"),
    "cache": ("cached_label_path", "label_cache"),
    "checkpoint_every": ("checkpoint_interval", "save_every", "save_freq", "save_interval", "save_steps"),
    "clip_high": ("clip_ratio_high", "eps_clip_high", "epsilon_high"),
    "clip_low": ("clip_eps", "clip_param", "clip_range", "clip_ratio", "clip_ratio_low", "eps_clip", "epsilon"),
    "dual_clip": ("clip_ratio_c", "delta", "dual_clip_c", "eps_clip_c"),
    "dtype": ("precision", "torch_dtype"),
    "entropy_coef": ("ent_coef", "entropy_bonus", "entropy_coeff"),
    "epochs": ("num_epochs", "num_train_epochs", "ppo_epochs", "reward_update", "update_epochs"),
    "every": ("eval_every", "eval_freq", "eval_interval", "interval"),
    "gamma": ("discount",),
    "gpu_memory_utilization": ("gpu_utilization", "mem_fraction_static"),
    "gigpo_step_weight": ("step_advantage_w",),
    "group_size": ("n_samples_per_prompt", "num_generations", "samples_per_prompt"),
    "iterations": ("max_steps", "num_iterations", "num_rollout", "num_steps", "training_steps"),
    "keep_checkpoints": ("save_total_limit",),
    "id": ("env_id", "env_name", "name"),
    "kl_coef": ("beta", "kl_beta", "kl_coeff", "kl_loss_coef", "kl_penalty"),
    "loss": ("loss_mode", "loss_type", "policy_loss"),
    "lr": ("actor_lr", "learning_rate", "reward_lr"),
    "lr_schedule": ("learning_rate_schedule", "lr_decay_style", "lr_scheduler", "lr_scheduler_type", "scheduler"),
    "max_context": ("context_length", "max_length", "max_model_len", "max_seq_len"),
    "max_grad_norm": ("clip_grad", "clip_grad_norm", "grad_clip", "grad_norm", "gradient_clipping"),
    "max_new_tokens_per_turn": ("max_completion_length", "max_response_length", "max_response_len", "max_tokens"),
    "micro_batch_tokens": ("max_tokens_per_gpu", "micro_batch_size"),
    "mismatch": ("rollout_is", "vllm_importance_sampling_mode"),
    "minibatches": ("num_minibatches", "mini_batches"),
    "num_env_runners": ("num_rollout_workers", "num_runners", "num_workers"),
    "overlong_buffer": ("overlong_buffer_len", "soft_overlong_length"),
    "path": ("hf_checkpoint", "model", "model_name", "model_name_or_path", "model_path", "name"),
    "prompts_per_iteration": ("batch_size", "num_prompts", "rollout_batch_size", "train_batch_size"),
    "estimator": ("adv_estimator", "advantage_estimator"),
    "rank": ("lora_r", "lora_rank", "r"),
    "replay_capacity": ("buffer_size", "replay_buffer_capacity", "replay_buffer_size"),
    "rule": ("feed_type",),
    "session_pairs": ("reward_batch",),
    "size": ("ensemble_size",),
    "target_modules": ("lora_target_modules",),
    "tau": ("critic_tau", "polyak"),
    "tensor_parallel_size": ("tensor_parallel", "tp", "tp_size"),
    "tis_cap": ("tis_clip", "tis_imp_ratio_cap"),
    "total_steps": ("num_timesteps", "num_train_steps", "total_timesteps"),
    "wandb_project": ("project", "project_name"),
}
_NO_TRUNCATION = "the learner cannot reproduce a truncated distribution, so training samples from the whole one"
# Keys of other libraries that cannot be supported, or of another command, and why.
_UNSUPPORTED = {
    "sft": "this is a configuration of `rl-vlm sft`",
    "rollout.top_p": f"{_NO_TRUNCATION}; `rl-vlm rollout` has --top-p",
    "rollout.top_k": f"{_NO_TRUNCATION}; `rl-vlm rollout` has --top-k",
}
_CLOSE, _FAINT = 0.75, 0.55  # similarity (difflib) of names that are probably, and possibly, the same


def explain(error: ValidationError, root: type[Section]) -> str:
    """All that is wrong with a configuration of class `root`, a sentence in each line."""
    sentences = (sentence for one in error.errors() for sentence in _sentences(one, root))
    return "\n".join(dict.fromkeys(sentences))


def _sentences(error: Mapping[str, Any], root: type[Section]) -> Iterator[str]:
    location = [str(part) for part in error["loc"]]
    key = ".".join(location)
    if error["type"] == "extra_forbidden":
        yield from _explain_unknown(location, error["input"], root)
    elif error["type"] == "value_error":
        cause = error["ctx"]["error"]
        for sentence in cause.sentences if isinstance(cause, Problems) else [str(cause)]:
            named = not key or sentence.startswith(key.split(".")[0])
            yield f"Config: {sentence}." if named else f"Config key {key}: {sentence}."
    else:
        shown = repr(error.get("input"))
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        yield f"Config key {key or 'file'}: {error['msg'][0].lower()}{error['msg'][1:]}; got {shown}."


def _explain_unknown(location: Sequence[str], value: Any, root: type[Section]) -> Iterator[str]:
    key = ".".join(location)
    if key in _UNSUPPORTED and root is not SFTConfig:
        yield f"Unknown config key {key}: {_UNSUPPORTED[key]}."
    elif root not in _KINDS or not any(key in keys_of(kind) for kind in _KINDS):
        parent = ".".join(location[:-1])
        owner = next((kind for kind in (root, *_KINDS) if not parent or parent in keys_of(kind)), root)
        yield _suggest(location, owner)
    elif isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _explain_unknown([*location, str(name)], inner, root)
    else:
        instead = _counterpart(key, set(keys_of(root)))
        advice = f"use {instead}" if instead else "remove it"
        yield f"Config key {key} has no effect {_KINDS[root]}: {advice}."


def _counterpart(key: str, known: set[str]) -> str | None:
    pairs = (*_COUNTERPARTS, *((second, first) for first, second in _COUNTERPARTS))
    return next((other for one, other in pairs if one == key and other in known), None)


def _suggest(location: Sequence[str], root: type[Section]) -> str:
    section = root
    for part in location[:-1]:
        if part in section.model_fields:  # and not a place in a list
            section = section_of(section.model_fields[part].annotation) or section
    meant = nearest_key(section, location, root)
    hint = f"Did you mean {meant}?" if meant else f"Known keys here: {', '.join(section.model_fields)}."
    return f"Unknown config key {'.'.join(location)}. {hint}"


def nearest_key(section: type[Section], location: Sequence[str], root: type[Section]) -> str | None:
    """The full name of the key that was probably meant by the unknown one at `location`, which is in `section`.

    The keys of that section come first: the same name apart from singular and plural, or a synonym. Then that name in
    another section, a close spelling in this section, one anywhere, and last what is faintly alike in this section.
    """
    *parents, name = location
    here = [".".join([*parents, key]) for key in section.model_fields]
    everywhere = list(keys_of(root))
    return (
        _most_alike(name, here, 1.0)
        or _most_alike(name, everywhere, 1.0, synonyms=False)
        or _most_alike(name, here, _CLOSE)
        or _most_alike(name, everywhere, _CLOSE + 0.1)
        or _most_alike(name, here, _FAINT)
    )


def _most_alike(name: str, keys: Iterable[str], least: float, synonyms: bool = True) -> str | None:
    likeness: dict[str, float] = {}
    for key in keys:
        last = key.rsplit(".", 1)[-1]
        likeness[key] = max(_likeness(name, known) for known in (last, *(_SYNONYMS.get(last, ()) if synonyms else ())))
    best = max(likeness, key=lambda key: likeness[key])  # the first of equals
    return best if likeness[best] >= least else None


def _likeness(name: str, known: str) -> float:
    """1 for the same words, singular or plural; less for other spellings."""
    return difflib.SequenceMatcher(None, _singular(name), _singular(known)).ratio()


def _singular(name: str) -> str:
    return "_".join(word.removesuffix("s") for word in name.lower().replace("-", "_").split("_"))
