"""ReadAhead: images are decoded and cut into patches by a thread while the model computes with those before them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from rl_vlm.models.images import Grid, ImageProcessorSpec, frame_patches
from rl_vlm.types import EncodedImage

Patches = tuple[np.ndarray, Grid]  # see frame_patches


class ReadAhead:
    """Cuts images into patches, the announced ones ahead of time.

    At most the images of one announcement wait in memory. Not thread-safe: one thread announces and reads.
    """

    def __init__(self, spec: ImageProcessorSpec) -> None:
        self._spec = spec
        self._thread: ThreadPoolExecutor | None = None
        self._announced: dict[str, Future[Patches]] = {}

    def announce(self, images: Iterable[EncodedImage]) -> None:
        """These are read next. What was announced before and has not been read is forgotten."""
        wanted = {image.sha256: image for image in images}
        for key in self._announced.keys() - wanted.keys():
            self._announced.pop(key).cancel()
        for key, image in wanted.items():
            if key not in self._announced:
                if self._thread is None:
                    self._thread = ThreadPoolExecutor(1, "read-ahead")
                self._announced[key] = self._thread.submit(frame_patches, self._spec, image)

    def read(self, images: Sequence[EncodedImage]) -> list[Patches]:
        """The patches of each image. Raises ImageError for one that cannot be decoded."""
        return [self._read(image) for image in images]

    def _read(self, image: EncodedImage) -> Patches:
        announced = self._announced.pop(image.sha256, None)
        if announced is None or announced.cancel():  # the thread has not come to it
            return frame_patches(self._spec, image)
        return announced.result()
