"""The data cursor: every item once per epoch, in an order that a resumed run goes on with."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_vlm.rollout.tasks import DataCursor
from rl_vlm.types import UserInputError


def test_every_epoch_holds_every_item_once_in_another_order() -> None:
    cursor = DataCursor(20, seed=3)
    epochs = [cursor.take(20) for _ in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0] != DataCursor(20, seed=4).take(20)


@settings(max_examples=60, deadline=None)
@given(
    items=st.one_of(st.none(), st.integers(1, 12)),
    before=st.lists(st.integers(0, 9), max_size=5),
    after=st.lists(st.integers(0, 9), max_size=5),
)
def test_a_restored_cursor_goes_on_where_it_stopped(items: int | None, before: list[int], after: list[int]) -> None:
    whole, cursor, fresh = DataCursor(items, 7), DataCursor(items, 7), DataCursor(items, 7)
    for count in before:
        cursor.take(count)
    fresh.restore(json.loads(json.dumps(cursor.state())))
    found = [item for count in after for item in fresh.take(count)]
    assert [*whole.take(sum(before)), *found] == DataCursor(items, 7).take(sum(before) + sum(after))


@pytest.mark.timeout(200)
@pytest.mark.parametrize("items", [0, -1])
def test_an_empty_split_is_an_error_and_not_an_endless_search(items: int) -> None:
    with pytest.raises(UserInputError, match="empty"):
        DataCursor(items, 0).take(1)


def test_resuming_with_fewer_data_is_an_error() -> None:
    cursor = DataCursor(10, 0)
    cursor.take(8)
    with pytest.raises(UserInputError, match="5 items"):
        DataCursor(5, 0).restore(cursor.state())
