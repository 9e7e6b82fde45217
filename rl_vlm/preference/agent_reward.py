"""What the agent is rewarded by: the true reward, success alone, or a model of either kind. Users register more."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rl_vlm.config import PreferenceSection
from rl_vlm.labelling.types import RewardModel
from rl_vlm.preference.replay import ReplayBuffer, StepBatch

# (settings, environment id) -> a model that is not learned, such as the similarity of picture and text.
RewardFactory = Callable[[PreferenceSection, str], RewardModel]

_TRUE = {"gt_task_reward", "sparse_task_reward"}


def _similarity(source: str) -> RewardFactory:
    def build(settings: PreferenceSection, env_id: str) -> RewardModel:
        from rl_vlm.labelling.build import build_similarity  # transformers is slow to import
        from rl_vlm.labelling.teachers import SimilarityReward

        labels = settings.labels.model_copy(update={"source": source})
        return SimilarityReward(build_similarity(labels, env_id))

    return build


_FACTORIES: dict[str, RewardFactory] = {
    "clip_image_text_matching": _similarity("clip"),
    "blip2_image_text_matching": _similarity("itm"),
}


def register_reward(name: str, factory: RewardFactory) -> None:
    """Replace what a reward mode that is not learned is computed by."""
    _FACTORIES[name] = factory


class AgentReward:
    """Rewards of new steps, and of the whole replay buffer when the model has changed.

    `model` is what the mode needs: the ensemble of learned modes, or what a registered factory makes.
    """

    def __init__(self, settings: PreferenceSection, env_id: str, ensemble: RewardModel | None) -> None:
        self.mode = settings.reward
        self.model = ensemble
        if self.mode not in _TRUE and ensemble is None:
            self.model = _FACTORIES[self.mode](settings, env_id)

    def of(self, batch: StepBatch) -> np.ndarray:
        """float32 [n]."""
        if self.mode == "gt_task_reward":
            return batch.true_rewards
        if self.mode == "sparse_task_reward":
            return batch.successes
        assert self.model is not None
        if self.model.input_kind == "image":
            assert batch.frames is not None
            return self.model.rewards(batch.frames)
        return self.model.rewards(np.concatenate([batch.observations, batch.actions], axis=1))

    def relabel(self, replay: ReplayBuffer) -> None:
        """Every row gets the reward that the model gives it now."""
        assert self.model is not None
        replay.relabel_with(self.model.input_kind, self.model.rewards)
