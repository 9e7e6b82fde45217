"""`preference`: the preference loop, and the configuration of such a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from rl_vlm.config.common import CommonConfig
from rl_vlm.config.labels import LabelsSection, names_no_cache
from rl_vlm.config.rollout import EvaluationDeadline
from rl_vlm.config.section import Beta, Count, Natural, NonNegative, Positive, Section, Share


class RewardModelSection(Section):
    """The reward ensemble. Defaults are RL-VLM-F's, with its option in brackets."""

    architecture: Literal["cnn", "resnet18", "mlp"] = "cnn"  # [image_reward, resnet]
    size: Count = 3  # [ensemble_size]
    lr: Positive = 3e-4  # [reward_lr]
    batch: Count | None = None  # Pairs per gradient step; by default 64, ResNet 32, MLP 128.
    epochs: Count = 10  # Per session. [reward_update]
    stop_accuracy: Positive = 0.97  # Ends a session early. Above 1: never.
    # With few pairs the accuracy on them is high long before the reward is right.
    min_gradient_steps: Natural = 60  # Per session, whatever the accuracy; the original: 0.
    score_loss: Literal["squared", "absolute"] = "squared"  # Of learn_from_score; ERL-VLM's is absolute.
    label_margin: float = Field(0.0, ge=0, lt=0.5)  # m turns a hard label into (1 - m, m).
    stride: Count = 1  # See every stride-th pixel. [resize_factor]
    kernels: tuple[int, ...] = (5, 3, 3, 3)  # [conv_kernel_sizes]
    channels: tuple[int, ...] = (16, 32, 64, 128)  # [conv_n_channels]
    strides: tuple[int, ...] = (3, 2, 2, 2)  # [conv_strides]
    hidden: Count = 256  # Width of the MLP.
    layers: Count = 3  # Hidden layers of the MLP.
    squash: Literal["tanh", "sigmoid", "relu"] = "tanh"  # [activation]
    load: str | None = None  # A saved reward model to begin with. [reward_model_load_dir]

    @property
    def batch_size(self) -> int:
        return self.batch or {"cnn": 64, "resnet18": 32, "mlp": 128}[self.architecture]


class SACSection(Section):
    lr: Positive = 3e-4  # Of actor and critics.
    alpha_lr: Positive = 1e-4  # Learning rate of the temperature alpha.
    init_alpha: Positive = 0.1  # Alpha at the start.
    betas: tuple[Beta, Beta] = (0.9, 0.999)  # Of Adam.
    gamma: Share = 0.99  # Discount per step.
    tau: float = Field(0.005, gt=0, le=1)  # Share of the critics that enters the target critics at each update.
    target_update_every: Count = 2  # Updates of the critics between those of the targets.
    actor_update_every: Count = 1  # Updates of the critics between those of the actor.
    batch_size: Count = 512  # Transitions of an update.
    hidden: Count = 256  # Width of the networks' layers.
    depth: Count = 3  # Hidden layers.
    log_std_bounds: tuple[float, float] = (-5.0, 2.0)  # Bounds of the actor's log standard deviation.
    updates_per_step: Count = 1  # Updates per environment step.
    # torch.compile, with a fallback. auto: on a GPU, where the run makes enough updates to pay for it.
    compile: Literal["auto", "on", "off"] = "auto"


class CollectionSection(Section):
    num_env_runners: Natural = 0  # 0: the driver itself.
    cpus_per_env_runner: NonNegative = 0.5  # CPUs that Ray reserves for an env runner.
    steps: Count = 1  # Steps per environment between updates, which then are as many.
    timeout_s: Positive = 300.0  # Deadline of one round of steps.

    @property
    def num_envs(self) -> int:
        """One of each runner; they step together."""
        return max(self.num_env_runners, 1)


class ControlEvaluationSection(Section):
    """Evaluation of the agent on episodes from random starts, always the same ones."""

    every: Natural = 10_000  # Environment steps between evaluations; 0: only before and after.
    episodes: Count = 20  # Episodes of an evaluation.
    end_on_success: bool = False  # End an evaluation episode when it succeeds. [eval_terminate_on_success]
    film: Natural = 1  # Episodes of which a GIF is kept.


class PreferenceSection(Section):
    """The preference loop (PEBBLE as in RL-VLM-F). Defaults are its MetaWorld drawer-open."""

    # What the agent is rewarded with: a model learned from preferences or scores, CLIP's or BLIP-2's match of image and
    # task, or the environment's own dense or sparse reward.
    reward: Literal[
        "learn_from_preference",
        "learn_from_score",
        "clip_image_text_matching",
        "blip2_image_text_matching",
        "gt_task_reward",
        "sparse_task_reward",
    ] = "learn_from_preference"
    total_steps: Count = 1_000_000  # Environment steps of the run.
    random_steps: Natural = 1000  # Steps with random actions at the start.
    exploration_steps: Natural = 9000  # After the random ones; rewarded by the states' entropy.
    exploration_k: Count = 5  # Nearest neighbours of the entropy estimate that unsupervised exploration rewards.
    num_interact: Count = 4000  # Steps between labelling sessions.
    max_feedback: Natural = 20_000  # Pairs that are labelled in all; lost ones do not count.
    session_pairs: Count = 40  # Pairs that a session asks labels for.
    feedback_schedule: Literal[0, 1, 2] = 0  # 0: constant; 1: sessions shrink; 2: they grow.
    query_episodes: Count = 100  # What is labelled is drawn from that many newest episodes.
    segment_length: Count = 1  # Steps of a segment; pairs of single steps compare images.
    reset_updates: Natural = 100  # Updates at once after the critics are reset.
    replay_capacity: Count = 1_000_000  # Steps; at most frame_capacity if images are the input.
    frame_capacity: Count = 200_000  # Frames that are kept for pairs.
    image_size: int = Field(300, ge=16, le=1024)  # Side of a frame in pixels.
    # How long a session waits for a labeller that is down before the run stops.
    labeller_patience_s: NonNegative = 600.0
    steps_per_iteration: Count = 1000  # Environment steps per row of metrics.
    sac: SACSection = SACSection()
    collection: CollectionSection = CollectionSection()
    evaluation: ControlEvaluationSection = ControlEvaluationSection()
    labels: LabelsSection = LabelsSection()
    reward_model: RewardModelSection = RewardModelSection()

    def problems(self) -> Iterator[str]:
        if self.learns_reward and not self.max_feedback:
            yield "preference.max_feedback must be above 0 where the reward is learned from labels"
        if self.reward == "learn_from_score" and not names_no_cache(self.labels.cache):
            yield "preference.labels.cache holds labels of pairs, not the scores of learn_from_score: leave it out"
        if self.reward == "learn_from_score" and self.labels.source in ("scripted", "cache"):
            yield "preference.reward learn_from_score needs labels.source vlm, endpoint, generate, clip or itm"
        if self.learns_reward and self.random_steps + self.exploration_steps < 2 * self.segment_length:
            yield "preference.random_steps + exploration_steps must give the first session something to show"

    @property
    def learns_reward(self) -> bool:
        return self.reward in ("learn_from_preference", "learn_from_score")

    @property
    def rewards_images(self) -> bool:
        if self.learns_reward:
            return self.reward_model.architecture != "mlp"
        return self.reward in ("clip_image_text_matching", "blip2_image_text_matching")

    @property
    def draws_frames(self) -> bool:
        """Whether a picture is drawn after every step: for the reward, or for the labeller."""
        looked_at = self.learns_reward and self.labels.source != "scripted"
        return self.rewards_images or looked_at

    @property
    def asks_served_model(self) -> bool:
        return self.learns_reward and self.labels.source == "vlm"


class ControlEnvSection(Section):
    id: str = "ContinuousCartPole-v0"  # A registry id of a control environment.
    kwargs: dict[str, Any] = Field(default_factory=dict)  # Arguments of the environment's class.

    @property
    def title(self) -> str:
        return self.id


class PreferenceAlgorithm(Section):
    name: Literal["preference_sac"] = "preference_sac"  # What makes it a run of this kind.


class PreferenceConfig(CommonConfig):
    """The configuration of a run that trains an agent with rewards from preferences."""

    env: ControlEnvSection = ControlEnvSection()
    algorithm: PreferenceAlgorithm = PreferenceAlgorithm()
    evaluation: EvaluationDeadline = EvaluationDeadline()
    preference: PreferenceSection = PreferenceSection()

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.learner.num_learners > 1:
            yield "learner.num_learners must be 0 or 1 for preference_sac: its networks are small"
        if self.in_pairs:
            yield "resources.placement pairs has no effect with algorithm.name preference_sac: remove it"
        if self.serving.vllm.rest_while_learning:
            yield "serving.vllm.rest_while_learning has no effect with algorithm.name preference_sac: remove it"

    @property
    def serves(self) -> bool:
        return self.preference.asks_served_model

    @property
    def collection(self) -> CollectionSection:
        return self.preference.collection

    @property
    def samples_per_round(self) -> int:
        return self.preference.session_pairs * (2 if self.preference.labels.both_orders else 1)
