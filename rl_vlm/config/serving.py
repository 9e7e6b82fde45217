"""`serving`: the Serve deployment of the policy and its engine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rl_vlm.config.section import Section


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


class SharingSection(Section):
    """Replicas that several runs share (`serving.shared`). Those of the run that starts the service count."""

    policies_per_replica: int | None = Field(
        None,
        ge=1,
        description="One more replica for each so many runs, from num_replicas up to replica_limit. Null: always num_replicas.",
    )
    replica_limit: int = Field(8, ge=1)
    max_lora_rank: int | None = Field(
        None,
        ge=1,
        description="The highest model.lora.rank of a run that joins (engine vllm). Null: that of the first.",
    )
    lora_slots: int = Field(8, ge=1, description="Adapters that sample at the same time (engine vllm).")
    merged_gib: float = Field(
        4.0,
        ge=0,
        description="Memory of a replica for weights with adapters added (engine transformers); beyond it adapters are computed "
        "beside the weights.",
    )
    queue_tokens: int = Field(
        262_144, ge=1, description="Prompt and new tokens of the samples that a replica works on at once, of all runs."
    )
    lease_s: float = Field(
        60.0, gt=0, description="A run that has not been heard of for this long has crashed: its policy is dropped."
    )


class ServingSection(Section):
    """The Serve deployment of the policy."""

    engine: Literal["auto", "transformers", "vllm"] = Field(
        "auto", description="auto: vllm on a GPU, else transformers."
    )
    shared: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$",
        description="A name: all runs on the cluster that give it share one set of replicas, each with a policy of its own. "
        "Null: the run has its own replicas.",
    )
    sharing: SharingSection = SharingSection()
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

    @property
    def expected_engine(self) -> Literal["transformers", "vllm"]:
        """The engine that is named; `auto` is vLLM where replicas get a GPU."""
        if self.engine == "auto":
            return "vllm" if self.gpus_per_replica > 0 else "transformers"
        return self.engine
