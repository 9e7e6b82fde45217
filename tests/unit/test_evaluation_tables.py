"""Tables, comparison, page and figure of an evaluation, and its items file: hand values and SciPy."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_support import adapted_policy, text_side
from pydantic import TypeAdapter
from scipy import stats
from task_support import trajectory

from rl_vlm.config import parse_config
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.evaluation.heldout import evaluation_tasks, item_prompts, viewed_tasks
from rl_vlm.evaluation.outcome_log import OutcomeLog
from rl_vlm.evaluation.outcomes import Outcome, Side, answers_of, kept_info, new_outcome, outcomes_of_groups
from rl_vlm.evaluation.plain_generate import PlainGenerate
from rl_vlm.evaluation.results import by_category, compared, info_numbers, summarize
from rl_vlm.files import to_jsonable
from rl_vlm.models.weights import AdapterPayload
from rl_vlm.plots.evaluation import draw_evaluation, evaluation_page
from rl_vlm.rollout.episodes import Conversation
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.statistics import are_equal, bootstrap_interval, mcnemar_p_value, pass_at_k, wilson_interval
from rl_vlm.types import (
    GenerationRequest,
    Message,
    SamplingParams,
    Trajectory,
    TrajectoryGroup,
    UserInputError,
)
from rl_vlm.zoo.shapes.environment import ShapesEnv


def outcome(index: int, correct: bool, side: Side = "policy", **more: Any) -> Outcome:
    values = {
        "sample": 0, "env": "E-v0", "split": "test", "variant": "default", "kind": "greedy", "view": "true",
        "reward": float(correct), "turns": 1, "tokens": 7, "status": "completed", "info": {},
    }  # fmt: skip
    return Outcome(side=side, id=f"test/default/greedy/{index:06d}", index=index, correct=correct, **{**values, **more})


def task(index: int, size: int = 1) -> RolloutTask:
    name = f"test/default/greedy/{index:06d}"
    seeds = {"seed": 0, "sampling_seed": 0, "min_version": 0}
    return RolloutTask(name, index, "test", size=size, temperature=0.0, variant="default", **seeds)


def test_the_exact_test_of_discordant_pairs_is_a_coins() -> None:
    assert mcnemar_p_value(8, 2) == pytest.approx(2 * (1 + 10 + 45) / 2**10)
    assert mcnemar_p_value(0, 0) == 1.0 and mcnemar_p_value(3, 3) == pytest.approx(1.0)


def test_the_bootstrap_of_differences_is_scipys_of_pairs() -> None:
    rng = np.random.default_rng(3)
    first, second = rng.normal(0.2, 1, 60), rng.normal(0, 1, 60)
    paired = stats.bootstrap(
        (first, second), lambda x, y, axis: x.mean(axis) - y.mean(axis), paired=True, method="percentile",
        rng=np.random.default_rng(0), batch=256,
    )  # fmt: skip
    assert bootstrap_interval(first - second) == pytest.approx(tuple(paired.confidence_interval))
    assert bootstrap_interval(np.ones(5)) == (1.0, 1.0)
    assert bootstrap_interval(np.ones(1)) == (-np.inf, np.inf)


def test_policies_are_compared_on_the_same_items_and_lost_ones_are_wrong() -> None:
    ours = [outcome(k, k < 6) for k in range(10)]
    theirs = [outcome(k, k in (4, 5, 8), "against", reward=0.25) for k in range(1, 10)]
    tasks = [task(k) for k in range(1, 10)]
    (pair,) = compared(tasks, [*ours, *theirs], seed=0).values()
    assert pair["items"] == 9 and (pair["only_policy"], pair["only_against"]) == (3, 1)
    assert pair["p_value"] == stats.binomtest(3, 4).pvalue
    assert pair["accuracy_difference"] == pytest.approx(5 / 9 - 3 / 9)
    assert pair["reward_difference"] == pytest.approx(5 / 9 - 0.25)
    assert (pair["accuracy_against_low"], pair["accuracy_against_high"]) == wilson_interval(3, 9)
    assert pair["reward_against_low"] == pair["reward_against_high"] == 0.25
    # The policy finishes what is easy, and the other one all but the last two.
    (pair,) = compared(tasks, [*ours[:6], *theirs[:7]], seed=0).values()
    assert (pair["items"], pair["accuracy"], pair["accuracy_against"]) == (9, 5 / 9, 2 / 9)
    assert pair["reward_against"] == pytest.approx(7 * 0.25 / 9)
    assert (pair["only_policy"], pair["only_against"]) == (3, 0)
    assert compared(tasks, ours[:6], seed=0)["default"]["accuracy_against"] == 0.0


def test_the_gain_over_blank_images_has_a_bootstrap_interval() -> None:
    run = parse_config({"env": {"id": "Shapes-v0"}, "evaluation": {"num_items": 20}, "seed": 3})
    tasks = evaluation_tasks(run, {"": 20}, min_version=0)
    tasks += viewed_tasks(tasks, "blank")
    right = {one.group_id: one.view == "true" and one.index % 4 < 3 for one in tasks}
    found = [
        new_outcome(
            one, "policy", 0, env="E-v0", correct=right[one.group_id], reward=0.0, turns=1, tokens=1, status="completed"
        )
        for one in tasks
    ]
    results = summarize(run, tasks, found)
    gained = np.array([float(index % 4 < 3) for index in range(20)])
    assert results["sight/accuracy_gap"] == 0.75
    assert (results["sight/accuracy_gap_low"], results["sight/accuracy_gap_high"]) == bootstrap_interval(gained, 3)


def test_categories_and_numbers_are_of_greedy_answers_with_true_images() -> None:
    found = [outcome(k, k == 0, info={"category": "easy" if k < 3 else "hard", "km": 10.0 * k}) for k in range(5)]
    found += [
        outcome(7, True, view="blank", info={"category": "easy", "km": 1e9}),
        outcome(8, True, kind="sampled", info={"category": "easy", "km": 1e9}),
    ]
    table = by_category([task(k) for k in range(6)], found, "category")["default"]
    figures = {name: (row["items"], row["accuracy"]) for name, row in table.items()}
    assert figures == {"easy": (3, 1 / 3), "hard": (2, 0), "lost": (1, 0)}
    assert by_category([task(0), task(1)], [outcome(0, True)], "category") == {}  # an environment without categories
    assert info_numbers(found, "category")["default"] == {"km": {"items": 5, "mean": 20.0, "p50": 20.0, "p90": 36.0}}
    assert kept_info({"km": float("nan"), "answer": "4", "category": "x", "ok": True, "n": 2}, "category") == {
        "category": "x", "ok": True, "n": 2,
    }  # fmt: skip


def test_a_page_and_a_figure_show_all_tables(tmp_path: Path) -> None:
    found = [outcome(k, k < 6, info={"category": "a|b", "km": 1.5}) for k in range(10)]
    found += [outcome(k, k < 3, "against") for k in range(10)]
    tasks = [task(k) for k in range(10)]
    part = {
        "accuracy/default": 0.6, "accuracy_low/default": 0.3, "accuracy_high/default": 0.8, "reward/default": 0.6,
        "turns/default": 1.0, "items/default": 10, "pass@2/default": 0.7, "sight/accuracy_blank": 0.25,
        "sight/accuracy_gap": 0.35, "sight/accuracy_gap_low": 0.1, "sight/accuracy_gap_high": 0.6,
        "categories": by_category(tasks, found[:10], "category"), "info": info_numbers(found[:10], "category"),
        "against": {"adapter": None, "variants": compared(tasks, found, 0)},
    }  # fmt: skip
    row = {"tokens_per_s_mean": 100.0, "tokens_per_s_std": 2.0, "first_token_s": 0.012, "steady_tokens_per_s": 110.0}
    row |= {"hf_tokens_per_s_mean": 80.0, "ratio": 1.25}
    results = to_jsonable(
        {"env": "E-v0", "model": "m", "adapter": "a", "lost": 1, "lost_because": {"it broke": 1}, "split": "test", **part,
         "throughput": {"runs": 3, "new_tokens": 64, "batches": {"1": row}}}
    )  # fmt: skip
    page = evaluation_page(results)
    for words in (
        "| default | 10 | 0.600 (0.300 … 0.800) |", "1 items were lost", "| 2 | default | 0.700 |",
        "| gain of the true over blank images | 0.350 (0.100 … 0.600) |", "| default | accuracy | 0.600 | 0.300 | 0.300 (",
        "| a\\|b | 10 | 0.600 (", "| km | 10 | 1.500 |", "| 1 | 100.0 ± 2.0 | 12.0 | 110.0 | 80.0 | 1.25 |",
        "Against the base model",
    ):  # fmt: skip
        assert words in page, page
    draw_evaluation(results, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    both = {**results, "split": ["test", "train"], "splits": {"test": part, "train": part}}
    assert "## train split" in evaluation_page(both)


# --- the items file


def test_answers_are_what_the_policy_said_without_examples_of_the_prompt() -> None:
    said = [Message.of("assistant", text) for text in ("an example", "first", "second \ud800")]
    episode = Conversation(ShapesEnv(), said, {}, num_turns=2)
    assert answers_of(episode) == ["first", "second ?"]
    assert answers_of(Conversation(ShapesEnv(), [], {}, num_turns=2)) == []


def test_outcomes_are_in_the_file_at_once_and_read_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "r.items.jsonl"
    one = outcome(3, True, info={"km": 1.5, "ok": True})
    with OutcomeLog(path, {"seed": 0}) as log:
        log.add([one])
        head, line = path.read_text().splitlines()
        assert TypeAdapter(Outcome).validate_json(line) == one and json.loads(head) == {"seed": 0}
        with pytest.raises(UserInputError, match="Another evaluation"):
            OutcomeLog(path, {"seed": 0}, resume=True)
    with OutcomeLog(path, {"seed": 0}, resume=True) as log:
        assert log.outcomes == [one] and [t.index for t in log.missing([task(2), task(3)], "policy")] == [2]
        assert [t.index for t in log.missing([task(3)], "against")] == [3]


def test_outcomes_are_replaced_only_when_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "r.items.jsonl"
    with OutcomeLog(path, {"seed": 0}) as log:
        log.add([outcome(3, True)])
    before = path.read_bytes()
    with pytest.raises(UserInputError, match="--resume"):
        OutcomeLog(path, {"seed": 0})
    assert path.read_bytes() == before
    with OutcomeLog(path, {"seed": 0}, overwrite=True) as log:
        assert not log.outcomes


def test_an_item_without_all_its_samples_is_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "r.items.jsonl"
    with OutcomeLog(path, {}) as log:
        log.add([outcome(0, True, sample=0), outcome(0, True, sample=1)])
        log.add([outcome(1, True, sample=0)])
    with OutcomeLog(path, {}, resume=True) as log:
        assert [t.index for t in log.missing([task(0, size=2), task(1, size=2)], "policy")] == [1]
        assert len(log.outcomes) == 2
        log.add([outcome(1, False, sample=0), outcome(1, False, sample=1)])
        assert [one.correct for one in log.outcomes] == [True, True, False, False]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("not ours\n", "is no items file"),
        ("[1]\n", "is no items file"),
        ('{"a": 2}\n', "measured with a 2, and this evaluation has 1"),
        ('{"a": 1}\n{"id": 3}\n', "is no items file"),
    ],
)  # fmt: skip
def test_a_file_that_does_not_fit_is_one_sentence(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "r.items.jsonl"
    path.write_text(content)
    with pytest.raises(UserInputError, match=words):
        OutcomeLog(path, {"a": 1}, resume=True)
    assert path.read_text() == content


# --- Statistics of evaluation: intervals as SciPy's, pass@k as counted out, and lost episodes count as wrong


@pytest.mark.parametrize(
    ("values", "equal"),
    [
        ([], True),
        ([5.0], True),
        ([0.1 + 0.2, 0.3], True),
        ([0.1 + 0.2 - 0.3, 0.0], True),
        ([1e9 * (0.1 + 0.2), 3e8], True),
        ([sum([0.1] * 300), 30.0], True),
        ([0.3, 0.3 + 1e-9], False),
        ([-1e-6, 0.0, 1e-6], False),
        ([-0.3, 0.3], False),
    ],
)
def test_numbers_are_equal_but_for_rounding(values: list[float], equal: bool) -> None:
    assert are_equal(np.array(values)) is equal


@pytest.mark.parametrize("samples", [1, 4, 7])
def test_pass_at_k_equals_counting_all_subsets(samples: int) -> None:
    correct = np.arange(samples + 1)
    for k in range(1, samples + 1):
        shares = []
        for right in correct:
            subsets = list(itertools.combinations([True] * right + [False] * (samples - right), k))
            shares.append(sum(any(subset) for subset in subsets) / len(subsets))
        assert pass_at_k(correct, samples, k) == pytest.approx(np.mean(shares))


# --- held-out evaluation


def episode(reward: float, **info: Any) -> Trajectory:
    return trajectory("t", [(1, reward)], info=info)


def group(task: RolloutTask, episodes: list[Trajectory]) -> TrajectoryGroup:
    return TrajectoryGroup(task.group_id, task.index, episodes)


def test_the_environments_word_counts_before_the_reward() -> None:
    assert episode(0.0, correct=True).correct
    assert not episode(1.0, correct=False).correct
    assert episode(1.0).correct
    assert not episode(0.9).correct


def test_tasks_are_greedy_and_also_sampled_when_asked_for() -> None:
    run = parse_config(
        {
            "evaluation": {"num_items": 5, "samples": 4, "variants": {"a": {}, "b": {"turns": 2}}},
            "rollout": {"temperature": 0.7},
        }
    )
    tasks = evaluation_tasks(run, {"": 3}, min_version=9)
    assert len(tasks) == 2 * 2 * 3
    assert len({task.group_id for task in tasks}) == len(tasks)
    assert {(task.size, task.temperature) for task in tasks} == {(1, 0.0), (4, 0.7)}
    assert {task.split for task in tasks} == {"test"}
    assert {task.min_version for task in tasks} == {9}
    assert len(evaluation_tasks(run, {"": None}, min_version=0)) == 2 * 2 * 5
    again = evaluation_tasks(run, {"": 3}, min_version=9)
    assert [task.seed for task in again] == [task.seed for task in tasks]


def test_lost_episodes_count_as_wrong() -> None:
    run = parse_config({"evaluation": {"num_items": 4}})
    tasks = evaluation_tasks(run, {"": None}, 0)
    groups = [group(tasks[0], [episode(1.0)]), group(tasks[1], [episode(0.5)]), group(tasks[3], [episode(1.0)])]
    summary = summarize(run, tasks, outcomes_of_groups(run, tasks, groups))
    low, high = wilson_interval(2, 4)
    assert summary["accuracy/default"] == 0.5
    assert (summary["accuracy_low/default"], summary["accuracy_high/default"]) == (low, high)
    assert summary["reward/default"] == pytest.approx(2.5 / 4)
    assert summary["items/default"] == 4


def test_pass_at_k_is_taken_over_the_sampled_groups() -> None:
    run = parse_config({"evaluation": {"num_items": 2, "samples": 4}})
    tasks = evaluation_tasks(run, {"": None}, 0)
    sampled = [task for task in tasks if task.size == 4]
    answers = [episode(1.0), episode(0.0), episode(0.0), episode(0.0)]
    summary = summarize(
        run, tasks, outcomes_of_groups(run, tasks, [group(sampled[0], answers)])
    )  # the other one is lost
    assert summary["pass@1/default"] == pytest.approx((0.25 + 0) / 2)
    assert summary["pass@2/default"] == pytest.approx((0.5 + 0) / 2)
    assert summary["pass@4/default"] == pytest.approx((1.0 + 0) / 2)
    assert "pass@8/default" not in summary
    assert summary["accuracy/default"] == 0.0


def test_metrics_that_an_environment_declares_are_summarized_per_variant() -> None:
    run = parse_config({"evaluation": {"num_items": 3, "variants": {"a": {}, "b": {}}}})
    tasks = evaluation_tasks(run, {"": None}, 0)
    answered = [task for task in tasks if task.variant == "a"]
    groups = [group(task, [episode(1.0, distance=10.0 * k)]) for k, task in enumerate(answered)]
    summary = summarize(run, tasks, outcomes_of_groups(run, tasks, groups), {"": {"distance": (0.5,), "absent": ()}})
    assert {name: value for name, value in summary.items() if name.startswith("env/")} == {
        "env/distance/a": 10.0, "env/distance_p50/a": 10.0,
    }  # fmt: skip


# --- Plain transformers, what `--compare-hf` compares with, chooses the engine's tokens: same prompts, same decoding, adapter and padding


NEW_TOKENS = 12


@pytest.mark.parametrize("adapted", [False, True])
def test_plain_generate_chooses_the_engines_tokens(adapted: bool, tiny_folder: Path, tmp_path: Path) -> None:
    rollout = {"max_new_tokens_per_turn": NEW_TOKENS}
    run = parse_config({"model": {"path": str(tiny_folder)}, "env": {"id": "Shapes-v0"}, "rollout": rollout})
    folder = adapted_policy(tiny_folder).payload(1).write(tmp_path / "adapter")
    # Of different lengths, so that a batch is padded; the last has no picture.
    conversations = list(itertools.islice(item_prompts(run), 2))
    conversations.append((*conversations[0], Message.of("assistant", "3"), Message.of("user", "Really? Look again.")))
    conversations.append((Message.of("user", "How are you?"),))
    theirs = PlainGenerate(run, folder if adapted else None).answer(conversations)

    async def ask() -> list[list[int]]:
        engine, codec = TransformersEngine(tiny_folder, max_context=512), text_side(tiny_folder).codec
        if adapted:
            await engine.load_adapter(AdapterPayload.read(folder, 1))
        sampling = SamplingParams(NEW_TOKENS, temperature=0.0, ignore_eos=True)
        spans = [codec.encode_prompt(messages) for messages in conversations]
        requests = [GenerationRequest(f"r{k}", span.token_ids, sampling, span.images) for k, span in enumerate(spans)]
        answers = await engine.generate(requests)
        await engine.close()
        return [[int(token) for token in answer.samples[0].token_ids] for answer in answers]

    ours = asyncio.run(ask())
    assert ours == theirs and {len(tokens) for tokens in theirs} == {NEW_TOKENS}
