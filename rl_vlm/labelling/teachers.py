"""The scripted teacher of B-Pref, the similarity of picture and text as a labeller, and labellers by configuration."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_vlm.asking import Client, Endpoint, HTTPEndpoint, ServedEndpoint
from rl_vlm.config import LabelsSection, TeacherSection
from rl_vlm.labelling.labeller import VLMLabeller
from rl_vlm.labelling.labels import (
    SKIPPED,
    InputKind,
    Label,
    Labeller,
    LabelValue,
    Score,
    SegmentPair,
    picture_of,
    true_return,
)
from rl_vlm.labelling.prompts import TaskPrompts, task_prompts
from rl_vlm.models.loading import resolve_model
from rl_vlm.models.modules import from_folder
from rl_vlm.types import UserInputError

if TYPE_CHECKING:
    from rl_vlm.models.images import TextSide


logger = logging.getLogger(__name__)

_BATCH = 32  # pictures per forward pass
_FAMILIES = {"clip": ("clip",), "itm": ("blip-2", "blip_2")}  # model types that each source can run


class ScriptedTeacher(Labeller):
    """Labels by the true reward; exactly equal returns are label -1 for a rational teacher."""

    def __init__(self, settings: TeacherSection | None = None, seed: int = 0) -> None:
        self._settings = settings or TeacherSection()
        self._rng = np.random.default_rng(seed)
        self._margin = 0.0
        self._has_warned = False

    def set_margin(self, mean_return: float, segment_length: int, horizon: int) -> None:
        """Scale the thresholds to the policy: the recent mean return of episodes, as share of a segment. Below 0, which
        B-Pref's tasks never reach, no pair meets them."""
        self._margin = mean_return * segment_length / horizon
        eps = [name for name in ("eps_skip", "eps_equal") if getattr(self._settings, name)]
        if eps and mean_return < 0 and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "preference.labels.teacher.%s: thresholds are shares of the episodes' mean return, which is %.4g, and "
                "below 0 they have no effect. Make rewards positive, or leave the thresholds out.",
                " and ".join(eps), mean_return,
            )  # fmt: skip

    async def label(self, pairs: Sequence[SegmentPair]) -> list[Label]:
        return [self._label_one(pair) for pair in pairs]

    def state(self) -> dict[str, Any]:
        return {"rng": self._rng.bit_generator.state, "margin": self._margin}

    def set_state(self, state: dict[str, Any]) -> None:
        self._rng.bit_generator.state = state["rng"]
        self._margin = float(state["margin"])

    def _label_one(self, pair: SegmentPair) -> Label:
        settings = self._settings
        plain = [true_return(pair.first), true_return(pair.second)]
        # Drawn for every pair, used or not, so that labels of later pairs do not depend on earlier thresholds.
        noise, mistake = self._rng.random(2)
        if not np.isfinite(plain).all():
            return Label(-1, error="the true reward of this pair is not known (nan or infinite)")
        skip = self._margin * settings.eps_skip
        if skip > 0 and max(plain) <= skip:
            return Label(-1, error=SKIPPED)
        if abs(plain[0] - plain[1]) < self._margin * settings.eps_equal:
            return Label(-1)
        # The sum over t of gamma^(T - 1 - t) r_t.
        weights = settings.gamma ** np.arange(len(pair.first) - 1, -1, -1, dtype=np.float64)
        first, second = (float(np.sum(weights * part.true_rewards)) for part in (pair.first, pair.second))
        prefers_second = first < second
        if settings.beta > 0:
            # P(second preferred) = sigmoid(beta (R2 - R1)), Bradley and Terry (1952).
            prefers_second = noise < 0.5 * (1 + math.tanh(settings.beta * (second - first) / 2))
        elif first == second:
            return Label(-1)
        return Label(1 if prefers_second != (mistake < settings.eps_mistake) else 0)


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


# Labellers by configuration.


def prompts_of(section: LabelsSection, env_id: str = "") -> TaskPrompts:
    """The prompts that a configuration asks for; `env_id` names the task where the section does not."""
    # A goal is enough for an environment without prompts.
    prompts = task_prompts(section.task or env_id, section.prompts, goal="" if section.task else section.goal or "")
    changes = {"description": section.description or prompts.description}
    if section.goal and section.goal != prompts.goal:
        changes = {"goal": section.goal, "description": section.description or ""}  # the known one is of another goal
    return prompts.model_copy(update=changes)


def build_labeller(
    section: LabelsSection,
    env_id: str = "",
    seed: int = 0,
    client: Client | None = None,
    text: TextSide | None = None,
    device: str = "cpu",
) -> Labeller:
    """The labeller that a configuration names. `client` and `text` are those of the served model, for `source: vlm`;
    `device` is for clip and itm. Raises UserInputError."""
    if section.source == "scripted":
        return ScriptedTeacher(section.teacher, seed)
    if section.source in ("clip", "itm"):
        return build_similarity(section, env_id, device)
    endpoint: Endpoint
    if section.source in ("endpoint", "generate"):
        endpoint = HTTPEndpoint(section.endpoint, plain=section.source == "generate")
    elif client is None or text is None:
        raise UserInputError("Labels of the served model need a served model: start one, or choose another source.")
    else:
        endpoint = ServedEndpoint(client, text)
    return VLMLabeller(endpoint, prompts_of(section, env_id), section, seed)


def build_similarity(section: LabelsSection, env_id: str = "", device: str = "cpu") -> Similarity:
    """Similarity of pictures and the description of the achieved goal, for labels or as a reward itself."""
    families = _FAMILIES[section.source]
    return Similarity(
        families, section.similarity_model, prompts_of(section, env_id).description, device, section.frames
    )
