"""The configuration of a run: sections only, one file per concern. Nothing here imports what reads it."""

from rl_vlm.config.algorithm import AlgorithmSection
from rl_vlm.config.common import Actors, CommonConfig
from rl_vlm.config.critic import CriticSection
from rl_vlm.config.curriculum import CurriculumSection, StageSection
from rl_vlm.config.env import EnvPart, EnvSection, MixtureSection
from rl_vlm.config.evaluation import EvaluationDeadline, EvaluationSection
from rl_vlm.config.http import HTTPSection
from rl_vlm.config.labels import EndpointSection, LabelsSection, TeacherSection
from rl_vlm.config.learner import ComputeSection, LearnerActors, LearnerSection, OptimizerSection
from rl_vlm.config.loading import (
    TrainConfig,
    apply_overrides,
    load_config,
    load_policy_config,
    load_served_config,
    load_sft_config,
    of_policy,
    parse_config,
    save_config,
)
from rl_vlm.config.logging import LoggingSection, PlainLogging, TrainLogging
from rl_vlm.config.model import LoraSection, ModelSection, PlainModelSection, ServedModelSection, TrainedModelSection
from rl_vlm.config.policy import PolicyConfig
from rl_vlm.config.preference import (
    CollectionSection,
    ControlEnvSection,
    ControlEvaluationSection,
    PreferenceConfig,
    PreferenceSection,
)
from rl_vlm.config.resources import ResourcesSection
from rl_vlm.config.reward import JudgeSection, RewardSection
from rl_vlm.config.reward_model import RewardModelSection
from rl_vlm.config.rollout import RolloutSection
from rl_vlm.config.sac import SACSection
from rl_vlm.config.section import Section
from rl_vlm.config.serving import AutoscalingSection, ServingSection, VLLMSection
from rl_vlm.config.sft import SFTConfig, SFTSection

RunConfig = PolicyConfig

__all__ = [
    "Actors",
    "AlgorithmSection",
    "AutoscalingSection",
    "CollectionSection",
    "CommonConfig",
    "ComputeSection",
    "ControlEnvSection",
    "ControlEvaluationSection",
    "CriticSection",
    "CurriculumSection",
    "EndpointSection",
    "EnvPart",
    "EnvSection",
    "EvaluationDeadline",
    "EvaluationSection",
    "HTTPSection",
    "JudgeSection",
    "LabelsSection",
    "LearnerActors",
    "LearnerSection",
    "LoggingSection",
    "LoraSection",
    "MixtureSection",
    "ModelSection",
    "OptimizerSection",
    "PlainLogging",
    "PlainModelSection",
    "PolicyConfig",
    "PreferenceConfig",
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
    "ServedModelSection",
    "ServingSection",
    "StageSection",
    "TeacherSection",
    "TrainConfig",
    "TrainLogging",
    "TrainedModelSection",
    "VLLMSection",
    "apply_overrides",
    "load_config",
    "load_policy_config",
    "load_served_config",
    "load_sft_config",
    "of_policy",
    "parse_config",
    "save_config",
]
