"""PolicyModel: a VLM that is trained, its LoRA layers or all of it, in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from rl_vlm.config import CriticSection, PolicyConfig, SFTConfig
from rl_vlm.learning.returns import Rescaling
from rl_vlm.models.devices import choose_order, choose_precision
from rl_vlm.models.families import make_backbone
from rl_vlm.models.kernels import use_fast_products
from rl_vlm.models.loading import load_model, load_text_side, quiet_libraries
from rl_vlm.models.lora import ExtraLora, inject_lora, load_lora_state, lora_config, lora_state
from rl_vlm.models.modules import text_model, towers
from rl_vlm.models.trained import initial_adapter
from rl_vlm.models.weights import AdapterPayload, FullPayload, WeightPayload, check_fits
from rl_vlm.seeding import derive_seed
from rl_vlm.types import UserInputError

HEAD = "head."  # names of the head's tensors, among those of the critic's adapter


class Critic:
    """A value head on hidden states [N, width] of the policy (`kind: head`) or of a second LoRA `adapter`.

    Values are of normalised returns. The head's last layer starts at zero: every state is worth the mean return.
    """

    def __init__(self, model: nn.Module, section: CriticSection, width: int, adapter: ExtraLora | None = None) -> None:
        self.loss_coef, self.clip = section.loss_coef, section.clip
        device = next(model.parameters()).device
        self.last = nn.Linear(section.hidden or width, 1, device=device)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)
        before = [nn.Linear(width, section.hidden, device=device), nn.GELU()] if section.hidden else []
        self.head = nn.Sequential(*before, self.last)
        self._adapter = adapter

    @property
    def shares_policy(self) -> bool:
        """Whether one forward pass serves both."""
        return self._adapter is None

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [*(self._adapter.parameters.values() if self._adapter else ()), *self.head.parameters()]

    def active(self) -> AbstractContextManager[None]:
        """Inside, the model computes with the critic's adapter where it has one."""
        return self._adapter.active() if self._adapter else nullcontext()

    def values(self, hidden: Tensor) -> Tensor:
        """float32 [N] of hidden states [N, D]."""
        return self.head(hidden.float())[:, 0]  # type: ignore[no-any-return]

    @torch.no_grad()
    def rescale(self, change: Rescaling) -> None:
        """Change the normalisation and keep every value as it is in returns (PopArt, arXiv 1602.07714, equation 5)."""
        self.last.weight *= change.factor
        self.last.bias.copy_(self.last.bias * change.factor + change.shift)

    def _tensors(self) -> dict[str, Tensor]:
        head: dict[str, Tensor] = {HEAD + name: tensor for name, tensor in self.head.state_dict().items()}
        return head | (self._adapter.parameters if self._adapter else {})

    def state(self) -> dict[str, Tensor]:
        """All tensors by name, on the CPU."""
        return {name: tensor.detach().cpu().clone() for name, tensor in self._tensors().items()}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state` returned. Raises UserInputError for tensors of another critic."""
        try:
            for name, tensor in self._tensors().items():
                tensor.copy_(state[name])
        except (KeyError, RuntimeError) as error:
            raise UserInputError(
                f"The checkpoint has no critic of this kind ({error}): keep algorithm.name and critic as they were."
            ) from error


def value_loss(new: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """½ (V - R)², or with `clip` the larger of that and the same with V at most `clip` from the old value: float32 [N].

    As in PPO's original implementation (openai/baselines, ppo2).
    """
    loss = (new - returns) ** 2
    if clip is not None:
        bounded = old + (new - old).clamp(-clip, clip)
        loss = torch.maximum(loss, (bounded - returns) ** 2)
    return 0.5 * loss


class LoraTraining:
    """The LoRA layers (float32) of a model, which are trained; `parameters` are what the optimiser steps."""

    def __init__(self, model: nn.Module, config: LoraConfig) -> None:
        self._model, self._config = model, config
        inject_lora(model, config)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def weights(self) -> dict[str, Tensor]:
        """What is trained by the names of its files, float32, not copied."""
        return lora_state(self._model)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Put such tensors in place. Raises UserInputError for ones that do not fit."""
        load_lora_state(self._model, state)

    def payload(self, version: int, weights: Mapping[str, Tensor], dtype: str | None = None) -> WeightPayload:
        """Such tensors as an immutable version, rounded where `dtype` is given."""
        return AdapterPayload.build(version, weights, self._config, dtype)

    def stepped(self) -> None:
        """Called when the optimiser has changed `parameters`."""

    @contextmanager
    def base(self) -> Iterator[None]:
        """Inside, the model computes as before training."""
        layers = [module for module in self._model.modules() if isinstance(module, LoraLayer)]
        for layer in layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)


class FullTraining:
    """As `LoraTraining`, of all parameters, the vision tower's too.

    Parameters in bfloat16 get float32 masters, which the optimiser steps; the model computes with what these round to,
    as every replica does. A parameter's gradient is added to its master's in float32 and freed (mixed precision: arXiv
    1710.03740, section 3.1). `reload` reads the model's first parameters by name, from the folder `base`; `keep_base`
    keeps them in memory, for the reference of a KL penalty in every update.
    """

    def __init__(
        self, model: nn.Module, base: str, reload: Callable[[], dict[str, Tensor]], keep_base: bool = False
    ) -> None:
        self._base_name, self._reload = base, reload
        self._own = dict(model.named_parameters())  # tied parameters once
        model.requires_grad_(True)
        self._kept = {name: own.detach().clone() for name, own in self._own.items()} if keep_base else None
        self._masters = {name: _master(own) for name, own in self._own.items()}
        self.parameters = list(self._masters.values())

    def weights(self) -> dict[str, Tensor]:
        return {name: master.detach() for name, master in self._masters.items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        check_fits(state, self._own, "The checkpoint")
        for name, master in self._masters.items():
            master.copy_(state[name])
        self.stepped()

    def payload(self, version: int, weights: Mapping[str, Tensor], dtype: str | None = None) -> WeightPayload:
        return FullPayload.build(version, weights, self._base_name, dtype)

    @torch.no_grad()
    def stepped(self) -> None:
        for name, own in self._own.items():
            if own is not self._masters[name]:
                own.copy_(self._masters[name])

    @contextmanager
    def base(self) -> Iterator[None]:
        base = self._kept if self._kept is not None else self._reload()
        trained = {name: own.data for name, own in self._own.items()}
        try:
            for name, own in self._own.items():
                own.data = base[name]
            yield
        finally:
            for name, own in self._own.items():
                own.data = trained[name]


def _master(own: nn.Parameter) -> nn.Parameter:
    """The parameter itself, or a float32 copy that collects its gradients."""
    if own.dtype == torch.float32:
        return own
    master = nn.Parameter(own.detach().float())

    def collect(parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient = parameter.grad.float()
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        parameter.grad = None

    own.register_post_accumulate_grad_hook(collect)
    return master


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
        self.trained = self._train(folder, run)
        self.parameters = self.trained.parameters  # float32, without a critic's
        if run.model.adapter is not None:
            self.load(initial_adapter(run.model))
        checkpointed: list[Any] = []  # parts whose layers the backward pass computes again
        if run.learner.gradient_checkpointing:
            trained = [text_model(self.model), *(towers(self.model) if run.model.train == "full" else ())]
            checkpointed = [part for part in trained if hasattr(part, "gradient_checkpointing_enable")]
        for part in checkpointed:
            part.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            # transformers checkpoints layers only in training mode; without dropout that changes nothing else.
            part.train()
        head_dtype = run.model.head_dtype
        self.backbone = make_backbone(self.model, self.text.images, suppressed, cache_bytes, head_dtype, image_by_image)
        self.backbone.checkpoints_tower = len(checkpointed) > 1
        use_fast_products(self.model)
        self.backbone.choose_attention(run.learner.attention)
        section = run.critic if isinstance(run, PolicyConfig) else None
        self.critic = self._make_critic(section, run.seed) if section is not None else None
        if shards_layers:
            # What is trained was made where the layers are, and is whole in every learner.
            for parameter in self.model.parameters():
                parameter.data = parameter.data.to(device) if parameter.requires_grad else parameter.data

    def _train(self, folder: Path, run: PolicyConfig | SFTConfig) -> LoraTraining | FullTraining:
        if run.model.train == "full":
            dtype, device = run.model.dtype, str(next(self.model.parameters()).device)
            return FullTraining(
                self.model,
                run.model.path,
                lambda: {name: p.data for name, p in load_model(folder, dtype, device).named_parameters()},
                keep_base=isinstance(run, PolicyConfig) and run.algorithm.has_reference,
            )
        lora = run.model.lora
        self.lora = lora_config(lora.rank, lora.alpha, lora.target_modules, self.model)
        self.lora.base_model_name_or_path = str(folder)
        torch.manual_seed(run.seed)  # so that A is drawn the same in every learner
        return LoraTraining(self.model, self.lora)

    def _make_critic(self, section: CriticSection, seed: int) -> Critic:
        torch.manual_seed(derive_seed(seed, 5) % 2**31)  # for another A than the policy's, the same in every learner
        own = None
        if section.kind == "adapter":
            assert self.lora is not None  # see PolicyConfig
            own = ExtraLora(self.model, self.lora, "critic")
        return Critic(self.model, section, self.model.config.get_text_config().hidden_size, own)

    def payload(
        self, version: int, weights: Mapping[str, Tensor] | None = None, dtype: str | None = None
    ) -> WeightPayload:
        """What is trained, or other tensors by its names, as a version; rounded where `dtype` is given."""
        return self.trained.payload(version, self.trained.weights() if weights is None else weights, dtype)

    def load(self, weights: WeightPayload) -> None:
        """Put a version's tensors in place. Raises UserInputError for one that does not fit."""
        self.trained.load(weights.state())
