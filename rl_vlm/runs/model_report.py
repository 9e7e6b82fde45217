"""What `rl-vlm doctor MODEL` says of a model folder: its family, by which code it runs, and what works with it."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import numpy as np

from rl_vlm.engines.vllm_limits import CPU_HEADS
from rl_vlm.models.families import family_of, make_backbone
from rl_vlm.models.families.family import Family
from rl_vlm.models.images import TextSide
from rl_vlm.models.loading import load_text_side, quiet_libraries, resolve_model
from rl_vlm.models.memory.reading import read_shape
from rl_vlm.models.memory.shape import amount
from rl_vlm.models.modules import empty_model
from rl_vlm.types import EncodedImage, Message, Role

_SIDE = 1024  # pixels of the picture whose tokens are counted
_PICTURE = EncodedImage("", b"", 64, 64)  # of which only the place is needed


def report(name: str) -> dict[str, Any]:
    """The facts by name. Raises UserInputError for a folder that cannot be used."""
    quiet_libraries()
    folder = resolve_model(name)
    text = load_text_side(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    family, shape = family_of(config["model_type"]), read_shape(folder)
    backbone = make_backbone(empty_model(config), text.images, np.empty(0, dtype=np.int64))
    codec, heads = text.codec, shape.text.head_dim
    return {
        "model": str(folder),
        "family": config["model_type"],
        "parameters": amount(shape.parameters),
        "vision tower": "fast" if family.backbone != Family().backbone else "generic",
        "decoding (transformers engine)": "fast" if family.text_model else "generic",
        "samples of a prompt share a row": backbone.packs,
        "vLLM knows it": _vllm_knows(config),
        "vLLM runs it on a CPU": heads in CPU_HEADS or f"no: its heads have {heads} dimensions",
        "end of a turn": codec.token_bytes(codec.end_of_turn_id).decode(),
        f"tokens of a {_SIDE}² picture": text.images.count_tokens(_SIDE, _SIDE),
        "system messages": _renders(text, ("system", "user")),
        "several images": _renders(text, ("user",), images=2),
        "tool messages": _renders(text, ("user", "assistant", "tool")),
        "images in tool messages": _renders(text, ("user", "assistant", "tool"), images=1),
        "opens a thought": codec.opens_thought,
    }


def _vllm_knows(config: dict[str, Any]) -> bool | str:
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    from vllm import ModelRegistry

    return bool(set(config.get("architectures") or ()) & set(ModelRegistry.get_supported_archs()))


def _renders(text: TextSide, roles: tuple[Role, ...], images: int = 0) -> bool | str:
    """Whether the chat template takes messages of these roles, the last one with images; else why not."""
    *before, last = roles
    messages = [Message(role, ("words",)) for role in before]
    messages.append(Message(last, (*[_PICTURE] * images, "words")))
    try:
        if "assistant" in roles:
            text.codec.encode_continuation(messages[2:], ended=True)
        else:
            text.codec.encode_prompt(messages)
    except Exception as error:  # a template raises what it likes
        return f"no: {error}"
    return True
