"""The base of environments that ask one question about one item, drawn from (split, index) or read from a data set's rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from rl_vlm.envs.base import Info, MadeItemsEnv
from rl_vlm.envs.tables import DataSource, RowTable, TableSet
from rl_vlm.types import Split, UserInputError

MIN_IMAGE_SIZE, MAX_IMAGE_SIZE = 64, 1024  # smaller drawings could join neighbours

Item = TypeVar("Item")


class OneShotEnv(MadeItemsEnv, Generic[Item]):
    """One item an episode, and one answer at its end.

    Args:
        name: its registry id, for error messages.
        table, data: how rows become items, and where they are; without data, items are drawn.
        draw: the item of a split with this index.
        num_train, num_test: how many are drawn.
    """

    def __init__(
        self,
        name: str,
        table: type[RowTable[Item]],
        data: DataSource | None,
        draw: Callable[[Split, int], Item],
        num_train: int,
        num_test: int,
    ) -> None:
        check_integers(name, num_train=(num_train, 1, None), num_test=(num_test, 1, None))
        super().__init__(name, num_train, num_test)
        self._rows = TableSet(table, data) if data else None
        self._draw = draw
        self._item: Item | None = None

    def num_items(self, split: Split) -> int:
        """How many items the split holds."""
        return super().num_items(split) if self._rows is None else len(self._rows.split(split))

    def validate(self, split: Split, limit: int | None = None) -> int:
        """Check the rows of a data set before training starts (see `RowTable.validate`); return how many."""
        return 0 if self._rows is None else self._rows.split(split).validate(limit)

    def open_item(self, options: dict[str, Any] | None) -> tuple[Item, Info]:
        """The item that `reset` was asked for, which `close_item` will grade. Raises BadRowError if the row cannot be used."""
        self._item = None
        split, index = self.chosen_item(options)
        self._item = item = self._draw(split, index) if self._rows is None else self._rows.item(split, index)
        return item, {"index": index, "split": split}

    def current_item(self) -> Item:
        """The item of the episode. Raises UserInputError without one."""
        if self._item is None:
            raise UserInputError(f"{self._name}: call reset() before step(), and again after an episode has ended.")
        return self._item

    def close_item(self) -> Item:
        """The item that is answered now, which ends its episode. Raises UserInputError without one."""
        item, self._item = self.current_item(), None
        return item


def check_integers(name: str, **bounds: tuple[object, int | None, int | None]) -> None:
    """Each is (value, least, most), None for no bound. Raises UserInputError for what is no integer or lies outside."""
    for argument, (value, least, most) in bounds.items():
        integer = isinstance(value, int) and not isinstance(value, bool)
        if integer and (least is None or value >= least) and (most is None or value <= most):  # type: ignore[operator]
            continue
        wanted = "an integer"
        if least is not None:
            wanted += f" of at least {least}" if most is None else f" from {least} to {most}"
        raise UserInputError(f"{name}: env.kwargs.{argument} must be {wanted}, not {value!r}.")


def question_of(name: str, prompts: dict[str, str], prompt: str) -> str:
    """The text of a prompt. Raises UserInputError for one that is unknown."""
    if prompt not in prompts:
        raise UserInputError(f"{name}: env.kwargs.prompt {prompt!r} is unknown; choose one of {', '.join(prompts)}.")
    return prompts[prompt]
