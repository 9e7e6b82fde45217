"""The configuration of a run: sections only, one file per concern. Nothing here imports what reads it."""

from rl_vlm.config.common import Actors, CommonConfig
from rl_vlm.config.labels import EndpointSection, LabelsSection, TeacherSection
from rl_vlm.config.learner import (
    AlgorithmSection,
    ComputeSection,
    CriticSection,
    LearnerActors,
    LearnerSection,
    OptimizerSection,
)
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
from rl_vlm.config.policy import PolicyConfig
from rl_vlm.config.preference import (
    CollectionSection,
    ControlEnvSection,
    ControlEvaluationSection,
    PreferenceConfig,
    PreferenceSection,
    RewardModelSection,
    SACSection,
)
from rl_vlm.config.rollout import (
    CurriculumSection,
    EnvPart,
    EnvSection,
    EvaluationDeadline,
    EvaluationSection,
    JudgeSection,
    MixtureSection,
    RewardSection,
    RolloutSection,
    StageSection,
)
from rl_vlm.config.section import LoggingSection, PlainLogging, ResourcesSection, Section, TrainLogging
from rl_vlm.config.serving import (
    AutoscalingSection,
    HTTPSection,
    LoraSection,
    ModelSection,
    PlainModelSection,
    ServedModelSection,
    ServingSection,
    TrainedModelSection,
    VLLMSection,
)
from rl_vlm.config.sft import SFTConfig, SFTSection
