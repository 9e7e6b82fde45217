"""Labellers by configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from rl_vlm.asking.endpoints import Client, Endpoint, ServedEndpoint
from rl_vlm.asking.http_endpoints import GenerateEndpoint, OpenAIEndpoint
from rl_vlm.config import LabelsSection
from rl_vlm.labelling.labeller import LabelStats, VLMLabeller
from rl_vlm.labelling.prompts import TaskPrompts, UnknownTaskError, task_prompts
from rl_vlm.labelling.teachers import (
    ClipSimilarity,
    CoinFlips,
    MatchingSimilarity,
    ScriptedTeacher,
    SimilarityLabeller,
)
from rl_vlm.labelling.types import (
    HasState,
    KnowsMargin,
    Label,
    Labeller,
    Score,
    Scorer,
    SegmentPair,
)
from rl_vlm.types import UserInputError

if TYPE_CHECKING:
    from rl_vlm.models.loading import TextSide


def prompts_of(section: LabelsSection, env_id: str = "") -> TaskPrompts:
    """The prompts that a configuration asks for; `env_id` names the task where the section does not."""
    task = section.task or env_id
    try:
        prompts = task_prompts(task, section.prompts)
    except UnknownTaskError:
        if not section.goal or section.task:
            raise
        # A goal is enough for a task that nobody has written prompts for.
        prompts = TaskPrompts(name=task or "task", goal=section.goal)
    if section.goal and section.goal != prompts.goal:
        # The description was of the other goal.
        prompts = prompts.model_copy(update={"goal": section.goal, "description": ""})
    return prompts.model_copy(update={"description": section.description or prompts.description})


def build_labeller(
    section: LabelsSection,
    *,
    env_id: str = "",
    seed: int = 0,
    client: Client | None = None,
    text: TextSide | None = None,
    device: str = "cpu",
) -> Labeller:
    """The labeller that a configuration names. Raises UserInputError.

    `client` and `text` are those of the served model, which `source: vlm` asks; `device` is that of the models of clip and itm.
    """
    if section.source == "cache":
        raise UserInputError("A label cache alone labels nothing new.")
    labeller: Labeller
    if section.source == "scripted":
        labeller = ScriptedTeacher(section.teacher, seed)
    elif section.source == "random":
        labeller = CoinFlips(seed)
    elif section.source in ("clip", "itm"):
        labeller = SimilarityLabeller(build_similarity(section, env_id, device), section.frames)
    else:
        endpoint = _endpoint(section, client, text)
        labeller = VLMLabeller(endpoint, prompts_of(section, env_id), section, seed)
    if section.coin_flips:
        return FlippedLabels(labeller, np.random.default_rng([seed, 1]))
    return FlippedLabels(labeller) if section.flip else labeller


def build_similarity(
    section: LabelsSection, env_id: str = "", device: str = "cpu"
) -> ClipSimilarity | MatchingSimilarity:
    """Similarity of pictures and the description of the achieved goal, for labels or as a reward itself."""
    kind = MatchingSimilarity if section.source == "itm" else ClipSimilarity
    return kind(section.similarity_model, prompts_of(section, env_id).description, device)


def _endpoint(section: LabelsSection, client: Client | None, text: TextSide | None) -> Endpoint:
    if section.source == "endpoint":
        return OpenAIEndpoint(section.endpoint)
    if section.source == "generate":
        return GenerateEndpoint(section.endpoint)
    if client is None or text is None:
        raise UserInputError("Labels of the served model need a served model: start one, or choose another source.")
    return ServedEndpoint(client, text)


class FlippedLabels:
    """Another labeller's labels with 0 and 1 swapped, and scores s as 1 - s: a control that must not succeed.

    With `coins` each decided label is swapped by a coin flip; undecided pairs stay undecided, so the number of usable labels is
    that of a run without the control. The other methods are forwarded one by one: since Python 3.12, isinstance with a protocol
    does not see attributes that `__getattr__` would find.
    """

    def __init__(self, labeller: Labeller, coins: np.random.Generator | None = None) -> None:
        self.inner, self._coins = labeller, coins

    @property
    def stats(self) -> LabelStats | None:
        """What the inner labeller has cost, where it counts that."""
        return getattr(self.inner, "stats", None)

    def _flips(self, decided: bool) -> bool:
        return self._coins is None or (decided and bool(self._coins.integers(2)))

    async def label(self, pairs: Sequence[SegmentPair]) -> list[Label]:
        """One label per pair, in order."""
        labels = await self.inner.label(pairs)
        return [label.swapped() if self._flips(label.value != -1) else label for label in labels]

    async def score(self, frames: Sequence[np.ndarray]) -> list[Score]:
        """One score per picture, in order; the inner labeller must be a scorer."""
        scores = await cast(Scorer, self.inner).score(frames)
        return [
            replace(score, value=1 - score.value) if score.value is not None and self._flips(decided=True) else score
            for score in scores
        ]

    def set_margin(self, mean_return: float, segment_length: int, horizon: int) -> None:
        """Tell the inner labeller, if its thresholds follow the policy's returns."""
        if isinstance(self.inner, KnowsMargin):
            self.inner.set_margin(mean_return, segment_length, horizon)

    def state(self) -> dict[str, Any]:
        """Random state and that of the inner labeller, as JSON."""
        return {
            "coins": self._coins.bit_generator.state if self._coins is not None else None,
            "inner": self.inner.state() if isinstance(self.inner, HasState) else None,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        if self._coins is not None:
            self._coins.bit_generator.state = state["coins"]
        if isinstance(self.inner, HasState) and state["inner"] is not None:
            self.inner.set_state(state["inner"])
