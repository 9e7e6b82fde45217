"""The configuration of a run: sections only, one file per concern. Nothing here imports what reads it."""

from rl_vlm.config.algorithm import AlgorithmSection
from rl_vlm.config.critic import CriticSection
from rl_vlm.config.curriculum import CurriculumSection, StageSection
from rl_vlm.config.env import EnvPart, EnvSection, MixtureSection
from rl_vlm.config.evaluation import EvaluationSection
from rl_vlm.config.http import HTTPSection
from rl_vlm.config.labels import EndpointSection, LabelsSection, TeacherSection
from rl_vlm.config.learner import LearnerSection
from rl_vlm.config.loading import (
    apply_overrides,
    load_config,
    load_served_config,
    load_sft_config,
    parse_config,
    save_config,
)
from rl_vlm.config.logging import LoggingSection
from rl_vlm.config.model import LoraSection, ModelSection
from rl_vlm.config.preference import CollectionSection, ControlEvaluationSection, PreferenceSection
from rl_vlm.config.resources import ResourcesSection
from rl_vlm.config.reward import JudgeSection, RewardSection
from rl_vlm.config.reward_model import RewardModelSection
from rl_vlm.config.rollout import RolloutSection
from rl_vlm.config.run import RunConfig
from rl_vlm.config.sac import SACSection
from rl_vlm.config.section import Section
from rl_vlm.config.serving import AutoscalingSection, ServingSection, VLLMSection
from rl_vlm.config.sft import SFTConfig, SFTSection

__all__ = [
    "AlgorithmSection",
    "AutoscalingSection",
    "CollectionSection",
    "ControlEvaluationSection",
    "CriticSection",
    "CurriculumSection",
    "EndpointSection",
    "EnvPart",
    "EnvSection",
    "EvaluationSection",
    "HTTPSection",
    "JudgeSection",
    "LabelsSection",
    "LearnerSection",
    "LoggingSection",
    "LoraSection",
    "MixtureSection",
    "ModelSection",
    "PreferenceSection",
    "ResourcesSection",
    "RewardModelSection",
    "RewardSection",
    "RolloutSection",
    "RunConfig",
    "SACSection",
    "SFTConfig",
    "SFTSection",
    "Section",
    "ServingSection",
    "StageSection",
    "TeacherSection",
    "VLLMSection",
    "apply_overrides",
    "load_config",
    "load_served_config",
    "load_sft_config",
    "parse_config",
    "save_config",
]
