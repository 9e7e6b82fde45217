"""Images travel to a replica once: what a client leaves out, what a replica finds again, and what happens where it does not."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from core_support import picture
from test_client import Handle, answer, client_of, run, task_error

from rl_vlm.serving.replica import ImageCache, ImagesMissingError, SentImages
from rl_vlm.types import Completion, EncodedImage, GenerationRequest, RLVLMError, SamplingParams

PICTURES = [picture(np.random.default_rng(k), 32, 32) for k in range(12)]


def shown(*numbers: int, replica: str = "") -> GenerationRequest:
    images = tuple(PICTURES[k] for k in numbers)
    return GenerationRequest("r", np.zeros(1, np.int32), SamplingParams(1), images, preferred_replica=replica)


def lean(*numbers: int) -> GenerationRequest:
    return replace(shown(*numbers), images=tuple(replace(PICTURES[k], png=b"") for k in numbers))


class Replica(Handle):
    """Answers as a replica with a shelf, of the id that a test gives it; counts the bytes of images that reach it."""

    def __init__(self, name: str = "a", limit: int = 1 << 20) -> None:
        super().__init__()
        self.start(name, limit)
        self.received = 0

    def start(self, name: str, limit: int = 1 << 20) -> None:
        self.name, self.shelf = name, ImageCache(limit)

    def remote(self, requests: list[Any]) -> Any:
        hint = bool(requests) and isinstance(requests[0], EncodedImage)
        images = requests if hint else [image for request in requests for image in request.images]
        self.received += sum(len(image.png) for image in images)
        try:
            if hint:
                self.shelf.images(images)
                self.script.append(self.name)
            else:
                whole = self.shelf.whole(requests)
                assert all(image == PICTURES[PICTURES.index(image)] for one in whole for image in one.images)
                self.script.append([answer(asked, self.name) for asked in requests])
        except ImagesMissingError as error:
            self.script.append(task_error(error))
        return super().remote(requests)


def size(*numbers: int) -> int:
    return sum(len(PICTURES[k].png) for k in numbers)


def test_a_conversations_pictures_are_sent_once() -> None:
    replica = Replica()
    client = client_of(replica)  # type: ignore[arg-type]
    for turn in range(1, 9):
        (completion,) = run(client, shown(*range(turn), replica="" if turn == 1 else "a"))
        assert isinstance(completion, Completion)
    assert replica.received == size(*range(8)) == client.images.sent
    assert client.images.left_out == sum(size(*range(turn)) for turn in range(1, 8))
    assert client.retries == 0


def test_a_replica_that_has_them_not_is_sent_the_whole_request_at_once() -> None:
    replica = Replica()
    client = client_of(replica)  # type: ignore[arg-type]
    run(client, shown(0, replica="a"))
    replica.start("a")  # again, without what it had
    (completion,) = run(client, shown(0, 1, replica="a"))
    assert isinstance(completion, Completion)
    assert client.retries == 0
    assert replica.received == size(0) + size(1) + size(0, 1)
    run(client, shown(0, 1, replica="a"))
    assert replica.received == size(0) + size(1) + size(0, 1)


def test_a_home_that_another_replica_took_over_gets_all() -> None:
    replica = Replica("a")
    client = client_of(replica, homes=[0])  # type: ignore[arg-type]
    run(client, shown(0))
    replica.start("b")
    for _ in range(2):
        (completion,) = run(client, shown(0))
        assert completion.replica_id == "b"
    assert replica.received == 2 * size(0)


def test_more_images_than_fit_are_dropped_longest_unused_first() -> None:
    shelf = ImageCache(limit=size(0, 1, 2) + 10)
    shelf.whole([shown(0), shown(1), shown(2)])
    shelf.whole([lean(0)])
    shelf.whole([shown(3)])
    with pytest.raises(ImagesMissingError):
        shelf.whole([lean(0, 1)])
    assert shelf.whole([lean(0, 2)]) == [shown(0, 2)]


def test_bytes_of_another_image_do_not_take_an_images_place() -> None:
    shelf, forged = ImageCache(1 << 20), replace(PICTURES[1], sha256=PICTURES[0].sha256)
    with pytest.raises(RLVLMError, match="other bytes"):
        shelf.images([forged])
    with pytest.raises(ImagesMissingError):
        shelf.whole([lean(0)])
    shelf.images([PICTURES[0]])  # nor the place of one that is there, or comes with it
    for shown in ([forged], [PICTURES[0], forged]):
        with pytest.raises(RLVLMError, match="other bytes"):
            shelf.images(shown)
    assert shelf.images([replace(PICTURES[0], png=b"")])[PICTURES[0].sha256].png == PICTURES[0].png


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_sent_in_whatever_order_the_replica_shows_the_right_images(seed: int) -> None:
    """Small shelves that forget, clients that err: an answer, and never another image."""
    rng, client = random.Random(seed), SentImages()
    shelves = {name: ImageCache(limit=size(0) * 4) for name in "abc"}

    def ask(name: str, asked: Sequence[GenerationRequest], target: str) -> None:
        try:
            found = shelves[name].whole(client.lean_requests(asked, target))
        except ImagesMissingError:
            client.forget(target)
            found = shelves[name].whole(asked)
        assert found == list(asked)
        client.answered(asked, [answer(one, name) for one in asked], target)

    for _ in range(400):
        name = rng.choice("abc")
        target = rng.choice([name, name, "#0", "#1", rng.choice("abc")])
        ask(name, [shown(*rng.choices(range(12), k=rng.randint(0, 4))) for _ in range(rng.randint(1, 3))], target)
    assert client.left_out > 0


def test_a_retry_is_whole() -> None:
    handle = Handle(None, ConnectionError("not asked again"))
    client = client_of(handle)
    run(client, shown(0, replica="replica-1"))
    handle.script.clear()
    from ray.exceptions import ActorUnavailableError

    handle.script += [ActorUnavailableError("gone", None)]
    run(client, shown(0, replica="replica-1"))
    assert [batch[0].images[0].png == b"" for _, batch in handle.calls] == [False, True, False]
