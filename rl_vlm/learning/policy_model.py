"""PolicyModel: a frozen VLM with trainable LoRA layers, in plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from peft.tuners.lora import LoraLayer
from torch import Tensor

from rl_vlm.config import RunConfig, SFTConfig
from rl_vlm.learning.critic import Critic
from rl_vlm.models.adapter import AdapterPayload
from rl_vlm.models.backbone import CACHE_BYTES, Backbone
from rl_vlm.models.initial_adapter import initial_adapter
from rl_vlm.models.loading import load_model, load_text_side, quiet_libraries
from rl_vlm.models.lora_layers import ExtraLora, inject_lora, load_lora_state, lora_config, lora_state, seed_lora
from rl_vlm.models.products import ProductName, choose_product, product_of, torch_product, use_onednn
from rl_vlm.seeding import derive_seed


class PolicyModel:
    """A VLM with LoRA: what the learner updates. Plain torch, so that it works without RLlib.

    Args:
        folder: the model folder.
        run: the run configuration (model, learner and seed are read).
        device: "cpu" or "cuda".
        suppress: give the tokens that an engine never samples the probability 0, as reinforcement learning needs it;
            supervised learning teaches the probabilities of the plain model.
        cache_bytes: see `Backbone`.
    """

    def __init__(
        self,
        folder: Path,
        run: RunConfig | SFTConfig,
        device: str = "cpu",
        *,
        suppress: bool = True,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        quiet_libraries()
        self.product: ProductName = "torch"
        self.text = load_text_side(folder, run.model.pixels)
        shards = run.learner.shards_layers
        self.model = load_model(folder, run.model.dtype, device, layers_on_host=shards)
        lora = run.model.lora
        self.lora = lora_config(lora.rank, lora.alpha, lora.target_modules)
        self.lora.base_model_name_or_path = str(folder)
        seed_lora(run.seed)
        inject_lora(self.model, self.lora)
        if run.model.adapter is not None:
            self.load(initial_adapter(run.model))
        if run.learner.gradient_checkpointing:
            self.model.model.language_model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
            # transformers checkpoints layers only in training mode; without dropout that changes nothing else.
            self.model.model.language_model.train()
        codec = self.text.codec
        suppressed = codec.suppressed_token_ids(self.text.vocab_size) if suppress else np.empty(0, dtype=np.int64)
        self.backbone = Backbone(self.model, self.text.images, suppressed, cache_bytes)
        self._choose_product(run)
        self.backbone.choose_attention(run.learner.attention)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.critic = self._make_critic(run) if isinstance(run, RunConfig) and run.spec.has_critic else None
        if shards:
            # Made where the layers are, and whole in every learner.
            for parameter in self.model.parameters():
                parameter.data = parameter.data.to(device) if parameter.requires_grad else parameter.data

    def _choose_product(self, run: RunConfig | SFTConfig) -> None:
        deterministic = isinstance(run, RunConfig) and run.deterministic
        head = self.backbone.lm_head.weight
        if product_of("onednn", head) is torch_product:  # nothing to choose: not float32, or not on a CPU
            return
        self.product = choose_product(run.learner.cpu_product, deterministic)
        self.backbone.product = product_of(self.product, head)
        if self.product == "onednn":
            use_onednn(self.model)

    def _make_critic(self, run: RunConfig) -> Critic:
        own = None
        if run.critic.kind == "adapter":
            seed_lora(derive_seed(run.seed, 5) % 2**31)  # another A than the policy's, the same in every learner
            own = ExtraLora(self.model, self.lora, "critic")
        return Critic(self.model, run.critic, self.model.config.get_text_config().hidden_size, own)

    def weights(self) -> dict[str, Tensor]:
        """The adapter's tensors by peft's names, not copied."""
        return lora_state(self.model)

    def payload(self, version: int) -> AdapterPayload:
        """The adapter as it is, as an immutable version."""
        return AdapterPayload.build(version, self.weights(), self.lora)

    def load(self, adapter: AdapterPayload) -> None:
        """Put an adapter's tensors in place. Raises UserInputError for one that does not fit."""
        load_lora_state(self.model, adapter.state())

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """The model computes as the base model inside this context."""
        layers = [module for module in self.model.modules() if isinstance(module, LoraLayer)]
        for layer in layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)
