"""The configuration of labels and of the reward model: `preference.labels` and `preference.reward_model`.

Defaults are RL-VLM-F's, with its option in brackets; where ours differ, the description says so.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rl_vlm.labelling.labeller import QueryOptions
from rl_vlm.labelling.store import names_no_cache
from rl_vlm.labelling.teachers import TeacherOptions
from rl_vlm.preference.examples import TargetOptions
from rl_vlm.preference.reward_options import Architecture, EnsembleOptions, Squash
from rl_vlm.preference.selection import Rule

Source = Literal["vlm", "endpoint", "generate", "scripted", "random", "clip", "itm", "cache"]


class _Section(BaseModel):
    """Unknown keys are errors, values are not changed after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class TeacherSection(_Section):
    """The scripted teacher, which labels by the true reward (teacher_beta, teacher_gamma, teacher_eps_*)."""

    beta: float = Field(-1.0, description="0 or less: the higher return wins; above: Bradley-Terry with this scale.")
    gamma: float = Field(1.0, gt=0, le=1, description="Discount over a segment; its last step counts in full.")
    eps_mistake: float = Field(0.0, ge=0, le=1, description="Share of labels that are flipped.")
    eps_skip: float = Field(0.0, ge=0, description="Pairs below this share of the average return are skipped.")
    eps_equal: float = Field(0.0, ge=0, description="Pairs nearer than this share of the average return are equal.")

    def options(self) -> TeacherOptions:
        """As the teacher takes them."""
        return TeacherOptions(**self.model_dump())


class EndpointSection(_Section):
    """A labeller elsewhere, for `source: endpoint` (OpenAI's chat completions) and `source: generate`."""

    url: str = Field("", description="Empty with `generate`: SERVER_URL, or http://SERVER_HOST:SERVER_PORT/generate.")
    model: str = "default"
    token_env: str = Field("RL_VLM_LABEL_TOKEN", description="The environment variable that holds the token, if any.")
    timeout_s: float = Field(60.0, gt=0)
    guidance: Literal["structured_outputs", "guided_choice", "none"] = Field(
        "none", description="How choices are enforced there; the first two are vLLM's new and old field."
    )
    logprobs: bool = True
    max_in_flight: int | None = Field(None, ge=1, description="Questions at once; null: all of a session.")


class LabelsSection(_Section):
    """Who labels pairs, how they are asked, and which pairs."""

    source: Source = Field(
        "vlm",
        description="vlm: the served model. endpoint, generate: HTTP. scripted: the true reward. random: coin flips, a "
        "control. clip, itm: similarity of picture and text. cache: a label store alone.",
    )
    task: str | None = Field(None, description="Whose prompts are used; by default the environment's.")
    goal: str | None = Field(None, description="The goal in words, such as `to open the drawer`; replaces the task's.")
    description: str | None = Field(None, description="What the achieved goal looks like, for clip and itm.")
    prompts: str | None = Field(None, description="A YAML file of own prompts.")
    cache: str | None = Field(
        None,
        description="A label store whose sessions are replayed first; None, null and '' mean none. [cached_label_path]",
    )
    steps: Literal[1, 2] = Field(2, description="1: the label at once. 2: describe, then summarise. [vlm]")
    both_orders: bool = Field(True, description="Ask in both orders; a contradiction is -1. The original asks once.")
    guided: bool = Field(True, description="The answer is 0, 1 or -1 by construction, and its probabilities are kept.")
    temperature: float = Field(0.0, ge=0)
    describe_tokens: int = Field(512, ge=1)
    answer_tokens: int = Field(16, ge=1)
    frames: int = Field(1, ge=1, description="Pictures of a segment that are shown side by side. [vlm_label]")
    deadline_s: float = Field(300.0, gt=0, description="How long one question may take, retries included.")
    attempts: int = Field(3, ge=1)
    flip: bool = Field(False, description="Swap labels 0 and 1, as a control. [flip_vlm_label]")
    coin_flips: bool = Field(False, description="Replace each decided label by a coin flip, as a control.")
    rule: Rule = Field("uniform", description="Which pairs are asked about. [feed_type 0 to 5, in this order]")
    large_batch: int = Field(10, ge=1, description="Candidates per pair for rules other than uniform.")
    rounds: int = Field(
        4, ge=1, description="Undecided pairs are replaced by fresh ones up to this many times; the original: 1."
    )
    teacher: TeacherSection = TeacherSection()
    endpoint: EndpointSection = EndpointSection()
    similarity_model: str = Field(
        "openai/clip-vit-large-patch14-336",
        description="For clip; for itm a BLIP-2 such as Salesforce/blip2-itm-vit-g.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> LabelsSection:
        if self.source == "endpoint" and not self.endpoint.url:
            raise ValueError(
                "preference.labels.endpoint.url is needed for source endpoint, such as http://host:8000/v1"
            )
        if self.source == "cache" and names_no_cache(self.cache):
            raise ValueError("preference.labels.cache must name a label store for source cache")
        return self

    def query_options(self, seed: int) -> QueryOptions:
        """As the labeller takes them."""
        return QueryOptions(
            steps=self.steps,
            both_orders=self.both_orders,
            guided=self.guided,
            temperature=self.temperature,
            describe_tokens=self.describe_tokens,
            answer_tokens=self.answer_tokens,
            deadline_s=self.deadline_s,
            attempts=self.attempts,
            frames=self.frames,
            seed=seed,
        )


class RewardModelSection(_Section):
    """The reward ensemble."""

    architecture: Architecture = Field("cnn", description="[image_reward, resnet]")
    size: int = Field(3, ge=1, description="[ensemble_size]")
    lr: float = Field(3e-4, gt=0, description="[reward_lr]")
    batch: int | None = Field(None, ge=1, description="Pairs per gradient step; by default 64, ResNet 32, MLP 128.")
    epochs: int = Field(10, ge=1, description="Per session. [reward_update]")
    stop_accuracy: float = Field(0.97, gt=0, description="Ends a session early. Above 1: never.")
    min_gradient_steps: int = Field(60, ge=0, description="Per session, whatever the accuracy; the original: 0.")
    soft_labels: bool = Field(False, description="Train on the label's probabilities where they are known.")
    label_margin: float = Field(0.0, ge=0, lt=0.5, description="m turns a hard label into (1 - m, m).")
    ties: Literal["skip", "half"] = Field("skip", description="half: train on undecided pairs as (1/2, 1/2).")
    stride: int = Field(1, ge=1, description="See every stride-th pixel. [resize_factor]")
    kernels: tuple[int, ...] = Field((5, 3, 3, 3), description="[conv_kernel_sizes]")
    channels: tuple[int, ...] = Field((16, 32, 64, 128), description="[conv_n_channels]")
    strides: tuple[int, ...] = Field((3, 2, 2, 2), description="[conv_strides]")
    hidden: int = Field(256, ge=1, description="Width of the MLP.")
    layers: int = Field(3, ge=1, description="Hidden layers of the MLP.")
    squash: Squash = Field("tanh", description="[activation]")
    weights: str | None = Field(None, description="A local file of ImageNet weights for resnet18.")
    load: str | None = Field(None, description="A saved reward model to begin with. [reward_model_load_dir]")

    def options(self, capacity: int, device: str = "cpu") -> EnsembleOptions:
        """As the ensemble takes them; `capacity` is how many pairs are kept."""
        return EnsembleOptions(
            architecture=self.architecture,
            size=self.size,
            lr=self.lr,
            batch=self.batch,
            epochs=self.epochs,
            stop_accuracy=self.stop_accuracy,
            min_gradient_steps=self.min_gradient_steps,
            targets=TargetOptions(self.soft_labels, self.label_margin, self.ties),
            capacity=capacity,
            stride=self.stride,
            kernels=self.kernels,
            channels=self.channels,
            strides=self.strides,
            hidden=self.hidden,
            layers=self.layers,
            squash=self.squash,
            weights=self.weights,
            device=device,
        )
