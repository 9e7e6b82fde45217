"""Dialogues as teacher-forced batches for a Qwen-VL model, encoded as in reinforcement learning."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from rl_vlm.chat import ChatCodec, expand_image_tokens, mrope_positions
from rl_vlm.models.images import Grid, ImageProcessorSpec, patchify
from rl_vlm.types import EncodedImage, Message, Role

# Stands for any image where only token ids are needed: encoding real pixels as PNG would cost more than the model.
_STAND_IN = EncodedImage("", b"", 0, 0)

Part = str | np.ndarray


@dataclass(frozen=True, slots=True)
class Example:
    """token_ids int32 [T]; targets bool [T], True for tokens of the policy; positions int64 [3, T]; patches; grids."""

    token_ids: np.ndarray
    targets: np.ndarray
    positions: np.ndarray
    patches: np.ndarray
    grids: tuple[Grid, ...]


class DialogueEncoder:
    """Turns images, messages and replies into an `Example` for one model."""

    def __init__(self, codec: ChatCodec, tokenizer: Any, images: ImageProcessorSpec) -> None:
        self._codec = codec
        self._tokenizer = tokenizer
        self.images = images
        # A warm start repeats few texts many times.
        self._continuation = lru_cache(maxsize=256)(self._continuation_uncached)
        self._prompt = lru_cache(maxsize=4096)(self._prompt_uncached)
        self._reply = lru_cache(maxsize=4096)(self._reply_uncached)

    @classmethod
    def from_processor(cls, processor: Any) -> DialogueEncoder:
        """The encoder for a Hugging Face processor of the Qwen-VL family."""
        tokenizer = processor.tokenizer
        codec = ChatCodec(tokenizer, processor.chat_template or tokenizer.chat_template, processor.image_token)
        return cls(codec, tokenizer, ImageProcessorSpec.from_processor(processor))

    @property
    def pad_token_id(self) -> int:
        """Fills the right side of shorter rows."""
        return self._codec.pad_token_id

    def encode_turn(self, parts: Sequence[Part], reply: str) -> Example:
        """One message of the user, texts and images (uint8 [height, width, 3]) in any order, and the reply."""
        return self.encode_chat([("user", parts, reply)])

    def encode_chat(self, turns: Sequence[tuple[Role, Sequence[Part], str]]) -> Example:
        """Turns are (role, texts and images uint8 [height, width, 3] in any order, reply)."""
        ids: list[np.ndarray] = []
        sampled: list[np.ndarray] = []
        for number, (role, parts, reply) in enumerate(turns):
            encode = self._continuation if number else self._prompt
            given = encode(role, tuple(part if isinstance(part, str) else None for part in parts))
            for span, is_reply in ((given, False), (self._reply(reply), True)):
                ids.append(span)
                sampled.append(np.full(len(span), is_reply))
        return self._example(
            ids, sampled, [part for _, parts, _ in turns for part in parts if not isinstance(part, str)]
        )

    def _example(
        self, ids: Sequence[np.ndarray], sampled: Sequence[np.ndarray], images: Sequence[np.ndarray]
    ) -> Example:
        parts = [patchify(self.images, Image.fromarray(image)) for image in images]
        grids = tuple(grid for _, grid in parts)
        counts = [self.images.num_image_tokens(grid) for grid in grids]
        short_ids = np.concatenate(ids)
        image_id = self._codec.image_token_id
        token_ids = expand_image_tokens(short_ids, image_id, counts)
        repeats = np.ones(len(short_ids), dtype=np.int64)
        repeats[short_ids == image_id] = counts
        return Example(
            token_ids,
            np.repeat(np.concatenate(sampled), repeats),
            mrope_positions(token_ids, image_id, grids, self.images.merge_size),
            np.concatenate([patches for patches, _ in parts]),
            grids,
        )

    def _prompt_uncached(self, role: Role, parts: tuple[str | None, ...]) -> np.ndarray:
        return self._codec.encode_prompt([_message(role, parts)]).token_ids

    def _continuation_uncached(self, role: Role, parts: tuple[str | None, ...]) -> np.ndarray:
        return self._codec.encode_continuation([_message(role, parts)], ended=True).token_ids

    def _reply_uncached(self, text: str) -> np.ndarray:
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return np.array([*ids, self._codec.end_of_turn_id], dtype=np.int32)


def _message(role: Role, parts: tuple[str | None, ...]) -> Message:
    """A message of which only the token ids matter; None stands for an image."""
    return Message(role, tuple(_STAND_IN if part is None else part for part in parts))


def collate(examples: Sequence[Example], pad_token_id: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(arguments of the model's forward, targets bool [B, T]); rows are padded on the right."""
    longest = max(len(example.token_ids) for example in examples)
    shape = (len(examples), longest)
    input_ids = np.full(shape, pad_token_id, dtype=np.int64)
    attention = np.zeros(shape, dtype=np.int64)
    targets = np.zeros(shape, dtype=bool)
    positions = np.zeros((3, *shape), dtype=np.int64)
    for row, example in enumerate(examples):
        length = len(example.token_ids)
        input_ids[row, :length] = example.token_ids
        attention[row, :length] = 1
        targets[row, :length] = example.targets
        positions[:, row, :length] = example.positions
    arguments = {
        "input_ids": torch.from_numpy(input_ids),
        "attention_mask": torch.from_numpy(attention),
        "position_ids": torch.from_numpy(positions),
        "pixel_values": torch.from_numpy(np.concatenate([example.patches for example in examples])),
        "image_grid_thw": torch.tensor([grid for example in examples for grid in example.grids]),
    }
    return arguments, torch.from_numpy(targets)


def backward_mean_nll(logprobs: Iterable[Tensor], targets: int) -> float:
    """Add the gradient of the mean negative log-likelihood of an optimiser step's `targets` tokens; returns that mean
    in nats.

    `logprobs` computes the tokens' log-probabilities one forward pass after the other: each graph is freed before the
    next.
    """
    mean = 0.0
    for values in logprobs:
        loss = -values.sum() / targets
        loss.backward()  # type: ignore[no-untyped-call]
        mean += float(loss.detach())
    return mean


def token_logprobs(model: Any, arguments: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    """float32 [B, T]: the log-probability of each target token given all before it; 0 elsewhere."""
    hidden = model.model(**arguments, use_cache=False).last_hidden_state[:, :-1]
    wanted = targets[:, 1:]
    logits = model.lm_head(hidden[wanted]).float()
    chosen = arguments["input_ids"][:, 1:][wanted]
    values = torch.log_softmax(logits, dim=-1).gather(1, chosen[:, None])[:, 0]
    out = torch.zeros(targets.shape, dtype=values.dtype, device=values.device)
    out[:, 1:][wanted] = values
    return out
