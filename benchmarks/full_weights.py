"""What a version of all weights costs between learner and replica, beside a plain copy of its bytes.

    python benchmarks/full_weights.py [--quick] [--gib N] [--out FILE]

The tensors have the shapes of a 4B model's layers, in bfloat16. Packing is what the learner does
(`FullPayload.build`: the bytes and their SHA-256), and checking is what a replica does before it loads. The peers are
safetensors' `save` and hashlib. All take turns.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable

import torch
from report import Report, command_line
from safetensors.torch import save
from torch import Tensor

from rl_vlm.models.weights import FullPayload

SHAPES = {
    "q": (4096, 2560), "k": (1024, 2560), "v": (1024, 2560), "o": (2560, 4096), "gate": (9728, 2560),
    "up": (9728, 2560), "down": (2560, 9728),
}  # fmt: skip


def weights(gib: float) -> dict[str, Tensor]:
    """Layers until they hold so many GiB; one at least."""
    generator, state = torch.Generator().manual_seed(0), dict[str, Tensor]()
    while not state or sum(tensor.nbytes for tensor in state.values()) < gib * 2**30:
        layer = len(state) // len(SHAPES)
        for name, shape in SHAPES.items():
            state[f"layers.{layer}.{name}.weight"] = torch.randn(shape, generator=generator).bfloat16()
    return state


def measure(gib: float, rounds: int) -> Report:
    """Run everything and return the report."""
    state = weights(gib)
    payload = FullPayload.build(1, state, "benchmark")
    size = len(payload.tensors) / 2**30
    source = torch.frombuffer(bytearray(payload.tensors), dtype=torch.uint8)

    parts: dict[str, Callable[[], object]] = {
        "rl_vlm: pack": lambda: FullPayload.build(1, state, "benchmark"),
        "safetensors.save and hashlib": lambda: hashlib.sha256(save(state)).hexdigest(),
        "rl_vlm: check": payload.verify,
        "hashlib": lambda: hashlib.sha256(payload.tensors).hexdigest(),
        "copy of the bytes": source.clone,
    }
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(rounds):
        for name, part in parts.items():
            started = time.perf_counter()
            part()
            seconds[name].append(time.perf_counter() - started)
    report = Report(f"A version of all weights, {size:.2f} GiB in bfloat16")
    for name, values in seconds.items():
        report.add(name, values)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for part, peer in (("pack", "safetensors.save and hashlib"), ("check", "hashlib")):
        report.ratios[f"{part} / {peer}, speed"] = medians[peer] / medians[f"rl_vlm: {part}"]
    report.notes.append(f"Packing takes {medians['rl_vlm: pack'] / medians['copy of the bytes']:.1f} times a copy.")
    return report


def main() -> None:
    """See the module's docstring."""
    parser = command_line(__doc__, "one layer, two rounds")
    parser.add_argument("--gib", type=float, default=2.0)
    args = parser.parse_args()
    measure(0.0 if args.quick else args.gib, 2 if args.quick else 7).finish(args.out)


if __name__ == "__main__":
    main()
