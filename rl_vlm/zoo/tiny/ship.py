"""Builds a model that comes with the package: `python -m rl_vlm.zoo.tiny.ship small`, after a change of its lessons.

It is stored in bfloat16 and runs in float32. Rounding changes none of the greedy answers of `tiny`.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from rl_vlm.files import replace_folder
from rl_vlm.zoo.tiny.model import SHIPPED, make_tiny


def ship(variant: str, folder: Path | None = None) -> None:
    """Build a variant of seed 0 and put it in the place of `folder`."""
    from safetensors.torch import load_file, save_file

    with replace_folder(folder or SHIPPED / variant) as draft:
        make_tiny(draft / "model", variant=variant)
        weights = load_file(draft / "model" / "model.safetensors")
        for file in (draft / "model").iterdir():
            file.rename(draft / file.name)
        (draft / "model").rmdir()
        rounded = {name: weight.bfloat16() for name, weight in weights.items()}
        save_file(rounded, draft / "model.safetensors", {"format": "pt"})
        (draft / "model.safetensors").chmod(0o644)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    ship(sys.argv[1])
