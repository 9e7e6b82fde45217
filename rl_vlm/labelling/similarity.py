"""The similarity of picture and text: a labeller, and a reward by itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_vlm.labelling.labels import InputKind, Label, Labeller, LabelValue, Score, SegmentPair, picture_of
from rl_vlm.models.loading import resolve_model
from rl_vlm.models.modules import from_folder
from rl_vlm.types import UserInputError

_BATCH = 32  # pictures per forward pass


class Similarity(Labeller):
    """Scores pictures against a text, and prefers the picture that matches it better; also a reward by itself.

    CLIP models, such as openai/clip-vit-large-patch14-336, give the cosine similarity of picture and text, BLIP-2
    models, such as Salesforce/blip2-itm-vit-g, the probability that they match. `model` is a local folder, or a hub
    name that was fetched before; `families` are its types that will do.
    """

    input_kind: InputKind = "image"

    def __init__(
        self, families: Sequence[str], model: str | Path, text: str, device: str = "cpu", frames: int = 1
    ) -> None:
        if not text.strip():
            raise UserInputError("Similarity needs a description of the achieved goal, such as 'The drawer is open.'")
        from transformers import AutoConfig, AutoModel, AutoProcessor, Blip2ForImageTextRetrieval

        folder = resolve_model(str(model))
        family = from_folder(AutoConfig, folder).model_type
        if family not in families:
            raise UserInputError(
                f"The model {model} is of type {family!r}; this labeller needs {' or '.join(families)}."
            )
        self._is_clip = family == "clip"
        kind = AutoModel if self._is_clip else Blip2ForImageTextRetrieval
        self._model = kind.from_pretrained(folder).eval().requires_grad_(False).to(device)
        self._processor = from_folder(AutoProcessor, folder)
        self._device, self._text, self._frames = device, text, frames

    def similarities(self, frames: np.ndarray) -> np.ndarray:
        """float32 [N] for uint8 [N, H, W, 3]."""
        import torch

        scores = [np.empty(0, np.float32)]
        with torch.inference_mode():
            for start in range(0, len(frames), _BATCH):
                scores.append(self._score(list(frames[start : start + _BATCH])).float().cpu().numpy())
        return np.concatenate(scores)

    def _score(self, batch: list[np.ndarray]) -> Any:
        """Tensor [n] for n pictures uint8 [H, W, 3]."""
        texts = [self._text] * (1 if self._is_clip else len(batch))
        more = {"truncation": True} if self._is_clip else {}
        inputs = self._processor(images=batch, text=texts, return_tensors="pt", padding=True, **more).to(self._device)
        if self._is_clip:
            return self._model(**inputs).logits_per_image[:, 0] / self._model.logit_scale.exp()
        logits = self._model(**inputs, use_image_text_matching_head=True).logits_per_image
        return logits.float().softmax(1)[:, 1]

    def rewards(self, inputs: np.ndarray) -> np.ndarray:
        """float32 [N]: similarity s as reward 2 s - 1, in the range of a reward model's tanh."""
        return np.asarray(2 * self.similarities(inputs) - 1, dtype=np.float32)

    async def label(self, pairs: Sequence[SegmentPair]) -> list[Label]:
        started = time.monotonic()
        shown = np.stack([picture_of(part, self._frames) for pair in pairs for part in (pair.first, pair.second)])
        similarities = await asyncio.to_thread(self.similarities, shown)
        seconds, labels = time.monotonic() - started, list[Label]()
        for first, second in similarities.reshape(-1, 2).tolist():
            value: LabelValue = 0 if first > second else 1 if second > first else -1
            labels.append(Label(value, text=f"{first:.4f} against {second:.4f}", seconds=seconds))
        return labels

    async def score(self, frames: Sequence[np.ndarray]) -> list[Score]:
        similarities = await asyncio.to_thread(self.similarities, np.array(frames))
        return [Score(max(value, 0.0)) for value in similarities.tolist()]
