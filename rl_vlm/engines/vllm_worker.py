"""Code that runs inside vLLM's own processes, which import this module by name: the token mask, new weights, and their
end together with the process that owns the engine."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA
from vllm.v1.executor import Executor, UniProcExecutor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as RunnerV2LogitsProcessor

SUPPRESSED_KEY = "rl_vlm_suppressed_token_ids"  # in vLLM's additional_config
_PR_SET_PDEATHSIG = 1


class TokenMask(LogitsProcessor, RunnerV2LogitsProcessor):
    """Sets the logits of the suppressed tokens to -inf for every request, before temperature, top-k and top-p.

    vLLM's own `bad_words`, `logit_bias` and `allowed_token_ids` keep lists per request, of at most 128 to 1024 entries.
    This class has the interfaces of both of vLLM's model runners (V2 where Triton runs, else V1).
    """

    def __init__(self, vllm_config: Any, *_: Any) -> None:
        ids = vllm_config.additional_config[SUPPRESSED_KEY]
        self._ids = torch.tensor(ids, dtype=torch.long)

    def apply(self, logits: Tensor, ctx: Any = None) -> Tensor:
        """Mask logits [R, V] in place; `ctx` comes from runner V2 only."""
        if self._ids.device != logits.device:
            self._ids = self._ids.to(logits.device)
        return logits.index_fill_(1, self._ids, float("-inf"))

    def is_argmax_invariant(self) -> bool:
        return False  # else runner V1 would skip it for greedy requests

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """The mask is the same for every batch."""


class WeightsWorker:
    """What vLLM adds to its worker class (`worker_extension_cls`)."""

    model_runner: Any
    model_config: Any
    vllm_config: Any

    def unused_modules(self, adapter: int) -> list[str]:
        """The names in an adapter that was loaded of which the model has no module: vLLM leaves them out in silence."""
        manager = self.model_runner.lora_manager._adapter_manager
        lora = manager.get_adapter(adapter)
        adapted = [name for name in manager.modules if not name.endswith(("lm_head", "logits_processor"))]  # see below
        used = {id(manager._get_lora_layer_weights(lora, name)) for name in adapted}
        return sorted(name for name, weights in lora.loras.items() if id(weights) not in used)

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_full_weights(self, path: str) -> None:
        """Replace all weights by those of a safetensors file, which is mapped, in the steps of vLLM's own weight
        transfer (vllm/distributed/weight_transfer/ipc_engine.py). Raises ValueError where it lacks a parameter."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        model = self.model_runner.get_model()
        wanted = {name for name, _ in model.named_parameters()}
        with safe_open(path, framework="pt") as file, set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            loaded = model.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
            finalize_layerwise_reload(model, self.model_config)
            _pack_tied_heads(model)
        if missing := sorted(wanted - set(loaded)):
            raise ValueError(f"the file lacks {len(missing)} parameters, such as {missing[0]}")
        self.model_runner.reset_encoder_cache()


def _pack_tied_heads(model: torch.nn.Module) -> None:
    """On a CPU vLLM 0.32 packs a layer's weights when it loads the layer. A head that is tied to the embedding is not
    loaded by itself, and would keep what was packed of the older weights."""
    for module in model.modules():
        if "cpu_linear" in vars(module) and getattr(module, "weight", torch.empty(0)).numel():
            module.quant_method.process_weights_after_loading(module)  # type: ignore[operator,union-attr]


def die_with_parent() -> None:
    """Let Linux kill this process with the thread that started it: it would outlive a killed replica."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)  # the parent has already ended


class BoundUniProcExecutor(UniProcExecutor):
    """Unpickling it imports this module, and so runs its last lines, in the engine core."""


class BoundMultiprocExecutor(MultiprocExecutor):
    """The same for several devices; its workers end with the engine core by themselves."""


def executor_class(tensor_parallel_size: int) -> type[Executor]:
    return BoundUniProcExecutor if tensor_parallel_size == 1 else BoundMultiprocExecutor


def _head_logits(
    self: Any, hidden_states: Tensor, lm_head: Any, embedding_bias: Any = None, skip_gather: bool = False
) -> Any:
    """Of the head without an adapter, of which it has none here. vLLM 0.32 adds zeros for one, with an index for each
    running sample; log-probabilities of prompts have more rows, and so ended the engine."""
    head = getattr(lm_head, "base_layer", lm_head)
    return self.base_layer._get_logits(hidden_states, head, embedding_bias, skip_gather)


LogitsProcessorWithLoRA._get_logits = _head_logits

# At import, not when the executor is made: else an engine core whose owner is killed while it starts would wait five
# minutes for it.
if multiprocessing.current_process().name.startswith("EngineCore"):
    die_with_parent()
