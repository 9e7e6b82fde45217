"""VLMModule: the policy as an RLlib module, a frozen VLM with trainable LoRA layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from ray.rllib.core.rl_module.torch import TorchRLModule
from torch import Tensor

from rl_vlm.config import RunConfig
from rl_vlm.learning.critic import Critic
from rl_vlm.models.adapter import AdapterPayload
from rl_vlm.models.backbone import Backbone
from rl_vlm.models.loading import load_model, load_text_side, quiet_libraries
from rl_vlm.models.lora_layers import ExtraLora, inject_lora, load_lora_state, lora_config, lora_state, seed_lora
from rl_vlm.seeding import derive_seed


class PolicyModel:
    """A VLM with LoRA: what the learner updates. Plain torch, so that it works without RLlib.

    Args:
        folder: the model folder.
        run: the run configuration (model, learner and seed are read).
        device: "cpu" or "cuda".
    """

    def __init__(self, folder: Path, run: RunConfig, device: str = "cpu") -> None:
        quiet_libraries()
        self.text = load_text_side(folder, run.model.pixels)
        self.model = load_model(folder, run.model.dtype, device)
        lora = run.model.lora
        self.lora = lora_config(lora.rank, lora.alpha, lora.target_modules)
        self.lora.base_model_name_or_path = str(folder)
        seed_lora(run.seed)
        inject_lora(self.model, self.lora)
        if run.learner.gradient_checkpointing:
            self.model.model.language_model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
            # transformers checkpoints layers only in training mode; without dropout that changes nothing else.
            self.model.model.language_model.train()
        codec = self.text.codec
        suppressed = codec.suppressed_token_ids(self.text.vocab_size)
        self.backbone = Backbone(self.model, self.text.images, suppressed)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.critic = self._make_critic(run) if run.spec.has_critic else None

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


class VLMModule(TorchRLModule):
    """RLlib's view of the policy: its state is the adapter's tensors only, kilobytes to megabytes."""

    def setup(self) -> None:
        """Load the model; RLlib calls this once, in the learner's process. `model_config` holds `folder` and `run_config`."""
        settings: dict[str, Any] = self.model_config  # type: ignore[assignment]
        learner = settings["run_config"].learner
        torch.set_num_threads(learner.num_threads)
        # Decided here, because the driver may sit on a machine without a GPU.
        device = "cuda" if learner.gpus_per_learner > 0 and torch.cuda.is_available() else "cpu"
        self.policy = PolicyModel(settings["folder"], settings["run_config"], device)
        self.vlm = self.policy.model  # registered as a submodule, so that RLlib finds the parameters
        if self.policy.critic is not None:
            self.value_head = self.policy.critic.head

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The adapter's tensors as numpy arrays, by peft's names."""
        return {name: tensor.detach().cpu().numpy() for name, tensor in lora_state(self.policy.model).items()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Load adapter tensors."""
        load_lora_state(self.policy.model, {name: torch.as_tensor(array) for name, array in state.items()})

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Not used: the learner computes log-probabilities of packed micro-batches (see update.py)."""
        raise TypeError("VLMModule samples through Ray Serve; it has no forward pass over RLlib batches.")
