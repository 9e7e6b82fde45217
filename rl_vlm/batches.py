"""Items in batches of a bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def in_batches(items: Iterable[T], fits: Callable[[list[T], T], bool]) -> Iterator[list[T]]:
    """The items, in order, in batches that each take the next item while it `fits`; one item always does."""
    batch: list[T] = []
    for item in items:
        if batch and not fits(batch, item):
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch
