"""PolicyModel: a VLM that is trained, its LoRA layers or all of it, in plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from peft import LoraConfig
from torch import Tensor, nn

from rl_vlm.config import CriticSection, RunConfig, SFTConfig
from rl_vlm.learning.critic import Critic
from rl_vlm.learning.trainable import FullTraining, LoraTraining, Trainable
from rl_vlm.models.backbone import CACHE_BYTES, Backbone
from rl_vlm.models.initial_adapter import initial_adapter
from rl_vlm.models.loading import load_model, load_text_side, quiet_libraries
from rl_vlm.models.lora_layers import ExtraLora, lora_config, seed_lora
from rl_vlm.models.payload import WeightPayload
from rl_vlm.models.precision import choose_order, choose_precision
from rl_vlm.models.products import ProductName, choose_product, product_of, torch_product, use_onednn
from rl_vlm.seeding import derive_seed


class PolicyModel:
    """A VLM with what is trained of it (`model.train`): what the learner updates. Plain torch, so that it works without RLlib.

    Args:
        folder: the model folder.
        run: the run configuration (model, learner and seed are read).
        device: "cpu" or "cuda".
        suppress: give the tokens that an engine never samples the probability 0, as reinforcement learning needs it;
            supervised learning teaches the probabilities of the plain model.
        cache_bytes, image_by_image: see `Backbone`.
    """

    def __init__(
        self,
        folder: Path,
        run: RunConfig | SFTConfig,
        device: str = "cpu",
        *,
        suppress: bool = True,
        cache_bytes: int = CACHE_BYTES,
        image_by_image: bool = False,
    ) -> None:
        quiet_libraries()
        choose_precision(run.model.dtype, device)
        if isinstance(run, RunConfig) and run.deterministic:
            choose_order(device)
        self.product: ProductName = "torch"
        self.lora: LoraConfig | None = None  # of a policy that is not trained whole
        shards_layers = isinstance(run, RunConfig) and run.learner.shards_layers
        self.text = load_text_side(folder, run.model.pixels)
        self.model = load_model(folder, run.model.dtype, device, layers_on_host=shards_layers)
        self.trained = self._train(folder, run)
        if run.model.adapter is not None:
            self.load(initial_adapter(run.model))
        checkpointed = self._checkpointed(run)
        for part in checkpointed:
            part.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            # transformers checkpoints layers only in training mode; without dropout that changes nothing else.
            part.train()
        codec = self.text.codec
        suppressed = codec.suppressed_token_ids(self.text.vocab_size) if suppress else np.empty(0, dtype=np.int64)
        head_dtype = run.model.head_dtype
        self.backbone = Backbone(self.model, self.text.images, suppressed, cache_bytes, head_dtype, image_by_image)
        self.backbone.checkpoints_tower = self.model.model.visual in checkpointed
        self._choose_product(run)
        self.backbone.choose_attention(run.learner.attention)
        section = run.critic if isinstance(run, RunConfig) else None
        self.critic = self._make_critic(section, run.seed) if section is not None else None
        if shards_layers:
            # What is trained was made where the layers are, and is whole in every learner.
            for parameter in self.model.parameters():
                parameter.data = parameter.data.to(device) if parameter.requires_grad else parameter.data

    def _train(self, folder: Path, run: RunConfig | SFTConfig) -> Trainable:
        if run.model.train == "full":
            dtype, device = run.model.dtype, str(next(self.model.parameters()).device)
            return FullTraining(
                self.model,
                run.model.path,
                lambda: {name: p.data for name, p in load_model(folder, dtype, device).named_parameters()},
                keep_base=isinstance(run, RunConfig) and run.algorithm.has_reference,
            )
        lora = run.model.lora
        self.lora = lora_config(lora.rank, lora.alpha, lora.target_modules)
        self.lora.base_model_name_or_path = str(folder)
        seed_lora(run.seed)
        return LoraTraining(self.model, self.lora)

    def _checkpointed(self, run: RunConfig | SFTConfig) -> list[Any]:
        """The parts whose layers the backward pass computes again."""
        if not run.learner.gradient_checkpointing:
            return []
        parts = [self.model.model.language_model]
        return [*parts, self.model.model.visual] if run.model.train == "full" else parts

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What is trained, float32, without a critic."""
        return self.trained.parameters

    def _choose_product(self, run: RunConfig | SFTConfig) -> None:
        deterministic = isinstance(run, RunConfig) and run.deterministic
        head = self.backbone.lm_head.weight
        if product_of("onednn", head) is torch_product:  # nothing to choose: not float32, or not on a CPU
            return
        self.product = choose_product(run.learner.cpu_product, deterministic)
        self.backbone.product = product_of(self.product, head)
        if self.product == "onednn":
            use_onednn(self.model)

    def _make_critic(self, section: CriticSection, seed: int) -> Critic:
        # Another A than the policy's, and the head's hidden layer; both are the same in every learner.
        seed_lora(derive_seed(seed, 5) % 2**31)
        own = None
        if section.kind == "adapter":
            assert self.lora is not None  # see PolicyConfig
            own = ExtraLora(self.model, self.lora, "critic")
        return Critic(self.model, section, self.model.config.get_text_config().hidden_size, own)

    def weights(self) -> dict[str, Tensor]:
        """The trained tensors by the names of their files (peft's for an adapter), float32, not copied."""
        return self.trained.weights()

    def load_weights(self, state: Mapping[str, Tensor]) -> None:
        """Put tensors that `weights` named in place. Raises UserInputError for ones that do not fit."""
        self.trained.load(state)

    def payload(
        self, version: int, weights: Mapping[str, Tensor] | None = None, dtype: str | None = None
    ) -> WeightPayload:
        """What is trained as it is or rounded to `dtype`, or other tensors by the same names, as an immutable version."""
        return self.trained.payload(version, self.weights() if weights is None else weights, dtype)

    def load(self, adapter: WeightPayload) -> None:
        """Put a version's tensors in place. Raises UserInputError for one that does not fit."""
        self.load_weights(adapter.state())

    def without_adapter(self) -> AbstractContextManager[None]:
        """The model computes as the base model inside this context."""
        return self.trained.base()
