"""Dialogues as teacher-forced batches for a model, encoded as in reinforcement learning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from rl_vlm.chat import ChatCodec, expand_image_tokens
from rl_vlm.models.families import layout_of
from rl_vlm.types import EncodedImage, Message, Role

_STAND_IN = EncodedImage("", b"", 0, 0)  # for any image, where only token ids are needed: encoding PNGs is slow

Part = str | np.ndarray


@dataclass(frozen=True, slots=True)
class Example:
    """A dialogue of T tokens."""

    token_ids: np.ndarray  # int32 [T]
    targets: np.ndarray  # bool [T], True for tokens of the policy
    positions: np.ndarray  # int64 [axes, T]
    pixels: Mapping[str, Tensor]  # of all images: arguments of the model's forward


class DialogueEncoder:
    """Turns images, messages and replies into an `Example` for a Hugging Face processor."""

    def __init__(self, processor: Any) -> None:
        tokenizer = processor.tokenizer
        self.images = layout_of(processor)
        template = processor.chat_template or tokenizer.chat_template
        self._codec = codec = ChatCodec(tokenizer, template, processor.image_token, self.images.around)
        self.pad_token_id = codec.pad_token_id  # fills the right side of shorter rows

        def given(role: Role, parts: tuple[str | None, ...], is_first: bool) -> np.ndarray:
            """A message's ids; None stands for an image."""
            message = Message(role, tuple(_STAND_IN if part is None else part for part in parts))
            span = codec.encode_prompt([message]) if is_first else codec.encode_continuation([message], ended=True)
            return span.token_ids

        def said(reply: str) -> np.ndarray:
            return np.append(codec.encode_text(reply), codec.end_of_turn_id).astype(np.int32)

        # A warm start repeats few texts many times.
        self._given, self._said = lru_cache(maxsize=4096)(given), lru_cache(maxsize=4096)(said)

    def encode_turn(self, parts: Sequence[Part], reply: str) -> Example:
        """One message of the user, as in `encode_chat`, and the reply."""
        return self.encode_chat([("user", parts, reply)])

    def encode_chat(self, turns: Sequence[tuple[Role, Sequence[Part], str]]) -> Example:
        """Turns are (role, texts and images uint8 [height, width, 3] in any order, reply)."""
        spans: list[np.ndarray] = []
        for number, (role, parts, reply) in enumerate(turns):
            texts = tuple(part if isinstance(part, str) else None for part in parts)
            spans += [self._given(role, texts, not number), self._said(reply)]
        shown = [Image.fromarray(part) for _, parts, _ in turns for part in parts if not isinstance(part, str)]
        short_ids, image_id = np.concatenate(spans), self._codec.image_token_id
        stands = [self.images.span(image.width, image.height) for image in shown]
        token_ids = expand_image_tokens(short_ids, image_id, stands)
        repeats = np.ones(len(short_ids), dtype=np.int64)
        repeats[short_ids == image_id] = [len(ids) for ids in stands]
        is_reply = np.concatenate([np.full(len(span), number % 2 == 1) for number, span in enumerate(spans)])
        sizes = [replace(_STAND_IN, width=image.width, height=image.height) for image in shown]
        positions = self.images.positions(token_ids, sizes)
        return Example(token_ids, np.repeat(is_reply, repeats), positions, self.images.arguments(shown))


def collate(examples: Sequence[Example], pad_token_id: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(arguments of the model's forward, targets bool [B, T]); rows are padded on the right."""

    def padded(rows: Sequence[np.ndarray], value: int = 0) -> torch.Tensor:
        return pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True, padding_value=value)

    def joined(tensors: Sequence[Tensor]) -> Tensor:
        """Along the first axis; those with fewer tiles, the second one, end with empty ones."""
        most = max(tensor.shape[1] for tensor in tensors)
        return torch.cat([functional.pad(one, (*(0, 0) * (one.ndim - 2), 0, most - one.shape[1])) for one in tensors])

    positions = padded([example.positions.T for example in examples]).permute(2, 0, 1)
    arguments = {
        "input_ids": padded([example.token_ids.astype(np.int64) for example in examples], pad_token_id),
        "attention_mask": padded([np.ones(len(example.token_ids), np.int64) for example in examples]),
        "position_ids": positions if len(positions) > 1 else positions[0],
        **{name: joined([example.pixels[name] for example in examples]) for name in examples[0].pixels},
    }
    return arguments, padded([example.targets for example in examples])


def backward_mean_nll(logprobs: Iterable[Tensor], targets: int) -> float:
    """Add the gradient of the mean negative log-likelihood of an optimiser step's `targets` tokens; returns that mean
    in nats. `logprobs` makes one forward pass after the other, each of whose graphs is freed before the next."""
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
