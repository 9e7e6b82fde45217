"""A teacher scores what the policy has sampled: log-probabilities of its tokens, and the teacher's own favourites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rl_vlm.asking import Client
from rl_vlm.config import TeacherModelSection
from rl_vlm.envs.images import blanked, replaced
from rl_vlm.models.images import TextSide
from rl_vlm.rollout.env_pool import GroupFailedError
from rl_vlm.types import (
    EncodedImage,
    GenerationRequest,
    Message,
    RLVLMError,
    SamplingParams,
    TeacherScores,
    TopLogprobs,
    Trajectory,
    TrajectoryGroup,
    UserInputError,
)
from rl_vlm.waiting import all_or_none


@dataclass(frozen=True, slots=True)
class Teacher:
    """Asks a served model of which `version` (-1: without an adapter) answers. `text` is its own."""

    settings: TeacherModelSection
    client: Client
    version: int
    text: TextSide

    async def score(
        self, group: TrajectoryGroup, policy: TextSide, other_images: Sequence[EncodedImage] = ()
    ) -> TrajectoryGroup:
        """The group with `Trajectory.teacher`. `policy` has encoded it, and `other_images` are what a `swapped` view
        shows. Raises GroupFailedError."""
        try:
            parts = [part for one in group.trajectories for part in one.parts]
            found = await all_or_none([self._score(part, policy, other_images) for part in parts])
        except RLVLMError as error:
            raise GroupFailedError("teacher", f"The teacher did not answer: {error}") from error
        scored = []
        for one in group.trajectories:
            own = [scores for part, scores in zip(parts, found, strict=True) if part.trajectory_id == one.trajectory_id]
            scored.append(replace(one, teacher=TeacherScores.joined(own)))
        return replace(group, trajectories=scored)

    async def _score(self, part: Trajectory, policy: TextSide, other_images: Sequence[EncodedImage]) -> TeacherScores:
        images, top = self._seen(part.images, other_images), self._top
        hint = np.zeros(0, np.int32)
        if self.settings.hint:
            note = Message.of("user", filled_in(self.settings.hint, part.info))
            hint = self.text.codec.encode_prompt([note], ending="nothing").token_ids
        completion = await self.client.generate(
            GenerationRequest(
                f"{part.trajectory_id}/{part.sampled_before}/teacher",
                np.concatenate([hint, policy.collapse(part.token_ids, part.images)]),
                SamplingParams(max_new_tokens=1, temperature=0.0, prompt_logprobs=top),
                images,
                self.version,
            )
        )
        places: list[TopLogprobs] = []
        for turn in part.turns:
            # Not the policy's own places: the teacher's pictures may be larger.
            before = policy.collapse(part.token_ids[: turn.start], part.images)
            shown = images[: int((before == self.text.codec.image_token_id).sum())]
            start = len(hint) + len(self.text.expand(before, shown)) - 1  # the first token of a prompt has no score
            places += completion.prompt_logprobs[start : start + turn.stop - turn.start]
        if [place[0][0] for place in places] != part.token_ids[part.loss_mask].tolist():
            raise UserInputError("it read other tokens than the policy sampled, so their tokenizers or images differ.")
        ids, likely = np.zeros((len(places), top), np.int32), np.full((len(places), top), -np.inf, np.float32)
        for row, (_, *most) in enumerate(places):
            for column, (token, logprob) in enumerate(most):
                ids[row, column], likely[row, column] = token, logprob
        return TeacherScores(np.array([place[0][1] for place in places], np.float32), ids, likely)

    @property
    def _top(self) -> int:
        return 0 if self.settings.divergence == "reverse" else self.settings.top_k

    def _seen(self, images: tuple[EncodedImage, ...], other_images: Sequence[EncodedImage]) -> tuple[EncodedImage, ...]:
        if self.settings.view == "swapped":
            return replaced(images, other_images)
        return blanked(images) if self.settings.view == "blank" else images


def filled_in(hint: str, info: Mapping[str, Any]) -> str:
    """The hint with what it takes from an episode's info. Raises UserInputError."""
    try:
        return hint.format_map(info)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        known = ", ".join(sorted(info)) or "nothing"
        raise UserInputError(f"teacher.hint {hint!r} cannot be filled in ({error!r}): the info has {known}.") from error
