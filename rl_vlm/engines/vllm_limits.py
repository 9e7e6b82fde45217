"""What vLLM has no kernels for, by a model's config.json alone: its process would die at the first token."""

from __future__ import annotations

from pathlib import Path

from rl_vlm.config import CommonConfig
from rl_vlm.models.memory.reading import read_shape
from rl_vlm.types import UserInputError

CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # dimensions that its attention on a CPU takes


def check_kernels(config: CommonConfig, folder: Path) -> None:
    """Raises UserInputError."""
    if config.serving.expected_engine != "vllm" or config.serving.gpus_per_replica:
        return
    heads = read_shape(folder).text.head_dim
    if heads not in CPU_HEADS:
        known = ", ".join(map(str, CPU_HEADS))
        raise UserInputError(
            f"vLLM cannot run {config.model.path} on a CPU: its attention heads have {heads} dimensions, and vLLM "
            f"takes {known}. Use serving.engine=transformers, or another model such as tiny-wide."
        )
