"""What takes memory on a GPU, named and in bytes; and the constants that no configuration says.

It imports no torch, so that a plan needs none; the code that allocates by a constant takes it from here.
"""

from __future__ import annotations

from typing import NamedTuple

from rl_vlm.models.memory.shape import ModelShape

GIB = 1 << 30
ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes
# A CUDA context with the kernels of torch and cuBLAS' workspaces, per process. An estimate: 0.4 to 0.6 GiB on cards since 2020.
CUDA_CONTEXT = int(0.6 * GIB)
# Patches per pass of the vision tower: 8 million pixels on a GPU; on a CPU what fits into its caches.
PATCHES_AT_ONCE, PATCHES_ON_CPU = 32_768, 2_048
PREFILL_TOKENS = 16_384  # padded prompt tokens per prefill forward pass of the transformers engine
# Keys and values of the transformers engine: lengths are whole blocks, and there are at most so many rows for each that is in use
# when memory is taken.
KV_BLOCK, KV_ROWS_PER_USED = 64, 2
# Logits that exist at once, positions × vocabulary entries. A CPU's tile stays in its caches; a GPU's is large enough to fill the card.
HEAD_TILES = {"cpu": (512, 2048), "cuda": (4096, 16_384)}


class Part(NamedTuple):
    """Memory for one purpose; `detail` says where the number comes from."""

    name: str
    bytes: int
    detail: str


def tower_pass_bytes(shape: ModelShape, element: int, patches: int) -> int:
    """The peak of a pass of the vision tower without a gradient.

    Pixels of one frame in float32, the residual stream and its norm, queries, keys and values with float32 copies of the
    first two for the rotation, or the MLP with its activation, whichever is larger.
    """
    tower = shape.tower
    pixels = 4 * tower.patch_inputs // tower.frames
    attention = element * 5 * tower.hidden + 4 * 4 * tower.hidden
    mlp = element * (2 * tower.width + tower.hidden)
    return patches * (pixels + 2 * element * tower.hidden + max(attention, mlp))


def patches_at_once(gpus: float) -> int:
    """Patches of a pass of the vision tower, for an actor with that many GPUs."""
    return PATCHES_AT_ONCE if gpus else PATCHES_ON_CPU


def text(size: int) -> str:
    """Bytes for people."""
    return f"{size / GIB:.2f} GiB" if abs(size) >= GIB / 100 else f"{size / (1 << 20):.2f} MiB"


def amount(parameters: int) -> str:
    """A number of parameters for people."""
    if parameters >= 5e8:
        return f"{parameters / 1e9:.2f} billion"
    return f"{parameters / 1e6:.{1 if parameters >= 1e7 else 2}f} million"
