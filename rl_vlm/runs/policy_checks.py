"""The checks of a policy run before anything starts: its environments, its model and what learns from them."""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from rl_vlm.config import PolicyConfig
from rl_vlm.config.learner import BUILTIN_LOSSES
from rl_vlm.config.serving import FLOAT16_UNTRAINABLE
from rl_vlm.engines.grammars import format_matcher
from rl_vlm.envs.base import VisionEnv
from rl_vlm.envs.errors import describe_error
from rl_vlm.envs.isolation import check_plain
from rl_vlm.envs.registry import is_agent, make_part, portable_id, train_size
from rl_vlm.learning.plan import ESTIMATORS
from rl_vlm.models.images import TextSide
from rl_vlm.models.loading import check_weights, load_text_side, quiet_libraries, resolve_model
from rl_vlm.models.trained import check_initial_adapter, check_trained, find_trained
from rl_vlm.rollout.curriculum import Stages
from rl_vlm.rollout.scoring import try_functions, try_parts, try_rewards
from rl_vlm.runs.memory import memory_needs
from rl_vlm.types import Split, UserInputError

_TURNS = 32  # of a made episode, at most
_SPELLED = 0.7  # tokens per letter: more are a word that the vocabulary does not have

logger = logging.getLogger(__name__)


def inspect_policy_run(config: PolicyConfig, answers: bool = True) -> dict[str, Any]:
    """Open some items of each split and encode them, reward made answers, and look up what learns from them."""
    if config.model.train == "lora" and config.model.lora.target_modules == "none":
        raise UserInputError(
            "model.lora.target_modules none leaves nothing to train: choose attn, mlp, all or vision; `rl-vlm eval` "
            "and `rl-vlm serve` take it."
        )
    if config.model.dtype == "float16":
        raise UserInputError(f"{FLOAT16_UNTRAINABLE}.")
    if config.learner.zero_stage and importlib.util.find_spec("deepspeed") is None:
        raise UserInputError(
            f"learner.strategy {config.learner.strategy} needs the package deepspeed: pip install 'rl-vlm[deepspeed]'."
        )
    _ = ESTIMATORS[config.algorithm.estimator]  # raises for an unknown one
    if config.algorithm.loss not in BUILTIN_LOSSES:
        from rl_vlm.learning.losses import LOSSES  # imports torch

        _ = LOSSES[config.algorithm.loss]
    quiet_libraries()
    folder = resolve_model(config.model.path)
    text = load_text_side(folder, config.model.pixels)
    try_parts(config.env.reward, text)
    format_matcher(text, config.rollout.grammar)
    summary: dict[str, Any] = {"model": str(folder), "env": config.env.title} | check_initial_adapter(config.model)
    sizes: dict[str, int | None] = {}
    for name, part in config.env.parts.items():
        inspected = _inspect_part(config, name, text, answers)
        sizes[name] = train_size(part, inspected["train_items"])
        summary |= {f"{name}_{key}" if name else key: value for key, value in inspected.items()}
        for variant in config.evaluation.variants:
            changes = config.variant_arguments(variant, name)
            _open_changed(config, name, f"evaluation.variants.{variant}", config.evaluation.split, changes)
    if config.curriculum.stages:
        for where, name, arguments in Stages(config.curriculum, config.env).all_arguments():
            _open_changed(config, name, where, "train", arguments, sizes[name])
        summary["stages"] = ", ".join(config.curriculum.names)
    return summary | _check_teacher(config, text) | memory_needs(config, folder)


def _check_teacher(config: PolicyConfig, text: TextSide) -> dict[str, Any]:
    """The teacher's model, to be printed. Raises UserInputError unless it reads what the policy writes."""
    if config.teacher is None:
        return {}
    model = config.served_teacher.model
    folder, adapter = check_weights(model.path), find_trained(model.adapter)
    if adapter is not None:
        check_trained(adapter, model.path)
    other = load_text_side(folder, model.pixels).codec
    for what, own, theirs in (
        ("words", text.codec.vocabulary, other.vocabulary),
        ("end of a turn", text.codec.end_of_turn_id, other.end_of_turn_id),
    ):
        if own != theirs:
            raise UserInputError(
                f"teacher.path {model.path} has another tokenizer than {config.model.path} (its {what} differ): a "
                "teacher scores the policy's own tokens, so take a model of the same family."
            )
    return {"teacher": " + ".join(str(part) for part in (folder, adapter) if part is not None)}


@contextmanager
def _opened(
    config: PolicyConfig, name: str, changes: Mapping[str, Any] | None = None, where: str = ""
) -> Iterator[VisionEnv]:
    """An environment, closed at the end; what its code raises inside is a UserInputError that begins with `where`."""
    part = config.env.parts[name]
    try:
        if config.env.isolation == "process":
            portable_id(part.id)
            check_plain(part.id, part.make_kwargs(changes))
        env = make_part(config.env, name, changes)
        try:
            yield env
        finally:
            with suppress(Exception, SystemExit):  # a run does not mind how it closes
                env.close()
    except UserInputError as error:
        raise UserInputError(f"{where}: {error}" if where else str(error)) from error
    except (Exception, SystemExit) as error:  # it is a user's code, which may raise anything
        raise UserInputError(
            f"{where or f'The environment {part.id} does not open'}: {describe_error(error)}"
        ) from error


def _inspect_part(config: PolicyConfig, name: str, text: TextSide, answers: bool) -> dict[str, Any]:
    env_id, summary, truths = config.env.parts[name].id, dict[str, Any](), list[str]()
    tightest = (config.serving.max_context, 0, "")
    with _opened(config, name) as env:
        for split in dict.fromkeys(("train", config.evaluation.split)):
            validate = getattr(env, "validate", None)
            if callable(validate):
                validate(split)
            size = env.num_items(split)  # type: ignore[arg-type]
            if size == 0:
                raise UserInputError(f"The {split} split of {env_id} is empty: check env.data.")
            for index in _chosen(env, split, size):
                observation, info = env.reset(seed=0, options={"index": index, "split": split})
                truths.append(str(info.get("truth", "")))
                span = text.codec.encode_prompt(observation.messages)
                length = len(text.expand(span.token_ids, span.images))
                if length >= config.serving.max_context:
                    raise UserInputError(
                        f"The {split} prompt of item {index} has {length} tokens and serving.max_context is "
                        f"{config.serving.max_context}: raise it, leave the item out, or shrink its images."
                    )
                tightest = min(tightest, (config.serving.max_context - length, index, split))
                if index == 0:
                    summary |= {
                        f"{split}_items": size,
                        f"{split}_prompt_tokens": length,
                        f"{split}_image_tokens": length - len(span.token_ids) + len(span.images),
                    }
        if is_agent(env_id):  # which nothing but the policy can answer
            _check_agent(config, env_id)
        else:
            _reward_made_answers(config, name, env, text, answers)
    _warn_of_answers(config, text, tightest, truths)
    return summary


def _warn_of_answers(config: PolicyConfig, text: TextSide, tightest: tuple[int, int, str], truths: list[str]) -> None:
    """tightest: how many tokens the longest prompt leaves, its item and its split. truths: right answers."""
    left, at, where = tightest
    if left < (wanted := min(config.rollout.max_new_tokens_per_turn, config.rollout.max_new_tokens)):
        logger.warning(
            "The %s prompt of item %d leaves %d tokens for an answer that may take %d: raise serving.max_context, or "
            "lower rollout.max_new_tokens_per_turn.",
            *(where, at, left, wanted),
        )
    words = [word for truth in truths for word in re.findall(r"[^\W\d_]{4,}", truth)]
    spelled = [word for word in words if len(text.codec.encode_raw(f" {word}")) > _SPELLED * len(word)]
    if 2 * len(spelled) > len(words):
        logger.warning(
            "This model spells answers such as %r letter by letter, which it hardly learns: choose one that has their "
            "words (tiny-words has 3,000).",
            spelled[0],
        )


def _chosen(env: VisionEnv, split: Split, size: int | None) -> list[int]:
    """The first, the middle and the last item, and the one of the most text, where the environment says which it is."""
    last, longest = 2 if size is None else size - 1, getattr(env, "longest", None)
    return list(dict.fromkeys((0, last // 2, last, *([longest(split)] if callable(longest) else ()))))


def _check_agent(config: PolicyConfig, env_id: str) -> None:
    if config.deterministic or config.env.isolation == "process":
        key = "deterministic" if config.deterministic else "env.isolation: process"
        raise UserInputError(f"{env_id} is an agent, which needs threads of its env runner: remove {key}.")


def _reward_made_answers(config: PolicyConfig, name: str, env: VisionEnv, text: TextSide, answers: bool) -> None:
    """Answer the first training item to its end, and have the reward functions reward that; without
    `answers`, only compare what they take. Raises UserInputError."""
    part = config.env.parts[name]
    observation, info = env.reset(seed=0, options={"index": 0, "split": "train"})
    try_functions(part.reward, info)
    if not answers:
        return
    answer = f"<answer>{info.get('truth', 0)}</answer>"
    try:
        for _ in range(_TURNS):
            _, _, terminated, truncated, last = env.step(answer)
            info = {**info, **last}
            if terminated or truncated:
                break
        else:
            return  # what its last reply says is not known
    except (Exception, SystemExit) as error:  # it is a user's code, which may raise anything
        raise UserInputError(f"{part.id} does not take the answer {answer!r}: {describe_error(error)}.") from error
    try_rewards(part.reward, observation, info, (answer, "0"), text)


def _open_changed(
    config: PolicyConfig, name: str, where: str, split: Split, changes: Mapping[str, Any], items: int | None = None
) -> None:
    """Open an environment with the arguments that the key `where` changes; a run draws from `items` of it."""
    with _opened(config, name, changes, where) as env:
        size = env.num_items(split)
        if items is not None and size is not None and size < items:
            raise UserInputError(
                f"the {split} split has {size} items and the run draws from {items}: set env.num_items."
            )
        env.reset(seed=0, options={"index": 0, "split": split})
