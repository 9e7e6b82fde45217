"""How many environments a training run holds at once, which a server of environments must have places for."""

from __future__ import annotations

from rl_vlm.config import PolicyConfig
from rl_vlm.evaluation.heldout import evaluation_tasks
from rl_vlm.types import UserInputError


def held_at_once(config: PolicyConfig, name: str, held_out: int | None) -> tuple[int, int]:
    """The most environments of one kind at once: in training, and beside them in an evaluation.

    `name` is the environment's in a mixture, which may turn to it alone; `held_out` the items of its held-out split. An evaluation comes
    on top: its variants have pools of their own, which keep their environments, unless `evaluation.at_once` bounds them all.
    """
    rollout = config.rollout
    groups = (
        rollout.num_env_runners * rollout.groups_at_once if rollout.max_policy_lag else rollout.prompts_per_iteration
    )
    sizes = sorted((task.size for task in evaluation_tasks(config, {name: held_out}, 0)), reverse=True)
    sizes += [1] * min(config.sight.blank_items, sum(sizes))
    return groups * rollout.group_size, sum(sizes[: config.held_out_at_once])


def check_places(config: PolicyConfig, name: str, held_out: int | None, places: int | None) -> None:
    """Raise UserInputError where a run needs more than the `places` of its environment's server; None: they have no limit.

    Its groups would each hold a part of the places and wait for the rest until all are lost.
    """
    training, evaluation = held_at_once(config, name, held_out)
    if places is not None and training + evaluation > places:
        raise UserInputError(
            f"{config.env.parts[name].id} has places for {places} environments at a time, and the run needs up to "
            f"{training + evaluation}: {training} in training and {evaluation} in an evaluation. Start `rl-vlm envs serve` with "
            f"--max-sessions {training + evaluation}, or lower rollout.prompts_per_iteration, rollout.group_size or "
            "evaluation.num_items."
        )
