"""Plain transformers `generate`, which `--compare-hf` measures."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from rl_vlm.config import PolicyConfig
from rl_vlm.models.devices import replica_on_gpu
from rl_vlm.models.loading import load_model, load_text_side, quiet_libraries, resolve_model
from rl_vlm.models.lora import merge_into
from rl_vlm.models.modules import from_folder
from rl_vlm.models.trained import read_payload
from rl_vlm.types import Message


class PlainGenerate:
    """The model, with the adapter merged into it, and its image processor."""

    def __init__(self, config: PolicyConfig, adapter: Path | None) -> None:
        from transformers import AutoProcessor

        quiet_libraries()
        on_gpu = replica_on_gpu(config.serving)
        if not on_gpu:
            torch.set_num_threads(config.serving.num_threads)  # as a replica
        folder = resolve_model(config.model.path)
        self._device, self._new_tokens = "cuda" if on_gpu else "cpu", config.rollout.max_new_tokens_per_turn
        self._text = load_text_side(folder, config.model.pixels)
        self._model: Any = load_model(folder, config.model.dtype, self._device)
        if adapter is not None:
            merge_into(self._model, read_payload(adapter, 0))
        self._model.generation_config.eos_token_id = None  # every answer has its full length
        self._processor: Any = from_folder(AutoProcessor, folder).image_processor
        self._scaled = {"size": self._text.images.size} if self._text.images.size else {}
        self._suppressed = self._text.codec.suppressed_token_ids(self._text.vocab_size).tolist()

    def timed(self, conversations: Sequence[tuple[Message, ...]]) -> tuple[float, list[list[int]]]:
        """Seconds from messages to tokens, and the new tokens of each conversation."""
        started = time.perf_counter()
        tokens = self.answer(conversations)
        return time.perf_counter() - started, tokens

    def answer(self, conversations: Sequence[tuple[Message, ...]]) -> list[list[int]]:
        """The new tokens of each conversation, as one batch with padding on the left."""
        codec = self._text.codec
        rows, images = [], []
        for messages in conversations:
            span = codec.encode_prompt(messages)
            expanded = self._text.expand(span.token_ids, span.images, "item")
            rows.append(torch.from_numpy(expanded.astype(np.int64)))
            images += [image.to_pil() for image in span.images]
        ids = pad_sequence(rows, batch_first=True, padding_value=codec.pad_token_id, padding_side="left")
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
        pictures = {}
        if images:
            pictures = self._processor(images=images, **self._scaled, return_tensors="pt").to(self._device)
            pictures["pixel_values"] = pictures["pixel_values"].to(self._model.dtype)
        ids = ids.to(self._device)
        with torch.inference_mode():
            out = self._model.generate(
                input_ids=ids,
                attention_mask=mask.to(self._device),
                mm_token_type_ids=(ids == codec.image_token_id).int(),
                do_sample=False,
                max_new_tokens=self._new_tokens,
                suppress_tokens=self._suppressed,
                pad_token_id=codec.pad_token_id,
                **pictures,
            )
        return out[:, ids.shape[1] :].tolist()  # type: ignore[no-any-return]
