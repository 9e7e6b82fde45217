"""FullPayload: all weights of a model as one version, which `model.train: full` publishes and keeps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rl_vlm.models.payload import WeightPayload
from rl_vlm.models.tensor_bytes import tree_digest
from rl_vlm.types import POLICY, UserInputError

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class FullPayload(WeightPayload):
    """All parameters of a model by transformers' names, tied ones once; `config_json` names the model that they began as."""

    KIND: ClassVar[str] = "Weight"
    FOLDER: ClassVar[str] = "weights"
    TENSORS: ClassVar[str] = "model.safetensors"
    CONFIG: ClassVar[str] = "full_weights.json"

    @classmethod
    def build(cls, version: int, state: Mapping[str, Tensor], base: str, dtype: str | None = None) -> FullPayload:
        """Pack parameters, rounded where `dtype` is given; `base` is the model that training began with."""
        about = json.dumps({"format": "rl_vlm full weights", "base_model": base}, indent=1)
        return cls.packed(version, state, about, dtype)

    @classmethod
    def digest(cls, content: bytes | memoryview) -> str:
        """See WeightPayload; of gigabytes, by several threads."""
        return tree_digest(content)

    def state(self) -> dict[str, Tensor]:
        """The tensors by name, not to be written to: gigabytes are not copied. Raises UserInputError for damaged bytes."""
        return self.views()

    @classmethod
    def read(cls, folder: Path, version: int, policy: str = POLICY) -> FullPayload:
        """Read what `write` wrote. Raises UserInputError."""
        try:
            tensors, config_json = (folder / cls.TENSORS).read_bytes(), (folder / cls.CONFIG).read_text()
        except OSError as error:
            raise UserInputError(f"{folder} holds no full weights of a run ({error}).") from error
        size = int.from_bytes(tensors[:8], "little")
        try:
            names = [] if size > len(tensors) - 8 else [*json.loads(tensors[8 : 8 + size])]
        except (ValueError, TypeError, RecursionError) as error:
            raise UserInputError(f"The weights {folder} cannot be read ({error}).") from error
        if not names:
            raise UserInputError(f"The weights {folder} hold no tensors: {cls.TENSORS} is empty or damaged.")
        return cls(version, tensors, config_json, cls.digest(tensors), policy)


def check_fits(state: Mapping[str, Tensor], own: Mapping[str, Tensor], version: int) -> None:
    """Raise UserInputError unless `state` holds a finite tensor of the same shape for each parameter of `own`, and no other."""
    import torch

    if state.keys() != own.keys():
        example = sorted(state.keys() ^ own.keys())[0]
        raise UserInputError(f"Weight version {version} does not fit the model: tensors differ, for example {example}.")
    for name, tensor in state.items():
        if tensor.shape != own[name].shape:
            raise UserInputError(
                f"Weight version {version} does not fit the model: {name} is {tuple(tensor.shape)}, expected "
                f"{tuple(own[name].shape)}."
            )
        if not torch.isfinite(tensor.sum(dtype=torch.float32)):  # finite where all values are, and one pass
            raise UserInputError(f"Weight version {version} has values that are not finite, in {name}.")


def put_weights(model: nn.Module, payload: WeightPayload) -> None:
    """Copy a version into a model, rounded to its precision. Raises UserInputError for one that does not fit."""
    own, state = dict(model.named_parameters()), payload.state()
    check_fits(state, own, payload.version)
    for name, parameter in own.items():
        parameter.data.copy_(state[name])
