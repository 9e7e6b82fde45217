"""`serving`: the Serve deployment of the policy and its engine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from pydantic import Field, field_validator

from rl_vlm.config.section import Section

# vLLM silently raises lower temperatures than the first and refuses higher ones than the second.
VLLM_TEMPERATURES = (0.01, 2.0)


class VLLMSection(Section):
    """Settings that only the vLLM engine has."""

    gpu_memory_utilization: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Share of a GPU's memory for everything that a replica holds there. Null: 0.85 of what gpus_per_replica gives it.",
    )
    tensor_parallel_size: int = Field(1, ge=1)
    enforce_eager: bool = False
    max_num_seqs: int = Field(256, ge=1)
    max_num_batched_tokens: int = Field(
        8192,
        ge=16,
        description="Tokens of one step on a GPU, prompts and samples together; vLLM's own default here is 2048.",
    )
    kv_cache_gib: int = Field(1, ge=1, description="Memory for keys and values on a machine without a GPU, whole GiB.")
    gpu_kv_cache_gib: float | None = Field(
        None,
        gt=0,
        description="Memory for keys and values on a GPU. Null: what `rl-vlm plan` computes where the GPU is shared, else what vLLM measures.",
    )
    enable_prefix_caching: bool = Field(True, description="Prompts that begin alike are computed once.")
    rest_while_learning: bool = Field(
        False,
        description="Give the memory of keys and values to the learner while it works, and take it back for sampling. For one replica and one "
        "learner on one GPU, with rollout.max_policy_lag 0.",
    )
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

    def problems(self) -> Iterator[str]:
        """Bounds that contradict each other."""
        if self.max_replicas < self.min_replicas:
            yield f"serving.autoscaling.max_replicas ({self.max_replicas}) is below min_replicas ({self.min_replicas})"


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
    max_kv_gib: float | None = Field(
        None,
        gt=0,
        description="Keys and values of a replica with the transformers engine; requests beyond it wait. Null: what its share of the "
        "GPU leaves, or 80 % of the free memory of a machine without one, over all replicas.",
    )
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
        10.0,
        gt=0,
        description="How long that token may take, or any half of a layer of the model (vLLM: any step); a second failure replaces it.",
    )
    vllm: VLLMSection = VLLMSection()

    @field_validator("gpus_per_replica")
    @classmethod
    def _whole_or_share(cls, gpus: float) -> float:
        if gpus > 1 and gpus != int(gpus):
            raise ValueError(
                f"{gpus:g} GPUs: Ray gives a share of one GPU (up to 1) or whole GPUs; use {math.ceil(gpus)}"
            )
        return gpus

    def problems(self) -> Iterator[str]:
        """Keys of the other engine, and shares of GPUs that an engine cannot have."""
        yield from self._other_engines()
        gpus, parallel = self.gpus_per_replica, self.vllm.tensor_parallel_size
        if self.expected_engine == "transformers":
            if gpus > 1:
                yield (
                    f"serving.gpus_per_replica {gpus:g} with the engine transformers, which computes on one GPU: set it to 1 and raise "
                    "num_replicas, or use engine vllm with vllm.tensor_parallel_size"
                )
            return
        if gpus and max(gpus, 1) != parallel:
            yield (
                f"serving.gpus_per_replica {gpus:g} and vllm.tensor_parallel_size {parallel} contradict each other: a replica computes "
                f"on tensor_parallel_size whole GPUs; set both to {max(math.ceil(gpus), parallel)}, or tensor_parallel_size to 1"
            )
        if self.vllm.max_num_batched_tokens < self.vllm.max_num_seqs:
            yield (
                f"serving.vllm.max_num_batched_tokens ({self.vllm.max_num_batched_tokens}) is below vllm.max_num_seqs "
                f"({self.vllm.max_num_seqs}): every running sample takes one token of a step"
            )
        share = self.vllm.gpu_memory_utilization
        if share is not None and 0 < gpus < 1 and share > gpus:
            yield (
                f"serving.vllm.gpu_memory_utilization {share:g} is more of the GPU than gpus_per_replica {gpus:g} gives a replica, and "
                f"what shares the GPU would run out of memory: set it to {gpus:g} or less"
            )

    def _other_engines(self) -> Iterator[str]:
        engine = self.expected_engine
        keys = {
            "vllm": [f"vllm.{key}" for key in self.vllm.changed(*VLLMSection.model_fields)],
            "transformers": list(self.changed("max_rows", "max_kv_gib", "num_threads")),
        }
        for other, changed in keys.items():
            for key in changed if other != engine else ():
                yield (
                    f"serving.{key} has no effect with the engine {engine}: remove it, or set serving.engine to {other} (auto means "
                    "vllm where serving.gpus_per_replica is above 0)"
                )

    @property
    def memory_utilization(self) -> float:
        """The share of a GPU's memory that a replica may hold: as set, or 0.85 of the GPU or of the replica's share of it."""
        if self.vllm.gpu_memory_utilization is not None:
            return self.vllm.gpu_memory_utilization
        return 0.85 * (min(self.gpus_per_replica, 1.0) or 1.0)

    @property
    def expected_engine(self) -> Literal["transformers", "vllm"]:
        """The engine that is named; `auto` is vLLM where replicas get a GPU."""
        if self.engine == "auto":
            return "vllm" if self.gpus_per_replica > 0 else "transformers"
        return self.engine
