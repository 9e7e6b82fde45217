"""Each image travels to a replica once: `SentImages` leaves out what it has been sent, `ImageCache` puts it back there.

A conversation shows its earlier pictures again in every turn, and rows of a data set come again in every epoch. An image without its
bytes still has its hash, by which the replica finds it. A replica that has not got it, because it is another one than the client
believes or because it has dropped it, says so, and is sent the whole request.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from rl_vlm.config import ServedModelSection
from rl_vlm.types import Completion, EncodedImage, GenerationRequest, RLVLMError

_LEAST = 4 << 20  # bytes of a cache: a client leaves images out in any case
_REPLICAS, _HASHES = 64, 4096  # that a client remembers: the replicas that it met last, and of each the images


class ImagesMissingError(RLVLMError):
    """A request leaves out bytes of images that this replica does not have: send it whole."""


class ImageCache:
    """The images that a replica has been sent, up to `limit` bytes; what was shown longest ago is dropped."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0

    @classmethod
    def of(cls, model: ServedModelSection) -> ImageCache:
        """That of a replica: a quarter of what it may keep of the images' features."""
        return cls(max(model.image_cache_bytes // 4, _LEAST))

    def whole(self, requests: Sequence[GenerationRequest]) -> list[GenerationRequest]:
        """The requests with the bytes of all their images. Raises ImagesMissingError."""
        found = self.images(image for request in requests for image in request.images)
        return [
            replace(request, images=tuple(found[image.sha256] for image in request.images))
            if any(not image.png for image in request.images)
            else request
            for request in requests
        ]

    def images(self, shown: Iterable[EncodedImage]) -> dict[str, EncodedImage]:
        """These images with their bytes, by hash; they are kept.

        Raises ImagesMissingError, and RLVLMError for an image that has not got the hash that it says.
        """
        found: dict[str, EncodedImage] = {}
        missing: set[str] = set()
        for image in shown:
            png = image.png or self._kept.get(image.sha256)
            if png is None:
                missing.add(image.sha256)
                continue
            self._keep(image.sha256, png)
            found.setdefault(image.sha256, image if image.png else replace(image, png=png))
        if lacking := missing - found.keys():  # one may come whole behind a copy without bytes
            raise ImagesMissingError(f"{len(lacking)} images were left out that this replica does not have.")
        while self._bytes > self._limit:
            self._bytes -= len(self._kept.popitem(last=False)[1])
        return found

    def _keep(self, sha256: str, png: bytes) -> None:
        # On shared replicas one policy's image must not take the place of another's: features are kept by hash, too.
        known = self._kept.get(sha256)
        if known != png:
            if known is not None or hashlib.sha256(png).hexdigest() != sha256:
                raise RLVLMError(f"Image {sha256[:12]} has other bytes than its hash says.")
            self._kept[sha256] = png
            self._bytes += len(png)
        self._kept.move_to_end(sha256)


class SentImages:
    """What a client has sent to which replica.

    A call is made to a target: a replica's id, or a home (`home_session`), which is taken for the replica that answered there last.
    """

    def __init__(self) -> None:
        self._of: OrderedDict[str, OrderedDict[str, None]] = OrderedDict()  # replica -> hashes, the latest last
        self._homes: dict[str, str] = {}
        self.left_out = self.sent = 0  # bytes

    def lean(self, images: Iterable[EncodedImage], target: str) -> tuple[EncodedImage, ...]:
        """The images, without the bytes of those that the replica at `target` has been sent."""
        known = self._of.get(self._homes.get(target, target), OrderedDict())
        return tuple(replace(image, png=b"") if image.sha256 in known else image for image in images)

    def lean_requests(self, requests: Sequence[GenerationRequest], target: str) -> list[GenerationRequest]:
        """The same of requests' images, in a new list."""
        return [
            replace(request, images=self.lean(request.images, target)) if request.images else request
            for request in requests
        ]

    def answered(self, requests: Sequence[GenerationRequest], completions: Sequence[Completion], target: str) -> None:
        """These requests were answered: the replica that did it has their images."""
        if completions:
            self.arrived((image for request in requests for image in request.images), completions[0].replica_id, target)

    def arrived(self, images: Iterable[EncodedImage], replica: str, target: str) -> None:
        """The replica has these images."""
        if target and target != replica:
            self._homes[target] = replica
        known = self._of.setdefault(replica, OrderedDict())
        self._of.move_to_end(replica)
        for image in images:
            if image.sha256 in known:
                self.left_out += len(image.png)
            else:
                self.sent += len(image.png)
            known[image.sha256] = None
            known.move_to_end(image.sha256)
        while len(known) > _HASHES:
            known.popitem(last=False)
        while len(self._of) > _REPLICAS:
            self._of.popitem(last=False)

    def forget(self, target: str) -> None:
        """The replica at `target` lacks what it was taken to have."""
        self._of.pop(self._homes.pop(target, target), None)
