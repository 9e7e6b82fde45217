"""`model`, `serving` and `http`: the vision-language model, and who serves it to whom."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from rl_vlm.config.section import Count, FilePath, Name, Natural, NonNegative, OnlyWith, Positive, Section
from rl_vlm.types import PixelLimits

# A token's share of a loss is 1e-5 and less, and float16 has nothing below 6e-8.
FLOAT16_UNTRAINABLE = (
    "model.dtype float16 cannot be trained in, because gradients of single tokens underflow to 0: set it to bfloat16 "
    "or float32; `rl-vlm eval` and `rl-vlm serve` take float16"
)
FILLED = 0.94  # of a GPU: what vLLM, and a learner beside it, take; the rest is for what the plan estimates
_SOLD_AS = 0.97  # of the GiB that a card is sold with, it reports at least this: 23.6 of 24, 47.4 of 48, 79.15 of 80


class LoraSection(Section):
    rank: int = Field(16, ge=1, le=512)  # Inner dimension r of the adapter's two matrices.
    alpha: Count = 32  # The adapter's output is scaled by alpha / rank.
    # mlp_attn and all mean the same; vision: also those of the vision tower; none: for evaluation and serving.
    target_modules: Literal["none", "attn", "mlp", "mlp_attn", "all", "vision"] = "all"


class PlainModelSection(Section):
    path: str = "tiny"  # `tiny`, a Hugging Face folder, or a hub name that was fetched before.
    # float16 is for evaluation and serving alone: gradients underflow in it.
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    # Of the products that make logits. model: rounded to `dtype`, in bfloat16 what engine and learner differ by.
    head_dtype: Literal["model", "float32"] = "model"
    min_pixels: Count | None = None  # Smaller images are enlarged; null: the processor's limit.
    max_pixels: Count | None = None  # Larger images are reduced; null: the processor's limit.
    # The card that this recipe is made for, as it is sold: 24, 48, 80. The start of a run compares it with the machine.
    gpu_memory_gib: Positive | None = None

    @property
    def pixels(self) -> PixelLimits:
        return PixelLimits(self.min_pixels, self.max_pixels)

    @property
    def least_gpu_gib(self) -> float | None:
        """What a card of `gpu_memory_gib` reports at least, in GiB; None where nothing is stated."""
        return None if self.gpu_memory_gib is None else self.gpu_memory_gib * _SOLD_AS


class ServedModelSection(PlainModelSection):
    # Memory for features of images that come again, in each learner and each replica of the transformers engine.
    image_cache_mib: Natural = 256

    @property
    def image_cache_bytes(self) -> int:
        return self.image_cache_mib << 20


class TrainedModelSection(PlainModelSection):
    # lora: adapters beside frozen weights. full: all weights, the vision tower's too; `lora` is then not read.
    train: Literal["lora", "full"] = "lora"
    lora: LoraSection = LoraSection()
    # Where training starts: a run folder or peft adapter folder that fits `lora`. The KL's reference stays the model.
    adapter: FilePath | None = None


class ModelSection(ServedModelSection, TrainedModelSection):
    """A model that is served and trained."""


class HTTPSection(Section):
    """`rl-vlm serve`: where it listens and what it rejects."""

    host: str = Field("127.0.0.1", min_length=1)  # Beyond loopback a token is required.
    port: int = Field(8000, ge=0, le=65535)  # 0: any free port.
    model_name: str | None = Field(None, min_length=1)  # What clients call the model; null: as it was given.
    # Web pages, such as https://chat.example.org, whose scripts may call the server with its token (CORS).
    allowed_origins: list[str] = Field([])
    max_body_mib: Positive = 32.0  # One request's body, enforced while it is read.
    max_images: Natural = 16  # Per request.
    max_image_mib: Positive = 10.0  # One image's file.
    max_image_pixels: Count = 16_777_216  # One image; its header is read before it is decoded.
    max_request_pixels: Count = 201_326_592  # All images of a request; 16 photos of 12 megapixels fit.
    # Hosts whose images clients may name by address; they are fetched from here.
    image_hosts: list[str] = Field([])
    max_text_chars: Count = 200_000  # All texts of a request; its tokens: serving.max_context.
    max_parts: Count = 1024  # Messages and their parts in one request.
    max_new_tokens: Count = 2048  # Per sample; also the default where a client names none.
    max_samples: Count = 64  # `n` of one request.
    max_reply_values: Count = 100_000  # Log-probabilities of a reply: n x max_tokens x (1 + top_logprobs).
    # Clients may load adapters from folders below this one (POST /v1/load_lora_adapter); null: none.
    adapter_root: FilePath | None = None
    max_adapters: Count = 16  # That clients have loaded at a time.
    max_adapter_mib: Positive = 1024.0  # One adapter's file.
    max_queue: Count = 256  # Requests at a time, waiting and running; others must come back later.
    # At a time; null: four times max_queue, at least 1024. Fewer where descriptors are short.
    max_connections: Count | None = None
    # Of one address (IPv6: network of 64 bits); null: three quarters of all.
    max_connections_per_peer: Count | None = None
    headers_s: Positive = 10.0  # Until the headers of a request are complete, on any connection.
    deadline_s: Positive = 300.0  # Of one request, from its first byte to its last token.
    drain_s: NonNegative = 30.0  # How long running requests may go on after SIGTERM.


# vLLM silently raises lower temperatures than the first and rejects higher ones than the second.
VLLM_TEMPERATURES = (0.01, 2.0)


class VLLMSection(Section):
    # Share of a GPU's memory for everything that a replica holds there. Null: 0.94 of what gpus_per_replica gives it.
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    tensor_parallel_size: Count = 1  # GPUs that one replica's weights are split over.
    enforce_eager: bool = False  # Do not capture CUDA graphs: starts faster and decodes slower.
    max_num_seqs: Count = 256  # Samples that a vLLM replica runs at once.
    # Tokens of one step on a GPU, prompts and samples together; vLLM's own default here is 2048.
    max_num_batched_tokens: int = Field(8192, ge=16)
    kv_cache_gib: Count = 1  # Memory for keys and values on a machine without a GPU, whole GiB.
    # For keys and values on a GPU. Null: what `rl-vlm plan` computes if the GPU is shared, else what vLLM measures.
    gpu_kv_cache_gib: Positive | None = None
    # Lend the memory of keys and values to the learner while it works: for one replica and one learner on one GPU.
    # Null: if a run has these, no lag, and no gpu_memory_utilization.
    rest_while_learning: bool | None = None


class AutoscalingSection(Section):
    """How the number of replicas follows the load (Ray Serve's autoscaler)."""

    min_replicas: Count = 1  # Autoscaling keeps at least this many replicas.
    max_replicas: Count = 1  # Autoscaling never starts more than these.
    # Calls per replica that are aimed at. An env runner's common call counts as one.
    target_ongoing_requests: Positive = 4.0
    upscale_delay_s: NonNegative = 10.0  # How long the load must last before a replica is added.
    downscale_delay_s: NonNegative = 120.0  # How long it must be gone before one is stopped.

    def problems(self) -> Iterator[str]:
        if self.max_replicas < self.min_replicas:
            yield f"serving.autoscaling.max_replicas ({self.max_replicas}) is below min_replicas ({self.min_replicas})"


class SharingSection(Section):
    """Replicas that runs share (those of the run that starts the service count), or that clients load adapters into."""

    # The highest model.lora.rank of a run that joins (engine vllm). Null: that of the first.
    max_lora_rank: Count | None = None
    lora_slots: Count = 8  # Adapters that sample at the same time (engine vllm).
    # Of a replica, for weights with adapters added (engine transformers); others are computed beside the weights.
    merged_gib: NonNegative = 4.0
    lease_s: Positive = 60.0  # A run that has not been heard of for this long has crashed: its policy is dropped.


class ServingSection(Section):
    place: ClassVar[str] = "serving."
    conditional: ClassVar[tuple[OnlyWith, ...]] = (
        OnlyWith(("vllm",), "engine", ("vllm",)),
        OnlyWith(("max_rows", "max_kv_gib", "num_threads"), "engine", ("transformers",)),
    )

    engine: Literal["auto", "transformers", "vllm"] = "auto"  # auto: vllm on a GPU, else transformers.
    # All runs on the cluster that give this name share one set of replicas, each with a policy of its own.
    shared: Name | None = None
    sharing: SharingSection = SharingSection()
    num_replicas: Count = 2  # With autoscaling: how many there are at the start.
    autoscaling: AutoscalingSection | None = None  # Null: the number of replicas is fixed.
    cpus_per_replica: NonNegative = 0.5  # CPUs that Ray reserves for a replica.
    gpus_per_replica: NonNegative = 0.0  # GPUs that Ray reserves for a replica; a fraction lets several share one.
    max_context: int = Field(4096, ge=16)  # Prompt and new tokens of one sample.
    max_rows: Count = 512  # Samples that the transformers engine runs at once.
    # Keys and values of a transformers replica. Null: what its share of the GPU leaves, or 80 % of free main memory.
    max_kv_gib: Positive | None = None
    num_threads: Count = 1  # torch threads of a replica on a CPU.
    # Of the linear weights: nf4 (engine transformers, needs bitsandbytes) or fp8 (vllm on a GPU).
    quantization: Literal["none", "nf4", "fp8"] = "none"
    request_timeout_s: Positive = 300.0  # How long an env runner waits for an answer, retries included.
    # How long a request waits for its version, a load of weights may take, and a replica's loads may keep failing.
    publish_timeout_s: Positive = 60.0
    startup_timeout_s: Positive = 600.0  # How long the first replica may take to load the model.
    # An engine that has produced nothing for this long must generate a token, to prove that it can.
    probe_after_s: Positive = 15.0
    # How long that token may take while no part of a layer is computed. The second failure replaces the replica.
    probe_timeout_s: Positive = 10.0
    vllm: VLLMSection = VLLMSection()

    @field_validator("gpus_per_replica")
    @classmethod
    def _whole_or_share(cls, gpus: float) -> float:
        if gpus > 1 and gpus != int(gpus):
            raise ValueError(f"{gpus:g} GPUs: Ray gives a share of one GPU (up to 1) or whole GPUs")
        return gpus

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        gpus, vllm = self.gpus_per_replica, self.vllm
        parallel, share = vllm.tensor_parallel_size, vllm.gpu_memory_utilization
        if self.expected_engine == "transformers":
            if gpus > 1:
                yield f"serving.gpus_per_replica {gpus:g}: the engine transformers computes on one GPU; set it to 1"
            return
        if gpus and max(gpus, 1) != parallel:
            yield (
                f"serving.gpus_per_replica {gpus:g} and vllm.tensor_parallel_size {parallel} contradict each other: "
                f"set both to {max(math.ceil(gpus), parallel)}, or tensor_parallel_size to 1"
            )
        if vllm.max_num_batched_tokens < vllm.max_num_seqs:
            yield (
                f"serving.vllm.max_num_batched_tokens ({vllm.max_num_batched_tokens}) is below vllm.max_num_seqs "
                f"({vllm.max_num_seqs}): every running sample takes one token of a step"
            )
        if share is not None and 0 < gpus < 1 and share > gpus:
            yield (
                f"serving.vllm.gpu_memory_utilization {share:g} is more of the GPU than gpus_per_replica {gpus:g} "
                f"gives: set it to {gpus:g} or less"
            )

    def reads(self, rule: OnlyWith) -> bool:
        return self.expected_engine in rule.values

    @property
    def memory_utilization(self) -> float:
        """The share of a GPU's memory that a replica may hold."""
        if self.vllm.gpu_memory_utilization is not None:
            return self.vllm.gpu_memory_utilization
        filled = FILLED if self.expected_engine == "vllm" else 0.85
        return filled * (min(self.gpus_per_replica, 1.0) or 1.0)

    @property
    def expected_engine(self) -> Literal["transformers", "vllm"]:
        """The engine that is named; `auto` is vLLM where replicas get a GPU."""
        if self.engine == "auto":
            return "vllm" if self.gpus_per_replica > 0 else "transformers"
        return self.engine
