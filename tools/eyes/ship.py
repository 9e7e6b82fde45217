"""Make a model folder of a checkpoint: python -m tools.eyes.ship TRAINING FOLDER.

Weights are stored in bfloat16 and run in float32. A training begins from such a folder with `train.py --start`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tools.eyes.model import build_model
from tools.eyes.train import processor_of

from rl_vlm.files import replace_folder
from rl_vlm.models.loading import save_model


def ship(training: Path, folder: Path) -> None:
    processor = processor_of(training)
    model, saved = build_model(processor.tokenizer), torch.load(training / "newest.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    with replace_folder(folder) as draft:
        save_model(model, draft)
        processor.save_pretrained(draft)
        weights = draft / "model.safetensors"
        rounded = {name: weight.bfloat16() for name, weight in load_file(weights).items()}
        save_file(rounded, weights, {"format": "pt", "step": str(saved["step"])})
        for file in draft.iterdir():
            file.chmod(0o644)


if __name__ == "__main__":
    ship(Path(sys.argv[1]), Path(sys.argv[2]))
