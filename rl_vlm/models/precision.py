"""What matrix products in float32 round to on a GPU."""

from __future__ import annotations

import torch


def choose_precision(dtype: str, device: str) -> None:
    """On a GPU let matrices in float32 be multiplied in TF32, unless the model itself is in float32 (`dtype`).

    These are LoRA's, whose weights vLLM rounds to bfloat16, of fewer digits than TF32, and a critic's head. Learner and engine
    call this, so that both round alike.
    """
    if device.startswith("cuda"):
        # Said in both cases: an earlier model of this process may have been of the other kind.
        torch.set_float32_matmul_precision("highest" if dtype == "float32" else "high")
