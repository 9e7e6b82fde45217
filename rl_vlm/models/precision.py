"""What matrix products in float32 round to on a GPU, and whether its kernels add up in one order. Both are of the whole process."""

from __future__ import annotations

import os

import torch


def choose_precision(dtype: str, device: str) -> None:
    """On a GPU let matrices in float32 be multiplied in TF32, unless the model itself is in float32 (`dtype`).

    These are LoRA's, whose weights vLLM rounds to bfloat16, of fewer digits than TF32, and a critic's head. Learner and engine
    call this, so that both round alike.
    """
    if device.startswith("cuda"):
        # Said in both cases: an earlier model of this process may have been of the other kind.
        torch.set_float32_matmul_precision("highest" if dtype == "float32" else "high")


def choose_order(device: str) -> None:
    """On a GPU let torch take kernels that add up in one order, for a learner whose bytes must repeat.

    Others, such as attention's backward pass, add as their threads come to it. An operation that has no such kernel raises.
    """
    if device.startswith("cuda"):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
        torch.use_deterministic_algorithms(True)
        # Else a pass over memory that is written anyway.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
