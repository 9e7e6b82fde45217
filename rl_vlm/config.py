"""The run configuration: one YAML file, checked, with dotted overrides. Unknown keys name the nearest known one."""

from __future__ import annotations

import copy
import difflib
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from rl_vlm.config_section import Section
from rl_vlm.models.images import PixelLimits
from rl_vlm.preference.loop_settings import PreferenceSection
from rl_vlm.types import UserInputError

_SCIENTIFIC = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


class LoraSection(Section):
    """LoRA on the language model's linear layers."""

    rank: int = Field(16, ge=1, le=512)
    alpha: int = Field(32, ge=1)
    target_modules: Literal["attn", "mlp", "all"] = "all"


class ModelSection(Section):
    """The vision-language model."""

    path: str = Field("tiny", description="`tiny`, a Hugging Face folder, or a hub name that was fetched before.")
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    train: Literal["lora", "full"] = "lora"
    lora: LoraSection = LoraSection()
    min_pixels: int | None = Field(None, ge=1, description="Smaller images are enlarged; null: the processor's limit.")
    max_pixels: int | None = Field(None, ge=1, description="Larger images are reduced; null: the processor's limit.")
    gpu_memory_gib: float | None = Field(
        None,
        gt=0,
        description="What this recipe needs on one GPU; `doctor` and `--dry-run` compare it with the machine.",
    )

    @property
    def pixels(self) -> PixelLimits:
        """The limits of an image's size, for everything that counts or shows images."""
        return PixelLimits(self.min_pixels, self.max_pixels)


class VLLMSection(Section):
    """Settings that only the vLLM engine has."""

    gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    tensor_parallel_size: int = Field(1, ge=1)
    enforce_eager: bool = False
    max_num_seqs: int = Field(256, ge=1)
    kv_cache_gib: int = Field(1, ge=1, description="Memory for keys and values on a machine without a GPU, whole GiB.")
    enable_prefix_caching: bool = Field(True, description="Prompts that begin alike are computed once.")
    mm_processor_cache_gib: float | None = Field(
        None, ge=0, description="Memory for the pixels of past images; null: 4 GiB on a GPU, 0.5 without; 0: none."
    )
    sleep_mode: bool = Field(
        False, description="On a GPU: the engine can give its memory to a learner and take it back."
    )


class AutoscalingSection(Section):
    """How the number of replicas follows the load (Ray Serve's autoscaler)."""

    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(1, ge=1)
    target_ongoing_requests: float = Field(
        4.0, gt=0, description="Calls per replica that are aimed at. An env runner's common call counts as one."
    )
    upscale_delay_s: float = Field(10.0, ge=0, description="How long the load must last before a replica is added.")
    downscale_delay_s: float = Field(120.0, ge=0, description="How long it must be gone before one is stopped.")

    @model_validator(mode="after")
    def _ordered(self) -> AutoscalingSection:
        if self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas ({self.max_replicas}) is below min_replicas ({self.min_replicas})")
        return self


class ServingSection(Section):
    """The Serve deployment of the policy."""

    engine: Literal["auto", "transformers", "vllm"] = Field(
        "auto", description="auto: vllm on a GPU, else transformers."
    )
    num_replicas: int = Field(2, ge=1, description="With autoscaling: how many there are at the start.")
    autoscaling: AutoscalingSection | None = Field(None, description="Null: the number of replicas is fixed.")
    cpus_per_replica: float = Field(0.5, ge=0)
    gpus_per_replica: float = Field(0.0, ge=0)
    max_context: int = Field(4096, ge=16, description="Prompt and new tokens of one sample.")
    max_rows: int = Field(512, ge=1, description="Samples that the transformers engine runs at once.")
    num_threads: int = Field(1, ge=1, description="torch threads of a replica on a CPU.")
    quantization: Literal["none", "nf4", "fp8"] = Field(
        "none",
        description="Of the linear weights: nf4 (engine transformers, needs bitsandbytes) or fp8 (vllm on a GPU).",
    )
    request_timeout_s: float = Field(300.0, gt=0)
    publish_timeout_s: float = Field(60.0, gt=0, description="How long a replica may take to load a new adapter.")
    startup_timeout_s: float = Field(600.0, gt=0)
    probe_after_s: float = Field(
        15.0,
        gt=0,
        description="An engine that has produced nothing for this long must generate a token, to prove that it can.",
    )
    probe_timeout_s: float = Field(
        10.0, gt=0, description="How long that token may take; a second failure replaces it."
    )
    vllm: VLLMSection = VLLMSection()


class EnvSection(Section):
    """The environment."""

    id: str = Field("Shapes-v0", description="A registry id, `package.module:Class`, or `path/to/env.py[:Class]`.")
    data: str | dict[str, str] | None = Field(
        None,
        description="Folder, file or hub name of the data, or one for each of `train` and `test`; passed on as `data`.",
    )
    kwargs: dict[str, Any] = Field(default_factory=dict)
    isolation: Literal["thread", "process"] = Field("thread", description="process: a child that can be killed.")
    step_timeout_s: float = Field(60.0, gt=0)
    num_items: int | None = Field(None, ge=1, description="Use only the first items of the training split.")

    @field_validator("data", mode="before")
    @classmethod
    def _names_sources(cls, value: Any) -> Any:
        split_to_source = isinstance(value, dict) and value.keys() <= {"train", "test"}
        if (
            value is None
            or isinstance(value, str)
            or (split_to_source and all(isinstance(v, str) for v in value.values()))
        ):
            return value
        raise ValueError(
            "env.data is a folder, file or hub name, or a mapping such as {train: a.parquet, test: b.parquet}"
        )

    def make_kwargs(self, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The arguments that the environment is made with."""
        data = {"data": self.data} if self.data is not None else {}
        return {**data, **self.kwargs, **(overrides or {})}


class RolloutSection(Section):
    """How the policy is sampled."""

    num_env_runners: int = Field(2, ge=1)
    cpus_per_env_runner: float = Field(0.25, ge=0)
    prompts_per_iteration: int = Field(16, ge=1)
    group_size: int = Field(8, ge=1)
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    max_turns: int = Field(
        8, ge=1, description="Turns after which an episode is truncated, whatever the environment says."
    )
    max_new_tokens_per_turn: int = Field(64, ge=1)
    max_new_tokens: int = Field(3072, ge=1, description="Sampled tokens of a whole trajectory.")
    require_end_of_turn: bool = Field(
        True, description="A turn without its end-of-turn token ends the episode without a reward."
    )
    max_policy_lag: int = Field(0, ge=0, description="0: sample, then learn. 1 or more: both at the same time.")
    open_ahead: bool = Field(
        True,
        description="Open the next round's episodes and encode their images while the learner works (max_policy_lag 0).",
    )
    group_retries: int = Field(2, ge=0, description="How often a failed group is tried again with fresh environments.")
    max_consecutive_failures: int = Field(32, ge=1, description="Lost groups in a row after which the run stops.")
    timeout_s: float = Field(900.0, gt=0, description="Deadline of one round of sampling.")


class AlgorithmSection(Section):
    """`preference_sac` is set by `preference`; all else here is GRPO's. Defaults are the published multi-turn geo3k recipe: clip 0.2 / 0.28, no KL, no entropy bonus, std-normalised."""

    name: Literal["grpo", "preference_sac"] = "grpo"
    iterations: int = Field(100, ge=1)
    loss: Literal["grpo", "dapo", "dr_grpo"] = "grpo"
    advantage_normalization: Literal["std", "none"] = "std"
    advantage_scale: float = Field(1.0, gt=0)
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.28, gt=0)
    tis_cap: float | None = Field(2.0, gt=0, description="Cap of the engine-to-learner importance weight; null: off.")
    kl_coef: float = Field(0.0, ge=0)
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    entropy_coef: float = Field(0.0, ge=0)
    epochs: int = Field(1, ge=1)
    minibatches: int = Field(1, ge=1, description="Optimiser steps per epoch of a rollout.")
    shuffle_rewards: bool = Field(False, description="A control that must fail: rewards are permuted over the batch.")


class LearnerSection(Section):
    """The learner group."""

    num_learners: int = Field(0, ge=0, description="0: inside the driver; more: actors that share each optimiser step.")
    cpus_per_learner: float = Field(0.5, ge=0)
    gpus_per_learner: float = Field(0.0, ge=0)
    lr: float = Field(1e-5, gt=0)
    lr_schedule: Literal["constant", "linear"] = "constant"
    lr_final_fraction: float = Field(
        0.1, ge=0, le=1, description="Of a linear schedule, reached at the last iteration."
    )
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    micro_batch_tokens: int = Field(8192, ge=1)
    share_prompts: bool = True
    gradient_checkpointing: bool = False
    num_threads: int = Field(1, ge=1)
    max_restarts: int = Field(3, ge=0, description="How often a dead learner is replaced from the last checkpoint.")


class EvaluationSection(Section):
    """Held-out evaluation, greedy; with `samples` above 1 also pass@k at the rollout temperature."""

    every: int = Field(50, ge=0, description="Iterations between evaluations; 0: only before and after.")
    num_items: int = Field(512, ge=1)
    samples: int = Field(1, ge=1)
    split: Literal["train", "test"] = "test"
    variants: dict[str, dict[str, Any]] = Field({"default": {}}, description="Name -> environment arguments to change.")
    timeout_s: float = Field(1800.0, gt=0)


class LoggingSection(Section):
    """What is kept of a run."""

    checkpoint_every: int = Field(25, ge=1)
    keep_checkpoints: int = Field(3, ge=1)
    trajectories_every: int = Field(10, ge=0, description="Iterations between dumps of sampled trajectories; 0: none.")
    trajectories_per_dump: int = Field(64, ge=1)
    tensorboard: bool = True
    wandb_project: str = "rl-vlm"


class ResourcesSection(Section):
    """The Ray cluster: a private one unless RAY_ADDRESS (or a Ray job) names another."""

    num_cpus: int | None = Field(
        None, ge=1, description="Logical CPUs of the private cluster; null: what the run needs."
    )
    object_store_mib: int = Field(256, ge=80)
    dashboard: bool = False


class HTTPSection(Section):
    """`rl-vlm serve`: where it listens and what it refuses."""

    host: str = Field("127.0.0.1", min_length=1, description="Beyond loopback a token is required.")
    port: int = Field(8000, ge=0, le=65535, description="0: any free port.")
    model_name: str | None = Field(
        None, min_length=1, description="What clients call the model; null: as it was given."
    )
    max_body_mib: float = Field(32.0, gt=0, description="One request's body, enforced while it is read.")
    max_images: int = Field(16, ge=0, description="Per request.")
    max_image_mib: float = Field(10.0, gt=0, description="One image's file.")
    max_image_pixels: int = Field(16_777_216, ge=1, description="One image; its header is read before it is decoded.")
    max_text_chars: int = Field(200_000, ge=1, description="All texts of a request; its tokens: serving.max_context.")
    max_parts: int = Field(1024, ge=1, description="Messages and their parts in one request.")
    max_new_tokens: int = Field(2048, ge=1, description="Per sample; also the default where a client names none.")
    max_samples: int = Field(64, ge=1, description="`n` of one request.")
    max_queue: int = Field(
        256, ge=1, description="Requests at a time, waiting and running; more are told to come back."
    )
    deadline_s: float = Field(300.0, gt=0, description="Of one request, from its first byte to its last token.")
    drain_s: float = Field(30.0, ge=0, description="How long running requests may go on after SIGTERM.")
    resize_min_pixels: int | None = Field(
        None, ge=1, description="Images are enlarged to this; null: as the model does."
    )
    resize_max_pixels: int | None = Field(None, ge=1, description="Images are shrunk to this; null: as the model does.")


class RunConfig(Section):
    """Everything about a run."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$")
    seed: int = Field(0, ge=0, lt=2**31)
    deterministic: bool = Field(False, description="Lock-step sampling: k + k iterations equal 2k byte for byte.")
    model: ModelSection = ModelSection()
    serving: ServingSection = ServingSection()
    env: EnvSection = EnvSection()
    rollout: RolloutSection = RolloutSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    learner: LearnerSection = LearnerSection()
    evaluation: EvaluationSection = EvaluationSection()
    preference: PreferenceSection = PreferenceSection()
    logging: LoggingSection = LoggingSection()
    resources: ResourcesSection = ResourcesSection()
    http: HTTPSection = HTTPSection()

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        rollout = self.rollout
        if rollout.top_p < 1 or rollout.top_k > 0:
            raise ValueError(
                "rollout.top_p must be 1 and rollout.top_k 0 in training: the learner cannot reproduce a truncated "
                "distribution"
            )
        if self.algorithm.minibatches > rollout.prompts_per_iteration:
            raise ValueError(
                f"algorithm.minibatches ({self.algorithm.minibatches}) exceeds rollout.prompts_per_iteration "
                f"({rollout.prompts_per_iteration}): a minibatch needs at least one group"
            )
        uses_vllm = self.serving.engine == "vllm" or (
            self.serving.engine == "auto" and self.serving.gpus_per_replica > 0
        )
        quantization = self.serving.quantization
        if (quantization == "nf4" and uses_vllm) or (quantization == "fp8" and not uses_vllm):
            raise ValueError(
                "serving.quantization: nf4 needs serving.engine transformers (vLLM has no NF4), fp8 needs vllm on a GPU"
            )
        if self.deterministic and (uses_vllm or self.model.dtype != "float32" or rollout.max_policy_lag):
            raise ValueError(
                "deterministic: true needs serving.engine transformers, model.dtype float32 and rollout.max_policy_lag 0"
            )
        if self.algorithm.name == "preference_sac" and self.learner.num_learners > 1:
            raise ValueError("learner.num_learners must be 0 or 1 for preference_sac: its networks are small")
        if self.algorithm.name == "preference_sac" and self.env.isolation != "thread":
            raise ValueError(
                "env.isolation process is for vision environments: use preference.collection.num_env_runners"
            )
        if self.model.train == "full":
            raise ValueError(
                "model.train: full is not available yet, because full weights cannot be sent to running replicas: "
                "use model.train: lora"
            )
        return self

    @property
    def most_replicas(self) -> int:
        """How many replicas the run may ever have."""
        autoscaling = self.serving.autoscaling
        return max(self.serving.num_replicas, autoscaling.max_replicas) if autoscaling else self.serving.num_replicas

    @property
    def needed_cpus(self) -> float:
        """Logical CPUs that all actors of the run hold together."""
        if self.algorithm.name == "preference_sac":
            collection = self.preference.collection
            replicas = self.serving.num_replicas if self.preference.asks_served_model else 0
            return (
                replicas * self.serving.cpus_per_replica
                + collection.num_env_runners * collection.cpus_per_env_runner
                + self.learner.num_learners * self.learner.cpus_per_learner
            )
        return (
            self.serving.num_replicas * self.serving.cpus_per_replica
            + self.rollout.num_env_runners * self.rollout.cpus_per_env_runner
            + self.learner.num_learners * self.learner.cpus_per_learner
        )

    @property
    def needed_gpus(self) -> float:
        """GPUs that all actors of the run hold together; a learner inside the driver counts as one actor."""
        learners = max(self.learner.num_learners, 1 if self.learner.gpus_per_learner else 0)
        if self.algorithm.name == "preference_sac" and not self.preference.asks_served_model:
            return learners * self.learner.gpus_per_learner
        return self.serving.num_replicas * self.serving.gpus_per_replica + learners * self.learner.gpus_per_learner


def load_config(path: str | Path | None, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a YAML file, apply `section.key=value` overrides, check everything. Raises UserInputError."""
    data: dict[str, Any] = {}
    if path is not None:
        file = Path(path)
        try:
            text = file.read_text()
        except OSError as error:
            raise UserInputError(f"Cannot read the config {file}: {error.strerror or error}.") from error
        except UnicodeDecodeError as error:
            raise UserInputError(f"The config {file} is not a text file ({error.reason}).") from error
        try:
            loaded = yaml.safe_load(text)
        except yaml.YAMLError as error:
            where = getattr(error, "problem_mark", None)
            line = f" in line {where.line + 1}" if where else ""
            raise UserInputError(
                f"The config {file} is not valid YAML{line}: {getattr(error, 'problem', error)}."
            ) from error
        if loaded is not None and not isinstance(loaded, dict):
            raise UserInputError(
                f"The config {file} must hold sections such as `model:`, not a {type(loaded).__name__}."
            )
        data = loaded or {}
    for override in overrides:
        _apply_override(data, override)
    return parse_config(data)


def parse_config(data: Mapping[str, Any]) -> RunConfig:
    """Check a nested dictionary. Raises UserInputError with one sentence on the first thing that is wrong."""
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise UserInputError(_explain(error)) from error


def apply_overrides(data: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of nested `data` with dotted keys set, such as `{"learner.lr": 1e-3}`."""
    result = copy.deepcopy(dict(data))
    for key, value in overrides.items():
        _set(result, key, value)
    return result


def save_config(config: RunConfig, path: Path) -> None:
    """Write the resolved configuration, atomically."""
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    os.replace(temporary, path)


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise UserInputError(f"Override {override!r} must have the form section.key=value, such as learner.lr=1e-3.")
    try:
        value = yaml.safe_load(text) if text else None
    except yaml.YAMLError as error:
        raise UserInputError(f"The value of override {override!r} is not valid YAML: quote it.") from error
    if isinstance(value, str) and _SCIENTIFIC.fullmatch(text.strip()):
        value = float(value)  # YAML 1.1 reads 1e-3 as text; people mean a number, unless they quote it
    _set(data, key.strip(), value)


def _set(data: dict[str, Any], key: str, value: Any) -> None:
    node = data
    *parents, last = key.split(".")
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise UserInputError(f"Config key {key}: {parent} is a value, not a section.")
        node = child
    node[last] = value


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    location = [str(part) for part in first["loc"]]
    key = ".".join(location)
    if first["type"] == "extra_forbidden":
        section: type[BaseModel] = RunConfig
        for part in location[:-1]:
            annotation = section.model_fields[part].annotation
            if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
                break
            section = annotation
        prefix = ".".join(location[:-1])
        known = {(f"{prefix}.{name}" if prefix else name): name for name in section.model_fields}
        nearest = difflib.get_close_matches(location[-1], known.values(), n=1, cutoff=0.5)
        if not nearest:
            everywhere = _all_keys(RunConfig)
            found = [full for full in everywhere if full.rsplit(".", 1)[-1] == location[-1]]
            hint = f" Did you mean {found[0]}?" if found else f" Known keys here: {', '.join(known.values())}."
            return f"Unknown config key {key}.{hint}"
        return f"Unknown config key {key}. Did you mean {f'{prefix}.' if prefix else ''}{nearest[0]}?"
    if first["type"] == "value_error":
        message = str(first["ctx"]["error"])
        return f"Config: {message}."
    shown = repr(first.get("input"))
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    message = first["msg"][0].lower() + first["msg"][1:]
    return f"Config key {key or 'file'}: {message}; got {shown}."


def _all_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name, info in section.model_fields.items():
        keys.append(prefix + name)
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            keys.extend(_all_keys(info.annotation, f"{prefix}{name}."))
    return keys
