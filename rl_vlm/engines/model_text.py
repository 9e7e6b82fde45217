"""A model's own modules as the language model of the transformers engine: whatever family transformers knows.

Keys and values are kept as for Qwen's (`RowCache`), all of them also where a layer sees a window; the states of linear
attention and of convolutions are kept beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, LinearAttentionLayer

from rl_vlm.engines.cache import RowCache
from rl_vlm.models.families.generic import Backbone, ImageFeatures

LayerState: TypeAlias = tuple[Tensor, Tensor] | LinearAttentionLayer


class ModelText:
    """As `TextModel`, by the modules of any model."""

    def __init__(self, backbone: Backbone) -> None:
        self._backbone, self._text = backbone, backbone.text
        self._config = backbone.model.config.get_text_config()
        self.parts_done = 0
        for layer in self._text.layers:
            layer.register_forward_hook(self._count)
        # Padding behind a prompt would go on into the states that its rows begin with.
        self.pads = all(isinstance(layer, DynamicLayer) for layer in self._new_layers())

    def _count(self, *_: Any) -> None:
        self.parts_done += 1

    def _new_layers(self) -> list[DynamicLayer | LinearAttentionLayer]:
        layers = DynamicCache(config=self._config).layers
        return [layer if isinstance(layer, LinearAttentionLayer) else DynamicLayer() for layer in layers]

    def new_cache(self) -> ModelCache:
        """A cache without rows."""
        return ModelCache(getattr(self._config, "sliding_window", None))

    def prefill(
        self, input_ids: Tensor, positions: Tensor, lengths: Tensor, features: Sequence[ImageFeatures] = ()
    ) -> tuple[Tensor, list[LayerState]]:
        """As `TextModel.prefill`; unless `pads`, all lengths are the same."""
        cache = Cache(layers=self._new_layers())
        mask = torch.arange(input_ids.shape[1], device=lengths.device) < lengths[:, None]
        options = {"attention_mask": mask.long(), "past_key_values": cache, "use_cache": True}
        out = self._backbone.run(input_ids, positions, features, **options)
        last = out.last_hidden_state[torch.arange(len(lengths), device=lengths.device), lengths - 1]
        return last, [
            layer if isinstance(layer, LinearAttentionLayer) else (layer.keys, layer.values) for layer in cache.layers
        ]

    def step(self, token_ids: Tensor, positions: Tensor, cache: ModelCache) -> Tensor:
        """As `TextModel.step`."""
        axes = self._backbone.images.axes
        places = positions[:, None] if axes == 1 else positions[:, None].expand(axes, -1, -1)
        out = self._text(
            input_ids=token_ids[:, None],
            position_ids=places,
            attention_mask=cache.masks(getattr(self._config, "layer_types", None)),
            past_key_values=cache.view,
            use_cache=True,
        )
        return out.last_hidden_state[:, 0]  # type: ignore[no-any-return]


class ModelCache(RowCache):
    """Rows of keys, values and states that a model's own modules read and write. `window`: of sliding attention."""

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self._sliding = window
        self._states: list[LinearAttentionLayer] = []
        self.view = Cache(layers=[])

    def admit(self, layers: Sequence[LayerState], source: Tensor, max_length: int) -> None:
        """As `RowCache.admit`, of each layer's keys and values or state."""
        attention, states = _parted(layers)
        super().admit(attention, source, max_length)
        for state in states:
            state.reorder_cache(source)
        if not self._states:
            self._states, places, left = states, iter(range(len(attention))), iter(states)
            own = [_RowLayer(self, next(places)) if isinstance(layer, tuple) else next(left) for layer in layers]
            self.view = Cache(layers=own)
            return
        for held, number, tensor in self._beside(states):
            held[number] = torch.cat([held[number], tensor])

    def replace(self, layers: Sequence[LayerState], rows: Tensor) -> None:
        """As `RowCache.replace`."""
        attention, states = _parted(layers)
        super().replace(attention, rows)
        for held, number, tensor in self._beside(states):
            held[number][rows] = tensor

    def _beside(self, states: Sequence[LinearAttentionLayer]) -> Iterator[tuple[dict[int, Any], int, Tensor]]:
        """Each tensor of new states, with the dictionary and the key of its own here."""
        for mine, new in zip(self._states, states, strict=True):
            for held, more in ((mine.conv_states, new.conv_states), (mine.recurrent_states, new.recurrent_states)):
                yield from ((held, number, tensor) for number, tensor in more.items() if tensor is not None)

    def keep(self, rows: Tensor) -> None:
        super().keep(rows)
        for state in self._states:
            state.reorder_cache(rows)
        if not len(rows):
            self._states = []

    def masks(self, kinds: Sequence[str] | None) -> Tensor | dict[str, Tensor | None]:
        """What a step's tokens see, bool [rows, 1, 1, window]: one mask, or one for each kind of layer."""
        place = torch.arange(self._window, device=self._lengths.device)
        full = (place <= self._lengths[:, None])[:, None, None]
        if kinds is None:
            return full if self._sliding is None else self._slid(full, place)
        made = {"full_attention": lambda: full, "sliding_attention": lambda: self._slid(full, place)}
        return {kind: made[kind]() if kind in made else None for kind in set(kinds)}

    def _slid(self, full: Tensor, place: Tensor) -> Tensor:
        assert self._sliding is not None
        return full & (place > self._lengths[:, None] - self._sliding)[:, None, None]


class _RowLayer(CacheLayerMixin):
    """One attention layer's keys and values in a `ModelCache`."""

    is_sliding = False

    def __init__(self, cache: ModelCache, number: int) -> None:
        super().__init__()
        self._cache, self._number = cache, number

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Rows were admitted before."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self._cache.store(self._number, key_states[:, :, 0], value_states[:, :, 0])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.length, 0

    def get_seq_length(self) -> int:
        return self._cache.length

    def get_max_length(self) -> int:
        return -1


def _parted(layers: Sequence[LayerState]) -> tuple[list[tuple[Tensor, Tensor]], list[LinearAttentionLayer]]:
    attention = [layer for layer in layers if isinstance(layer, tuple)]
    return attention, [layer for layer in layers if not isinstance(layer, tuple)]
