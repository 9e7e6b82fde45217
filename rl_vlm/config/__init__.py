"""The configuration of a run: sections only, one file per concern. Nothing here imports what reads it."""

from rl_vlm.config.common import CommonConfig
from rl_vlm.config.env import CurriculumSection, EnvPart, EnvSection, RewardFunction, RewardSection
from rl_vlm.config.judges import JudgeSection, PropositionSection
from rl_vlm.config.labels import EndpointSection, LabelsSection, TeacherSection
from rl_vlm.config.learner import AlgorithmSection, CriticSection, LearnerSection, OptimizerSection
from rl_vlm.config.loading import (
    TrainConfig,
    load_config,
    load_served_config,
    load_sft_config,
    of_policy,
    parse_config,
    save_config,
)
from rl_vlm.config.logging import LoggingSection
from rl_vlm.config.overrides import apply_overrides
from rl_vlm.config.policy import PolicyConfig
from rl_vlm.config.preference import PreferenceConfig, PreferenceSection, RewardModelSection, SACSection
from rl_vlm.config.rollout import HistorySection, RolloutSection
from rl_vlm.config.section import Section
from rl_vlm.config.serving import AutoscalingSection, HTTPSection, ModelSection, ServingSection, TrainedModelSection
from rl_vlm.config.sft import SFTConfig
from rl_vlm.config.teacher import TeacherModelSection
