"""On-policy distillation: the policy samples, a teacher scores its tokens, and the policy moves towards the teacher.

Agarwal et al., arXiv 2306.13649, and MiniLLM (arXiv 2306.08543): reverse KL per sampled token as its advantage, or the
forward KL or Jensen-Shannon divergence over the teacher's most likely tokens as a loss (learning/distillation.py).
"""

from __future__ import annotations

import numpy as np

from rl_vlm.algorithms.grpo import GRPO
from rl_vlm.algorithms.policy import PolicyAlgorithmConfig
from rl_vlm.config import AlgorithmSection, PolicyConfig, TeacherModelSection
from rl_vlm.engines.base import BASE_MODEL
from rl_vlm.learning.distillation import toward_teacher
from rl_vlm.learning.experience import Estimate, Experience, flat
from rl_vlm.models.trained import find_trained, read_payload
from rl_vlm.models.weights import AdapterPayload, LoraSettings
from rl_vlm.rollout.base_env_runner import ServedTeacher
from rl_vlm.serving.service import PolicyService, start_service


class Distill(GRPO):
    """GRPO's iterations with a teacher beside the rewards, whose replicas start and end with the run."""

    name = "distill"
    _teacher: PolicyService | None = None

    @classmethod
    def get_default_config(cls) -> PolicyAlgorithmConfig:
        teacher = TeacherModelSection(path="tiny")
        return PolicyAlgorithmConfig(cls, PolicyConfig(algorithm=AlgorithmSection(name=cls.name), teacher=teacher))

    def start_services(self, config: PolicyAlgorithmConfig) -> None:
        super().start_services(config)
        served = self.run_config.served_teacher
        folder = find_trained(served.model.adapter)
        payload = None if folder is None else read_payload(folder, 1)
        if isinstance(payload, AdapterPayload):
            rank = LoraSettings.read(payload.FOLDER, payload.config_json).r
            lora = served.model.lora.model_copy(update={"rank": rank})
            served = served.model_copy(update={"model": served.model.model_copy(update={"lora": lora})})
        self._teacher = start_service(served)
        if payload is not None:
            self._teacher.publish(payload)
        version = BASE_MODEL if payload is None else 1
        config.teacher = ServedTeacher(self._teacher.run_id, self._teacher.model, version)

    def stop_services(self) -> None:
        teacher, self._teacher = self._teacher, None
        if teacher is not None:
            teacher.stop()
        super().stop_services()

    def make_state(self) -> None:
        super().make_state()
        assert self._teacher is not None
        self._teacher.wait_until_ready()

    def advantages(self, experience: Experience) -> Estimate:
        teacher = self.run_config.teacher
        assert teacher is not None
        gaps = {
            one.trajectory_id: one.teacher.logprobs - one.logprobs[one.loss_mask]
            for one in experience.trajectories
            if one.teacher is not None
        }
        self._recorded["distill/reverse_kl"] = float(-np.mean(flat(gaps))) if gaps else float("nan")
        rewarded = super().advantages(experience) if teacher.reward_weight else None
        return toward_teacher(gaps, rewarded, teacher)
