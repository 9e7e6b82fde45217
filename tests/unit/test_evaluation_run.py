"""An evaluation from end to end with a worker and an engine in this process: kept items, kills, resumption, comparison, files."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from core_support import adapted_policy
from http_support import EngineBackend, serving
from scipy import stats

from rl_vlm.config import EndpointSection, PolicyConfig, apply_overrides, parse_config
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.evaluation.heldout import EvaluationOptions
from rl_vlm.evaluation.players import EpisodesLostError
from rl_vlm.models.weights import AdapterPayload
from rl_vlm.rollout.env_runner import RolloutWorker
from rl_vlm.rollout.tasks import RolloutResult, RolloutTask
from rl_vlm.runs import evaluate
from rl_vlm.runs.evaluate import evaluate_policy_run
from rl_vlm.testing import EngineClient
from rl_vlm.types import RLVLMError, UserInputError

ITEMS = 12


class Killed(RLVLMError):
    """Stands for the end of the process."""


class Counting:
    """A worker that counts what it is asked, and is killed after `left` items."""

    def __init__(self, worker: RolloutWorker) -> None:
        self._worker = worker
        self.finished: Counter[str] = Counter()
        self.left = 10**6
        self.broken: set[str] = set()  # ids of items that are lost

    async def run(self, tasks: list[RolloutTask]) -> RolloutResult:
        if not self.left:
            raise Killed("killed")
        self.left -= 1
        (task,) = tasks
        if task.group_id in self.broken:
            return RolloutResult(lost={task.group_id: "it broke"})
        result = await self._worker.run(tasks)
        self.finished[f"{task.min_version} {task.group_id}"] += 1
        return result


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> Iterator[TransformersEngine]:
    yield TransformersEngine(tiny_folder, max_context=512)


@pytest.fixture(scope="module")
def adapter(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return adapted_policy(tiny_folder).payload(1).write(tmp_path_factory.mktemp("a") / "adapter")


@pytest.fixture
def asked(engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch) -> Counting:
    """What the worker was asked, in all evaluations of the test."""
    counting: list[Counting] = []

    @contextmanager
    def served(run: PolicyConfig) -> Iterator[Any]:
        worker = RolloutWorker(run, "run", Path(run.model.path), client=EngineClient(engine))
        counting[0]._worker = worker

        def publish(payload: AdapterPayload) -> None:
            if payload.version > engine.version:
                asyncio.run(engine.load_adapter(payload))

        yield counting[0], SimpleNamespace(publish=publish)
        worker.close_envs()

    counting.append(Counting(None))  # type: ignore[arg-type]
    monkeypatch.setattr(evaluate, "served_worker", served)
    return counting[0]


def run_of(folder: Path, **evaluation: Any) -> PolicyConfig:
    return parse_config(
        {
            "model": {"path": str(folder)},
            "env": {"id": "Shapes-v0", "kwargs": {"task": "count"}},
            "rollout": {"max_new_tokens_per_turn": 8, "require_end_of_turn": False, "max_consecutive_failures": 3},
            "evaluation": {"num_items": ITEMS, "at_once": 3, "category": "answer", **evaluation},
        }
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


def test_an_evaluation_that_is_killed_asks_no_finished_item_twice(
    tiny_folder: Path, tmp_path: Path, asked: Counting
) -> None:
    out, run, items = tmp_path / "results.json", run_of(tiny_folder), tmp_path / "results.items.jsonl"
    asked.left = 4
    with pytest.raises(Killed):
        evaluate_policy_run(run, out=out)
    kept = lines(items)
    # Of the three items under way some may be finished and not kept.
    assert not out.exists() and len(asked.finished) - 3 <= len(kept) <= len(asked.finished) < ITEMS
    with items.open("a") as file:
        file.write('{"side": "policy", "id": "test/def')  # a kill in the middle of a line
    with pytest.raises(UserInputError, match="--resume"):
        evaluate_policy_run(run, out=out)
    asked.left, asked.finished = 10**6, Counter(f"-1 {line['id']}" for line in kept)
    results = evaluate_policy_run(run, out=out, options=EvaluationOptions(resume=True))
    assert set(asked.finished.values()) == {1} and len(asked.finished) == ITEMS
    found = lines(items)
    assert sorted(line["index"] for line in found) == list(range(ITEMS))
    assert results["asked"] < ITEMS and results["items/default"] == ITEMS and results["lost"] == 0
    assert results["accuracy/default"] == pytest.approx(sum(line["correct"] for line in found) / ITEMS)
    again = evaluate_policy_run(run, out=out, options=EvaluationOptions(resume=True))
    assert again["asked"] == 0 and again["accuracy/default"] == results["accuracy/default"]
    assert json.loads(out.read_text()) == again


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"env.kwargs": {"task": "rule"}}, "env.kwargs"),
        ({"seed": 7}, "seed 0"),
        ({"rollout.max_new_tokens_per_turn": 9}, "rollout.max_new_tokens_per_turn 8"),
        ({"adapter": True}, r"adapter \(policy\) \"base model\""),
    ],
)
def test_another_evaluation_is_not_resumed(
    change: dict[str, Any], named: str, tiny_folder: Path, tmp_path: Path, asked: Counting, adapter: Path
) -> None:
    out, run = tmp_path / "results.json", run_of(tiny_folder, num_items=2)
    evaluate_policy_run(run, out=out)
    folder = adapter if change.pop("adapter", False) else None
    other = parse_config(apply_overrides(run.model_dump(mode="json"), change))
    with pytest.raises(UserInputError, match=named):
        evaluate_policy_run(other, out=out, adapter=folder, options=EvaluationOptions(resume=True))
    more = run.model_copy(update={"evaluation": run.evaluation.model_copy(update={"num_items": 5})})
    assert evaluate_policy_run(more, out=out, options=EvaluationOptions(resume=True))["asked"] == 3


def test_base_against_adapter_has_scipys_p_value_on_the_kept_outcomes(
    tiny_folder: Path, tmp_path: Path, asked: Counting, adapter: Path
) -> None:
    out = tmp_path / "results.json"
    options = EvaluationOptions(against="base", split=("train", "test"))
    results = evaluate_policy_run(run_of(tiny_folder), out=out, adapter=adapter, options=options)
    assert results["split"] == ["train", "test"] and results["asked"] == 4 * ITEMS
    for split in ("train", "test"):
        pair = results["splits"][split]["against"]["variants"]["default"]
        sides = {
            side: {line["index"]: line for line in lines(tmp_path / "results.items.jsonl")
                   if line["side"] == side and line["split"] == split}
            for side in ("policy", "against")
        }  # fmt: skip
        differ = [sides["policy"][k]["correct"] - sides["against"][k]["correct"] for k in range(ITEMS)]
        first, second = differ.count(1), differ.count(-1)
        assert (pair["only_policy"], pair["only_against"]) == (first, second)
        expected = stats.binomtest(first, first + second).pvalue if first + second else 1.0
        assert pair["p_value"] == expected
        assert pair["accuracy_difference"] == pytest.approx(sum(differ) / ITEMS)
        assert pair["accuracy_difference_low"] <= pair["accuracy_difference"] <= pair["accuracy_difference_high"]
    assert len({key.split()[0] for key in asked.finished}) == 2  # versions that were asked for
    page = (tmp_path / "results.md").read_text()
    assert "## train split" in page and "p (McNemar, exact)" in page and "By category, default" in page
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserInputError, match="itself"):
        evaluate_policy_run(run_of(tiny_folder), options=EvaluationOptions(against="base"))


def test_a_lost_item_counts_as_wrong_and_is_asked_again(tiny_folder: Path, tmp_path: Path, asked: Counting) -> None:
    out, run = tmp_path / "results.json", run_of(tiny_folder, samples=2)
    asked.broken = {"test/default/greedy/000003", "test/default/sampled/000004"}
    results = evaluate_policy_run(run, out=out)
    assert results["lost"] == 2 and results["items/default"] == ITEMS
    assert results["lost_because"] == {"it broke": 2} and "- 2: it broke" in out.with_suffix(".md").read_text()
    assert len(lines(tmp_path / "results.items.jsonl")) == (ITEMS - 1) * 3
    asked.broken = set()
    again = evaluate_policy_run(run, out=out, options=EvaluationOptions(resume=True))
    assert again["asked"] == 2 and again["lost"] == 0 and "pass@2/default" in again


def test_many_losses_in_a_row_end_the_evaluation(tiny_folder: Path, tmp_path: Path, asked: Counting) -> None:
    asked.broken = {f"test/default/greedy/{k:06d}" for k in range(4, ITEMS)}
    with pytest.raises(EpisodesLostError):
        evaluate_policy_run(run_of(tiny_folder, at_once=1), out=tmp_path / "results.json")
    assert len(lines(tmp_path / "results.items.jsonl")) == 4


def test_our_own_server_gives_the_outcomes_of_the_served_model(
    engine: TransformersEngine, tiny_folder: Path, tmp_path: Path, asked: Counting
) -> None:
    """Over two turns: greedy answers by token ids and by chat completions are the same."""
    run = parse_config(apply_overrides(run_of(tiny_folder).model_dump(mode="json"), {"env.kwargs.turns": 2}))
    evaluate_policy_run(run, out=tmp_path / "served.json")
    with serving(EngineBackend(engine), tiny_folder) as server:
        endpoint = EndpointSection(url=f"{server.url}/v1", model="tiny", logprobs=False)
        options = EvaluationOptions(endpoint=endpoint)
        results = evaluate_policy_run(run, out=tmp_path / "endpoint.json", options=options)
    names = ("index", "correct", "reward", "turns", "status", "info", "answers")
    served, over_http = (
        sorted([[line[name] for name in names] for line in lines(tmp_path / f"{name}.items.jsonl")], key=str)
        for name in ("served", "endpoint")
    )
    assert results["lost"] == 0 and len(served) == ITEMS and served == over_http
    assert results["turns/default"] > 1 and all(len(line[-1]) == line[3] for line in served)
