"""The families of vision-language models. A file here says what is special of one; the table below lists them."""

from __future__ import annotations

import pkgutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rl_vlm.models.families.family import Family
from rl_vlm.models.families.llava_onevision import LLAVA_ONEVISION
from rl_vlm.models.families.processor import ProcessorImages
from rl_vlm.models.families.qwen_vl import QWEN, WRITTEN_OUT, ImageProcessorSpec
from rl_vlm.models.images import ImageLayout

if TYPE_CHECKING:
    from rl_vlm.models.families.generic import Backbone

FAMILIES = {kind: family for family in (WRITTEN_OUT, QWEN, LLAVA_ONEVISION) for kind in family.types}


def family_of(model_type: str) -> Family:
    """The family of a `model_type`; one without special facts where the table has none."""
    return FAMILIES.get(model_type, Family())


def layout_of(processor: Any) -> ImageLayout:
    """The images of a Hugging Face processor."""
    if "Qwen" in type(processor).__name__:
        return replace(ImageProcessorSpec.from_processor(processor), image_token_id=processor.image_token_id)
    return ProcessorImages(processor, {"image_token_id": processor.image_token_id})


def make_backbone(model: Any, *arguments: Any, **options: Any) -> Backbone:
    """The backbone of a model; arguments as of `Backbone`."""
    kind = pkgutil.resolve_name(family_of(model.config.model_type).backbone)
    return kind(model, *arguments, **options)  # type: ignore[no-any-return]
