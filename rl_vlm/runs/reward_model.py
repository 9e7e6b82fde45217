"""`rl_vlm.RewardModel`: the reward model of a preference run by itself, also from what `push` uploaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
from PIL import Image

from rl_vlm.algorithms.checkpoint import latest_checkpoint, read_state
from rl_vlm.config import PreferenceConfig, load_config
from rl_vlm.config.loading import validated
from rl_vlm.config.preference import RewardModelSection
from rl_vlm.preference.reward_model import RewardEnsemble
from rl_vlm.types import UserInputError

WEIGHTS, SETTINGS = "reward_model.safetensors", "reward_model.json"


class RewardModel:
    """An ensemble that scores pictures; `image_size` is the side of its training pictures."""

    def __init__(self, weights: Path, settings: RewardModelSection, image_size: int, device: str = "cpu") -> None:
        self.settings, self.image_size, self._weights = settings, image_size, weights
        self.ensemble = RewardEnsemble((image_size, image_size, 3), settings, device=device)
        self.ensemble.load(weights, weights_only=True)

    @classmethod
    def load(cls, folder: str | Path, device: str = "cpu") -> Self:
        """From a run folder (its newest checkpoint) or a folder of the hub. Raises UserInputError."""
        folder = Path(folder)
        if (file := folder / SETTINGS).is_file():
            found = json.loads(file.read_text())
            return cls(folder / WEIGHTS, validated(RewardModelSection, found["settings"]), found["image_size"], device)
        config = load_config(folder / "config.yaml")
        if not isinstance(config, PreferenceConfig) or not config.preference.learns_reward:
            raise UserInputError(f"{folder} holds no reward model: give the folder of a run that learned its reward.")
        if not config.preference.rewards_images:
            raise UserInputError(
                f"The reward model of {folder} sees states and actions (mlp), so it scores no pictures."
            )
        if (checkpoint := latest_checkpoint(folder / "checkpoints", read_state)) is None:
            raise UserInputError(f"{folder} has no checkpoint yet.")
        return cls(checkpoint / WEIGHTS, config.preference.reward_model, config.preference.image_size, device)

    def score(self, images: Sequence[Image.Image | np.ndarray]) -> np.ndarray:
        """float32 [N]: the reward of each picture, the mean of the members; arrays are uint8 [H, W, 3]. A picture of
        another size is resized."""
        side = self.image_size
        pictures = [one if isinstance(one, Image.Image) else Image.fromarray(one) for one in images]
        frames = [np.asarray(one.convert("RGB").resize((side, side), Image.Resampling.BILINEAR)) for one in pictures]
        return self.ensemble.rewards(np.stack(frames)) if frames else np.empty(0, np.float32)

    def save(self, folder: Path) -> None:
        """Write what `load` reads into a folder, which exists."""
        shutil.copy(self._weights, folder / WEIGHTS)
        content = {"settings": self.settings.model_dump(mode="json", exclude={"load"}), "image_size": self.image_size}
        (folder / SETTINGS).write_text(json.dumps(content, indent=2) + "\n")
