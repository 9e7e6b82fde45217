"""Conversations as the trajectories that reinforcement learning trains on: token ids, and which of them the model says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np

from rl_vlm.chat import EncodedSpan, expand_image_tokens
from rl_vlm.envs.rows import BadRowError
from rl_vlm.models.loading import TextSide
from rl_vlm.supervised.conversations import Conversation
from rl_vlm.supervised.thoughts import after_opened_thought
from rl_vlm.types import EncodedImage, Message, StopReason, Trajectory, TrajectoryStatus, Turn, UserInputError

TooLong = Literal["leave_out", "truncate"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the last assistant turn answers: token ids int32 [P] with one placeholder per image, and the images.

    reply: that turn, as the model is to write it.
    """

    token_ids: np.ndarray
    images: tuple[EncodedImage, ...]
    reply: str


class ConversationEncoder:
    """Encodes conversations for one model, span by span as rollouts are encoded.

    Every assistant turn, its end-of-turn token included, is what the loss is taken of. Where the model's template opens a
    thought, the turn goes on with its own, or the end of an empty one is given; thoughts of earlier turns stay, as in rollouts.

    Args:
        text: the model's codec and image geometry.
        max_length: tokens of a conversation, images included.
        too_long: see `sft.too_long`.
    """

    def __init__(self, text: TextSide, max_length: int, too_long: TooLong = "leave_out") -> None:
        self._text = text
        self._max_length = max_length
        self._too_long = too_long

    def length(self, conversation: Conversation) -> int | None:
        """Tokens that are trained on or shown, read from headers of images alone; None: the conversation is left out.

        Raises BadRowError.
        """
        # The number of an image's tokens is the same when a camera's rotation exchanges width and height.
        images = [EncodedImage("", b"", width, height) for width, height in conversation.sizes()]
        trajectory = self._trajectory(conversation, images)
        return None if trajectory is None else len(trajectory)

    def encode(self, conversation: Conversation) -> Trajectory:
        """The conversation with its images, decoded. Raises BadRowError."""
        trajectory = self._trajectory(conversation, conversation.decoded())
        if trajectory is None:
            raise BadRowError(f"{conversation.where}: longer than sft.max_length ({self._max_length}).")
        return trajectory

    def prompt(self, conversation: Conversation) -> Prompt:
        """Everything before the last assistant turn. Raises BadRowError."""
        *spans, (reply, _) = self._spans(conversation, conversation.decoded())
        return Prompt(
            np.concatenate([span.token_ids for span, _ in spans]),
            tuple(image for span, _ in spans for image in span.images),
            self._text.codec.decode(reply.token_ids),
        )

    def _spans(self, conversation: Conversation, images: Sequence[EncodedImage]) -> list[tuple[EncodedSpan, bool]]:
        """The conversation in order: what is given, and what the model says (True), by turns."""
        codec = self._text.codec
        if conversation.has_thoughts and not codec.opens_thought:
            raise BadRowError(
                f"{conversation.where}: a message has reasoning_content, and the model's template opens no thought: write it into "
                "the content, as the model is to write it."
            )
        spans: list[tuple[EncodedSpan, bool]] = []
        try:
            for said, group in groupby(conversation.messages(images), key=lambda message: message.role == "assistant"):
                messages: list[Message] = list(group)
                if said:
                    given, reply = "", messages[0].text
                    if codec.opens_thought:
                        given, reply = after_opened_thought(reply)
                    if given:
                        spans.append((EncodedSpan(codec.encode_text(given), ()), False))
                    ids = np.append(codec.encode_text(reply), codec.end_of_turn_id).astype(np.int32)
                    spans.append((EncodedSpan(ids, ()), True))
                elif spans:
                    spans.append((codec.encode_continuation(messages, ended=True), False))
                else:
                    spans.append((codec.encode_prompt(messages), False))
        except UserInputError as error:
            raise BadRowError(f"{conversation.where}: {error}") from error
        return spans

    def _trajectory(self, conversation: Conversation, images: Sequence[EncodedImage]) -> Trajectory | None:
        """The whole conversation, or as much of it as fits; None: it is left out."""
        ids: list[np.ndarray] = []
        said: list[np.ndarray] = []
        shown: list[EncodedImage] = []
        length = 0
        for span, is_reply in self._spans(conversation, images):
            expanded = self._expanded(span, conversation)
            ids.append(expanded)
            said.append(np.full(len(expanded), is_reply))
            if length < self._max_length:
                shown.extend(span.images)
            length += len(expanded)
        token_ids, mask = np.concatenate(ids), np.concatenate(said)
        if length > self._max_length:
            if self._too_long == "leave_out" or not mask[: self._max_length].any():
                return None
            # Up to the last token that is said and fits: no image is cut, and nothing is shown that nobody answers.
            stop = int(np.flatnonzero(mask[: self._max_length])[-1]) + 1
            token_ids, mask = token_ids[:stop], mask[:stop]
            shown = shown[: self._count_images(token_ids, shown)]
        changes = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2)
        return Trajectory(
            trajectory_id=conversation.where,
            token_ids=token_ids,
            loss_mask=mask,
            logprobs=np.zeros(len(token_ids), dtype=np.float32),
            turns=tuple(Turn(int(start), int(stop), 0, StopReason.END_OF_TURN) for start, stop in changes),
            status=TrajectoryStatus.COMPLETED,
            images=tuple(shown),
        )

    def _expanded(self, span: EncodedSpan, conversation: Conversation) -> np.ndarray:
        try:
            counts = [self._text.count_image_tokens(image.width, image.height) for image in span.images]
            return expand_image_tokens(span.token_ids, self._text.codec.image_token_id, counts)
        except UserInputError as error:  # an image of a shape that the model cannot be shown
            raise BadRowError(f"{conversation.where}: {error}") from error

    def _count_images(self, token_ids: np.ndarray, images: Sequence[EncodedImage]) -> int:
        """How many of the images have their placeholders in these ids."""
        rest = int((token_ids == self._text.codec.image_token_id).sum())
        ends = np.cumsum([self._text.count_image_tokens(image.width, image.height) for image in images])
        return int(np.searchsorted(ends, rest, side="right"))
