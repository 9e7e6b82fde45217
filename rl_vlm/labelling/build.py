"""Labellers by configuration."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from rl_vlm.config import LabelsSection
from rl_vlm.labelling.endpoints import Backend, Client, EndpointBackend, GenerateBackend, ServedBackend, server_url
from rl_vlm.labelling.labeller import VLMLabeller
from rl_vlm.labelling.prompts import TaskPrompts, task_prompts
from rl_vlm.labelling.teachers import (
    ClipSimilarity,
    CoinFlips,
    MatchingSimilarity,
    ScriptedTeacher,
    SimilarityLabeller,
)
from rl_vlm.labelling.types import Label, Labeller, LabelValue, Score, Scorer, SegmentPair
from rl_vlm.types import UserInputError

if TYPE_CHECKING:
    from rl_vlm.models.loading import TextSide


def prompts_of(section: LabelsSection, env_id: str = "") -> TaskPrompts:
    """The prompts that a configuration asks for; `env_id` names the task where the section does not."""
    task = section.task or env_id
    if section.goal and not section.task:
        prompts = TaskPrompts(task or "task", section.goal)
    else:
        prompts = task_prompts(task, section.prompts)
    return replace(prompts, goal=section.goal or prompts.goal, description=section.description or prompts.description)


def build_labeller(
    section: LabelsSection,
    *,
    env_id: str = "",
    seed: int = 0,
    client: Client | None = None,
    text: TextSide | None = None,
    min_version: int = -1,
) -> Labeller:
    """The labeller that a configuration names. Raises UserInputError.

    `client` and `text` are those of the served model, which `source: vlm` asks.
    """
    if section.source == "cache":
        raise UserInputError("A label cache alone labels nothing new: read it with LabelReplay.")
    labeller: Labeller
    if section.source == "scripted":
        labeller = ScriptedTeacher(section.teacher, seed)
    elif section.source == "random":
        labeller = CoinFlips(seed)
    elif section.source in ("clip", "itm"):
        similarity = build_similarity(section, env_id)
        labeller = SimilarityLabeller(similarity, section.frames)
    else:
        backend = _backend(section, client, text, min_version)
        labeller = VLMLabeller(backend, prompts_of(section, env_id), section, seed)
    if section.coin_flips:
        return CoinFlippedLabels(labeller, seed)
    return FlippedLabels(labeller) if section.flip else labeller


def build_similarity(
    section: LabelsSection, env_id: str = "", device: str = "cpu"
) -> ClipSimilarity | MatchingSimilarity:
    """Similarity of pictures and the description of the achieved goal, for labels or as a reward itself."""
    kind = MatchingSimilarity if section.source == "itm" else ClipSimilarity
    return kind(section.similarity_model, prompts_of(section, env_id).description, device)


def _backend(section: LabelsSection, client: Client | None, text: TextSide | None, min_version: int) -> Backend:
    endpoint = section.endpoint
    token = os.environ.get(endpoint.token_env, "") if endpoint.token_env else ""
    if section.source == "endpoint":
        return EndpointBackend(
            endpoint.url,
            endpoint.model,
            token=token,
            timeout_s=endpoint.timeout_s,
            guidance=endpoint.guidance if section.guided else "none",
            logprobs=endpoint.logprobs,
            max_in_flight=endpoint.max_in_flight,
        )
    if section.source == "generate":
        return GenerateBackend(endpoint.url or server_url(), token=token, timeout_s=endpoint.timeout_s)
    if client is None or text is None:
        raise UserInputError("Labels of the served model need a served model: start one, or choose another source.")
    return ServedBackend(client, text, min_version)


class FlippedLabels:
    """Another labeller's labels with 0 and 1 swapped, and scores s as 1 - s: a control that must not succeed."""

    def __init__(self, labeller: Labeller) -> None:
        self.inner = labeller

    def __getattr__(self, name: str) -> Any:
        """What else the inner labeller can do: its state, its margin."""
        return getattr(self.inner, name)

    async def label(self, pairs: Sequence[SegmentPair]) -> list[Label]:
        """One label per pair, in order."""
        return [_flipped(label) for label in await self.inner.label(pairs)]

    async def score(self, frames: Sequence[np.ndarray]) -> list[Score]:
        """One score per picture, in order; the inner labeller must be a scorer."""
        scores = await cast(Scorer, self.inner).score(frames)
        return [replace(score, value=None if score.value is None else 1 - score.value) for score in scores]


class CoinFlippedLabels:
    """Another labeller's labels with every 0 and 1 replaced by a coin flip: a control that must not succeed.

    The same pairs are decided and undecided as without it, so nothing but the labels' information is gone. (Flipping a coin
    for every pair leaves few coins for the pairs that matter, and those few may happen to be right.)
    """

    def __init__(self, labeller: Labeller, seed: int) -> None:
        self.inner = labeller
        self._coins = np.random.default_rng([seed, 1])

    def __getattr__(self, name: str) -> Any:
        """What else the inner labeller can do: its margin, its figures."""
        if name == "inner":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.inner, name)

    async def label(self, pairs: Sequence[SegmentPair]) -> list[Label]:
        """One label per pair, in order."""
        labels = await self.inner.label(pairs)
        return [_flipped(label) if label.value != -1 and self._coins.integers(2) else label for label in labels]

    def state(self) -> dict[str, Any]:
        """Random state and that of the inner labeller, as JSON."""
        inner = self.inner.state() if hasattr(self.inner, "state") else None
        return {"coins": self._coins.bit_generator.state, "inner": inner}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self._coins.bit_generator.state = state["coins"]
        if state["inner"] is not None:
            self.inner.set_state(state["inner"])  # type: ignore[attr-defined]


def _flipped(label: Label) -> Label:
    other = {0: 1, 1: 0, -1: -1}
    known = label.probabilities
    return replace(
        label,
        value=cast(LabelValue, other[label.value]),
        probabilities=(known[1], known[0], known[2]) if known else None,
        answers=tuple(cast(LabelValue, other[answer]) for answer in label.answers),
    )
