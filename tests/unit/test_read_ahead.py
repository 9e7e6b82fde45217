"""Images are decoded while the model computes: the same numbers, one announcement in memory, errors where they belong."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_support import picture, pictures
from policy_loop import Loop

from rl_vlm.learning.plan import UpdateStats
from rl_vlm.models import images
from rl_vlm.models.images import ImageError, ImageProcessorSpec, ReadAhead, frame_patches
from rl_vlm.types import EncodedImage

SPEC = ImageProcessorSpec(min_pixels=1024)


class Decoder:
    """Notes which thread cuts which image, and may be held up."""

    def __init__(self) -> None:
        self.threads: dict[str, list[str]] = {}
        self.free = threading.Event()
        self.free.set()

    def __call__(self, spec: ImageProcessorSpec, image: EncodedImage) -> Any:
        self.threads.setdefault(image.sha256, []).append(threading.current_thread().name)
        if threading.current_thread() is not threading.main_thread():
            assert self.free.wait(30)
        return frame_patches(spec, image)


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> Decoder:
    decoder = Decoder()
    monkeypatch.setattr(images, "frame_patches", decoder)
    return decoder


def test_announced_images_are_cut_once_and_by_the_thread(decoder: Decoder) -> None:
    images = pictures(np.random.default_rng(0), 3)
    reader = ReadAhead(SPEC)
    reader.announce([*images[:2], images[0]])
    futures = list(reader._announced.values())
    for future in futures:
        future.result(timeout=30)
    for image, (patches, grid) in zip(images, reader.read(images), strict=True):
        expected, expected_grid = frame_patches(SPEC, image)
        assert np.array_equal(patches, expected) and grid == expected_grid
    assert [[name.partition("_")[0] for name in decoder.threads[image.sha256]] for image in images] == [
        ["read-ahead"],
        ["read-ahead"],
        ["MainThread"],
    ]
    assert not reader._announced


def test_an_image_that_cannot_be_decoded_is_an_error_where_it_is_read() -> None:
    good = picture(np.random.default_rng(3))
    broken = replace(good, sha256="0" * 64, png=good.png[:-40])
    reader = ReadAhead(SPEC)
    reader.announce([broken, good])
    reader.read([good])
    with pytest.raises(ImageError):
        reader.read([broken])


@pytest.mark.parametrize("tower", [False, True])
def test_an_update_reads_the_next_micro_batchs_images_and_learns_the_same(
    tiny_folder: Path, decoder: Decoder, monkeypatch: pytest.MonkeyPatch, tower: bool
) -> None:
    """With a cache that holds nothing, as features of large models are: every pass decodes."""
    options = {"model__lora__target_modules": "vision"} if tower else {}
    loop = Loop(tiny_folder, 1.0, **options)
    monkeypatch.setattr(loop.policy.backbone, "_cache_bytes", 0)
    groups = loop.sample(6)

    def gradients() -> list[np.ndarray]:
        decoder.threads.clear()
        packed = loop.updater.pack(loop.batch(groups))
        assert sum(map(len, packed)) > 2
        loop.policy.model.zero_grad()
        for micro in (micro for step in packed for micro in step):
            loop.updater.loss(micro, UpdateStats()).backward()
        return [parameter.grad.numpy().copy() for parameter in loop.policy.parameters if parameter.grad is not None]

    def threads() -> set[str]:
        return {name for names in decoder.threads.values() for name in names}

    with monkeypatch.context() as patch:
        patch.setattr(loop.policy.backbone, "announce_images", lambda images: None)
        alone = gradients()
    assert threads() == {"MainThread"}
    for one, two in zip(alone, gradients(), strict=True):
        assert np.array_equal(one, two)
    assert "read-ahead_0" in threads()
    loop.close()
