"""The agent's reward: the task's own, success alone, or a reward model, learned or not."""

from __future__ import annotations

import numpy as np

from rl_vlm.config import PreferenceSection
from rl_vlm.labelling.types import RewardModel
from rl_vlm.preference.replay.buffer import ReplayBuffer, StepBatch

_TRUE = {"gt_task_reward", "sparse_task_reward"}
# Reward modes by the similarity of picture and text: the labels.source with the same model.
_SIMILARITY_SOURCES = {"clip_image_text_matching": "clip", "blip2_image_text_matching": "itm"}


class AgentReward:
    """Rewards of new steps, and of the whole replay buffer when the model has changed.

    `ensemble` is the reward model of learned modes, None for others. `device` is that of a model of picture and text.
    """

    def __init__(
        self, settings: PreferenceSection, env_id: str, ensemble: RewardModel | None, device: str = "cpu"
    ) -> None:
        self.mode = settings.reward
        self.model = ensemble
        if self.mode in _SIMILARITY_SOURCES:
            from rl_vlm.labelling.build import build_similarity  # transformers is slow to import
            from rl_vlm.labelling.teachers import SimilarityReward

            labels = settings.labels.model_copy(update={"source": _SIMILARITY_SOURCES[self.mode]})
            self.model = SimilarityReward(build_similarity(labels, env_id, device))

    def rewards_of(self, batch: StepBatch) -> np.ndarray:
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
        """Replace the reward of every row by the model's present one."""
        assert self.model is not None
        replay.relabel_with(self.model.input_kind, self.model.rewards)
