"""VLMModule: the policy as an RLlib module, a frozen VLM with trainable LoRA layers, or one that is trained whole."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from ray.rllib.core.rl_module.torch import TorchRLModule

from rl_vlm.config import RunConfig
from rl_vlm.learning.device import learner_device, limit_memory
from rl_vlm.learning.policy_model import PolicyModel
from rl_vlm.models.reference import ModelReference
from rl_vlm.serving.registry import fetch_model_files


class VLMModule(TorchRLModule):
    """RLlib's view of the policy: its state is what is trained, the adapter's tensors or all weights."""

    def setup(self) -> None:
        """Load the model; RLlib calls this once, in the learner's process. `model_config` holds `model`, `run_id` and `run_config`."""
        settings: dict[str, Any] = self.model_config  # type: ignore[assignment]
        run: RunConfig = settings["run_config"]
        torch.set_num_threads(run.learner.num_threads)
        # Decided here, because the driver may sit on a machine without a GPU.
        device = learner_device(run)
        limit_memory(run, device)
        model: ModelReference = settings["model"]
        folder = model.on_this_node(partial(fetch_model_files, settings["run_id"]))
        self.policy = PolicyModel(
            folder, run, device, cache_bytes=run.model.image_cache_bytes, image_by_image=run.deterministic
        )
        self.vlm = self.policy.model  # registered as a submodule, so that RLlib finds the parameters
        if self.policy.critic is not None:
            self.value_head = self.policy.critic.head

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """What is trained as float32 numpy arrays, by name."""
        return {name: tensor.detach().cpu().numpy() for name, tensor in self.policy.weights().items()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Load what `get_state` returned."""
        self.policy.load_weights({name: torch.as_tensor(array) for name, array in state.items()})

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Not used: the learner computes log-probabilities of packed micro-batches (see update.py)."""
        raise TypeError("VLMModule samples through Ray Serve; it has no forward pass over RLlib batches.")
