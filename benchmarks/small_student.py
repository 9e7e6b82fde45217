"""Write a tiny model of less than half the size of `tiny`, with its tokenizer and lessons: a student of another shape.

    python benchmarks/small_student.py FOLDER

docs/distillation.md says what it learns from `tiny`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

from rl_vlm.zoo.tiny import model

TEXT = {"hidden_size": 48, "num_hidden_layers": 2, "head_dim": 16, "intermediate_size": 96}
TOWER = {"hidden_size": 32, "num_heads": 4, "intermediate_size": 64, "out_hidden_size": 48}
_build = model.build_config


def small_config(tokenizer: Any, variant: str = "small") -> Any:
    config = _build(tokenizer, variant)
    for part, changes in ((config.text_config, TEXT), (config.vision_config, TOWER)):
        for name, value in changes.items():
            setattr(part, name, value)
    return config


def main() -> None:
    """Command line."""
    with mock.patch.object(model, "build_config", small_config):
        folder = model.make_tiny(Path(sys.argv[1]))
    print(folder)


if __name__ == "__main__":
    main()
