"""What a held-out evaluation asks: its options, its tasks, and what makes two evaluations the same."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rl_vlm.config import EndpointSection, PolicyConfig
from rl_vlm.envs.registry import make_part, part_size
from rl_vlm.evaluation.outcomes import Side, label
from rl_vlm.models.loading import resolve_model
from rl_vlm.models.reference import hash_model
from rl_vlm.models.trained import read_payload
from rl_vlm.rollout.tasks import RolloutTask, View
from rl_vlm.seeding import derive_seed
from rl_vlm.types import Message, Split

# The settings that decide an evaluation's outcomes.
_BUDGET = {"max_turns", "max_new_tokens", "max_new_tokens_per_turn", "format", "require_end_of_turn", "temperature"}
_OF_THE_RUN = {"env": True, "rollout": _BUDGET, "evaluation": {"samples", "variants", "category"}}
_OF_THE_MODEL = {
    "model": {"dtype", "head_dtype", "min_pixels", "max_pixels"},
    "serving": {"quantization", "max_context"},
}


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """Options of `rl-vlm eval`; each is named as its flag.

    `blind`: also with blank images, and with those of other items. `split`: in place of evaluation.split. `endpoint`:
    an OpenAI-compatible server that is measured in place of a served model.
    """

    blind: bool = False
    resume: bool = False
    overwrite: bool = False
    against: str | None = None
    split: tuple[Split, ...] = ()
    benchmark_runs: int = 0
    compare_hf: bool = False
    endpoint: EndpointSection | None = None


def evaluation_tasks(config: PolicyConfig, sizes: Mapping[str, int | None], min_version: int) -> list[RolloutTask]:
    """One greedy episode per environment, item and variant; with `evaluation.samples` > 1 also a sampled group."""
    evaluation = config.evaluation
    kinds = [("greedy", 1, 0.0)]
    if evaluation.samples > 1:
        kinds.append(("sampled", evaluation.samples, config.rollout.temperature))
    return [
        RolloutTask(
            group_id=f"{label(env, variant)}/{kind}/{index:06d}",
            index=index,
            split=evaluation.split,
            seed=derive_seed(config.seed, 4, index),
            sampling_seed=derive_seed(config.seed, 5, index),
            size=size,
            temperature=temperature,
            min_version=min_version,
            variant=variant,
            env=env,
        )
        for variant in evaluation.variants
        for kind, size, temperature in kinds
        for index in range(evaluation.num_items)
        for env, num_items in sizes.items()  # in turn, so that the first tasks are of all environments
        if num_items is None or index < num_items
    ]


def viewed_tasks(tasks: Sequence[RolloutTask], view: View, limit: int | None = None) -> list[RolloutTask]:
    """The greedy tasks of the first variant once more, with other images; at most `limit` of them."""
    greedy = [task for task in tasks if task.variant == tasks[0].variant and task.temperature == 0][:limit]
    others: dict[tuple[str, int], int] = {}  # the next item of the same environment
    for env in {task.env for task in greedy}:
        own = [task.index for task in greedy if task.env == env]
        others |= {(env, here): there for here, there in zip(own, own[1:] + own[:1], strict=True)}
    return [
        replace(task, group_id=f"{task.group_id}/{view}", view=view, other_index=others[task.env, task.index])
        for task in greedy
    ]


def item_prompts(config: PolicyConfig) -> Iterator[tuple[Message, ...]]:
    """What the items of an evaluation show first, for measurements that ask them without playing them: again from the
    split's beginning after its end; a mixture takes turns."""
    split = config.evaluation.split
    with ExitStack() as stack:
        envs = []
        for name, part in config.env.parts.items():
            env = stack.enter_context(closing(make_part(config.env, name)))
            envs.append((env, part_size(part, env, split)))
        for rank in itertools.count():
            for env, size in envs:
                index = rank % (size or 2**31 - 1)
                options = {"index": index, "split": split}
                observation, _ = env.reset(seed=derive_seed(config.seed, 4, index), options=options)
                yield observation.messages


def identity_of(
    config: PolicyConfig,
    options: EvaluationOptions,
    adapters: Mapping[Side, Path | None],
    sizes: Mapping[Split, Mapping[str, int | None]],
) -> dict[str, Any]:
    """Names and values of all that decides the outcomes, by which a resumed evaluation is recognised. How many
    items are asked, and how often, does not count."""
    known: dict[str, Any] = {"format": 2, "seed": config.seed, "size of the split": sizes}
    included: dict[str, Any] = dict(_OF_THE_RUN)
    if options.endpoint is None:
        known |= {"model": hash_model(resolve_model(config.model.path)), "engine": config.serving.expected_engine}
        for side, folder in adapters.items():
            known[f"adapter ({side})"] = "base model" if folder is None else read_payload(folder, 0).sha256[:16]
        included |= _OF_THE_MODEL
    else:
        known |= {"endpoint": options.endpoint.url, "endpoint model": options.endpoint.model}
    sections = config.model_dump(mode="json", include=included)
    return known | {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
