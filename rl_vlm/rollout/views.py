"""What the policy sees in the place of an environment's images, where a task asks whether it needs them."""

from __future__ import annotations

from rl_vlm.envs.images import blanked, replaced
from rl_vlm.rollout.env_pool import EnvPool
from rl_vlm.rollout.failures import discard_on_failure
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.types import EncodedImage, as_encoded


async def viewed_opening(
    images: tuple[EncodedImage, ...], task: RolloutTask, pool: EnvPool
) -> tuple[EncodedImage, ...]:
    """What the policy sees in the place of the first turn's images; sizes stay, so the tokens do too."""
    if task.view != "swapped":
        return viewed(images, task)
    envs = await pool.borrow(1)
    with discard_on_failure(pool, envs):
        ((other, _),) = await pool.reset(envs, task.seed, {"index": task.other_index, "split": task.split})
    pool.give_back(envs)
    return replaced(images, as_encoded([image for message in other.messages for image in message.images]))


def viewed(images: tuple[EncodedImage, ...], task: RolloutTask) -> tuple[EncodedImage, ...]:
    """What the policy sees in the place of a turn's images."""
    return blanked(images) if task.view == "blank" else images
