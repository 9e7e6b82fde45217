"""PolicyModel: a VLM that is trained, its LoRA layers or all of it, in plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig
from torch import Tensor

from rl_vlm.config import CriticSection, PolicyConfig, SFTConfig
from rl_vlm.learning.critic import Critic
from rl_vlm.learning.memory import recomputed_layers
from rl_vlm.learning.training import FullTraining, LoraTraining
from rl_vlm.models.devices import choose_order, choose_precision
from rl_vlm.models.families import make_backbone
from rl_vlm.models.kernels import use_fast_products
from rl_vlm.models.loading import load_model, load_text_side, quiet_libraries
from rl_vlm.models.lora import ExtraLora, lora_config
from rl_vlm.models.memory.reading import read_shape
from rl_vlm.models.modules import text_model, towers
from rl_vlm.models.shared_memory import VersionRoom
from rl_vlm.models.trained import initial_adapter
from rl_vlm.models.weights import WeightPayload
from rl_vlm.seeding import derive_seed


class PolicyModel:
    """The VLM of a folder with what is trained of it (`model.train`); plain torch, without RLlib."""

    def __init__(self, folder: Path, run: PolicyConfig | SFTConfig, device: str = "cpu") -> None:
        quiet_libraries()
        choose_precision(run.model.dtype, device)
        suppressed, cache_bytes, image_by_image = np.empty(0, dtype=np.int64), 0, False
        self.text = load_text_side(folder, run.model.pixels)
        if isinstance(run, PolicyConfig):
            # The tokens that an engine never samples have probability 0. Supervised fine-tuning trains the plain
            # model's probabilities, and keeps no features: after a resume these would come from other batches.
            suppressed = self.text.codec.suppressed_token_ids(self.text.vocab_size)
            cache_bytes, image_by_image = run.model.image_cache_bytes, run.deterministic
            if run.deterministic:
                choose_order(device)
        self.lora: LoraConfig | None = None  # of a policy that is not trained whole
        shards_layers = isinstance(run, PolicyConfig) and run.learner.shards_layers
        self.model = load_model(folder, run.model.dtype, device, layers_on_host=shards_layers)
        self.trained = self._train(folder, run, device)
        self.parameters = self.trained.parameters  # float32, without a critic's
        if run.model.adapter is not None:
            self.load(initial_adapter(run.model))
        checkpointed = self._checkpoint(folder, run, device) if run.learner.may_recompute else []
        head_dtype = run.model.head_dtype
        self.backbone = make_backbone(self.model, self.text.images, suppressed, cache_bytes, head_dtype, image_by_image)
        self.backbone.checkpoints_tower = len(checkpointed) > 1
        use_fast_products(self.model)
        self.backbone.choose_attention(run.learner.attention)
        section = run.critic if isinstance(run, PolicyConfig) else None
        self.critic = self._make_critic(section, run.seed) if section is not None else None
        if shards_layers and self.lora is not None:
            # What is trained was made where the layers are, and is whole in every learner.
            for parameter in self.model.parameters():
                parameter.data = parameter.data.to(device) if parameter.requires_grad else parameter.data

    def _train(self, folder: Path, run: PolicyConfig | SFTConfig, target: str) -> LoraTraining | FullTraining:
        if run.model.train == "full":
            dtype, device = run.model.dtype, str(next(self.model.parameters()).device)
            keep_base = isinstance(run, PolicyConfig) and run.algorithm.has_reference

            def reload() -> dict[str, Tensor]:
                return {name: p.data for name, p in load_model(folder, dtype, device).named_parameters()}

            if isinstance(run, PolicyConfig) and run.learner.shards_layers:
                from rl_vlm.learning.sharded_training import ShardedTraining  # takes long to import

                offload = run.learner.offload_params
                return ShardedTraining(self.model, run.model.path, reload, keep_base, target, offload)
            return FullTraining(self.model, run.model.path, reload, keep_base)
        lora = run.model.lora
        self.lora = lora_config(lora.rank, lora.alpha, lora.target_modules, self.model)
        self.lora.base_model_name_or_path = str(folder)
        torch.manual_seed(run.seed)  # so that A is drawn the same in every learner
        return LoraTraining(self.model, self.lora)

    def _checkpoint(self, folder: Path, run: PolicyConfig | SFTConfig, device: str) -> list[Any]:
        """Let the backward pass compute layers again; returns the parts that have such."""
        decoder, count = text_model(self.model), run.learner.checkpoint
        if isinstance(run, PolicyConfig):
            card = torch.cuda.get_device_properties(device).total_memory if device.startswith("cuda") else None
            count = recomputed_layers(run, read_shape(folder), card)
        trained = [decoder, *(towers(self.model) if run.model.train == "full" else ())]
        parts = [part for part in trained if hasattr(part, "gradient_checkpointing_enable")]
        for part in parts:
            part.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            # transformers checkpoints layers only in training mode; without dropout that changes nothing else.
            part.train()
        for layer in decoder.layers[count:] if count != "all" else ():
            layer.gradient_checkpointing = False
        return parts

    def _make_critic(self, section: CriticSection, seed: int) -> Critic:
        torch.manual_seed(derive_seed(seed, 5) % 2**31)  # for another A than the policy's, the same in every learner
        own = None
        if section.kind == "adapter":
            assert self.lora is not None  # see PolicyConfig
            own = ExtraLora(self.model, self.lora, "critic")
        return Critic(self.model, section, self.model.config.get_text_config().hidden_size, own)

    def payload(
        self,
        version: int,
        weights: Mapping[str, Tensor] | None = None,
        dtype: str | None = None,
        room: VersionRoom | None = None,
    ) -> WeightPayload:
        """What is trained, or other tensors by its names, as a version; rounded where `dtype` is given."""
        return self.trained.payload(version, self.trained.weights() if weights is None else weights, dtype, room)

    def load(self, weights: WeightPayload) -> None:
        """Put a version's tensors in place. Raises UserInputError for one that does not fit."""
        self.trained.load(weights.state())
