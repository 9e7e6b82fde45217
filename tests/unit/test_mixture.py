"""Mixtures: exact shares, draws by solve rate with the statistics that their weights promise, figures per environment."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from task_support import solved_group

from rl_vlm.config import parse_config
from rl_vlm.evaluation.heldout import evaluation_tasks, viewed_tasks
from rl_vlm.evaluation.outcomes import outcomes_of_groups
from rl_vlm.evaluation.results import summarize
from rl_vlm.rollout.metrics import sampling_metrics
from rl_vlm.rollout.mixture import DataCursor, Mixture, SolveRateItems, SolveRates
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.types import UserInputError


def mixture(weights: dict[str, float], by_rate: bool = False, size: int | None = 100) -> Mixture:
    return Mixture(weights, dict.fromkeys(weights, size), 5, by_rate)


def names(source: Mixture, count: int) -> list[str]:
    return [item.env for item in source.take(count)]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 200))
def test_every_environment_has_its_share_to_within_one_task(weights: list[int], count: int) -> None:
    given = {f"e{place}": float(weight) for place, weight in enumerate(weights)}
    found = Counter(names(mixture(given), count))
    assert sum(found.values()) == count
    assert all(abs(found[name] - count * weight / sum(weights)) <= 1 + 1e-9 for name, weight in given.items())


def test_environments_come_in_turn_and_not_in_blocks() -> None:
    assert "".join(names(mixture({"a": 2.0, "b": 1.0}), 9)) == "abaabaaba"
    assert set(names(mixture({"a": 1.0, "b": 0.0}), 50)) == {"a"}


def test_each_environment_has_an_order_and_seeds_of_its_own() -> None:
    items = mixture({"a": 1.0, "b": 1.0}).take(200)
    by_name = {name: [item for item in items if item.env == name] for name in "ab"}
    assert all(sorted(item.index for item in found) == list(range(100)) for found in by_name.values())
    assert [item.index for item in by_name["a"]] != [item.index for item in by_name["b"]]
    assert len({item.seed for item in items}) == 200


def test_a_change_of_weights_counts_from_now_on() -> None:
    source = mixture({"a": 1.0, "b": 1.0})
    source.take(10)
    source.weights = {"a": 1.0, "b": 3.0}
    assert Counter(names(source, 40)) == {"a": 10, "b": 30}


# --- solve rates


def test_rates_and_weights_are_those_computed_by_hand() -> None:
    rates = SolveRates()
    assert (rates.rate("a"), rates.weight("a")) == (0.5, 1.0)
    rates.observe("a", 8, 8)  # (8 + 1) / (8 + 2)
    assert rates.rate("a") == pytest.approx(0.9)
    assert rates.weight("a") == pytest.approx(0.1 + 0.9 * 4 * 0.9 * 0.1)
    rates.observe("a", 64, 0)  # the first eight count half: (4 + 1) / (68 + 2)
    assert rates.rate("a") == pytest.approx(5 / 70)
    rates.forget()
    assert rates.rate("a") == 0.5


def test_items_are_drawn_in_proportion_to_their_weights() -> None:
    items = SolveRateItems(20, 3)
    shares = [0.0, 0.125, 0.25, 0.5, 0.75, 1.0]
    for index, share in enumerate(shares):
        items.rates.observe(str(index), 64, round(64 * share))
    weights = np.array([items.rates.weight(str(index)) for index in range(20)])
    counts = np.bincount(items.take(40_000), minlength=20)
    expected = 40_000 * weights / weights.sum()
    # Chi-squared with 19 degrees of freedom: beyond 43.8 once in a thousand.
    assert ((counts - expected) ** 2 / expected).sum() < 43.8
    assert counts[3] > 3 * counts[0] > 0 and counts[3] > 3 * counts[5] > 0


def test_resuming_with_fewer_data_is_an_error_where_items_are_drawn_by_their_rates_too() -> None:
    items = SolveRateItems(10, 0)
    items.rates.observe("7", 8, 4)
    SolveRateItems(8, 0).restore(items.state())
    with pytest.raises(UserInputError, match="item 7"):
        SolveRateItems(5, 0).restore(items.state())


def test_items_that_cannot_be_played_are_drawn_as_rarely_as_unsolved_ones() -> None:
    """They have no solve rate, and would keep the weight of an item that was never tried."""
    source = mixture({"": 1.0}, by_rate=True, size=10)
    bad = [RolloutTask("g", index, "train", 0, 0, 64, 1.0, 0) for index in (0, 1)]
    for _ in range(8):
        source.observe([solved_group([1] * 64, "", index=index) for index in range(2, 10)])
        source.lose(bad)
    share = sum(item.index < 2 for item in source.take(2000)) / 2000
    assert share < 0.25  # as of two in ten; it was 2 / (2 + 8 · 0.13), two thirds


def test_environments_near_one_half_come_first_and_none_starves() -> None:
    source = mixture({"easy": 1.0, "half": 1.0, "hopeless": 1.0}, by_rate=True, size=None)
    for _ in range(30):
        source.observe(
            [solved_group([1] * 8, "easy"), solved_group([1, 0] * 4, "half"), solved_group([0] * 8, "hopeless")]
        )
    found = Counter(names(source, 1200))
    assert found["half"] > 0.7 * 1200 and min(found["easy"], found["hopeless"]) > 0.08 * 1200
    figures = source.metrics()
    assert figures["mixture/solve_rate/half"] == pytest.approx(0.5)
    assert figures["mixture/taken/half"] == found["half"]
    assert sum(figures[f"mixture/share/{name}"] for name in found) == pytest.approx(1.0)


# --- figures


def test_training_figures_are_also_given_per_environment() -> None:
    groups = [solved_group([1, 0], "a"), solved_group([1, 1], "b", 1), solved_group([0.5, 0], "b", 2)]
    figures = sampling_metrics(groups, version=1, seconds=1.0, max_turns=1)
    assert (figures["reward/a"], figures["accuracy/a"]) == (0.5, 0.5)
    assert (figures["reward/b"], figures["accuracy/b"]) == (0.625, 0.5)
    assert not any(name.endswith("/") for name in sampling_metrics([solved_group([1])], 1, 1.0, 1))


def test_an_evaluation_has_results_of_the_whole_and_of_each_environment() -> None:
    config: dict[str, Any] = {
        "env": {"mixture": [{"name": "a", "id": "Shapes-v0"}, {"name": "b", "id": "Shapes-v0"}]},
        "evaluation": {"num_items": 4, "variants": {"default": {}, "two": {"b": {"turns": 2}}}},
    }
    run = parse_config(config)
    tasks = evaluation_tasks(run, {"a": 2, "b": None}, min_version=0)
    assert len(tasks) == len({task.group_id for task in tasks}) == 2 * (2 + 4)
    groups = []
    for task in tasks:
        group = solved_group(
            [float(task.env == "a" or (task.variant == "two" and task.index < 1))], task.env, task.index
        )
        group.group_id = task.group_id
        groups.append(group)
    results = summarize(run, tasks, outcomes_of_groups(run, tasks, groups))
    assert (results["accuracy/default"], results["items/default"]) == (pytest.approx(2 / 6), 6)
    assert (results["accuracy/a"], results["accuracy/b"], results["accuracy/b/two"]) == (1.0, 0.0, 0.25)
    assert (results["items/a"], results["items/b"], results["accuracy/two"]) == (2, 4, 0.5)


def test_swapped_images_are_those_of_another_item_of_the_same_environment() -> None:
    run = parse_config({"env": {"mixture": [{"name": "a", "id": "Shapes-v0"}, {"name": "b", "id": "Shapes-v0"}]}})
    tasks = evaluation_tasks(run, {"a": 2, "b": 4}, min_version=0)
    assert {task.env for task in tasks[:2]} == {"a", "b"}  # the first few are of all environments
    swapped = [(task.env, task.index, task.other_index) for task in viewed_tasks(tasks, "swapped")]
    assert sorted(swapped) == [("a", 0, 1), ("a", 1, 0), ("b", 0, 1), ("b", 1, 2), ("b", 2, 3), ("b", 3, 0)]


# --- The data cursor: every item once per epoch, in an order that a resumed run goes on with


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
