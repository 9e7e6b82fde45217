"""Data of one's own and a reward function, from Python and from the command line: the run trains, and its parts are logged."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

import rl_vlm
from rl_vlm.cli.app import run as command
from rl_vlm.types import UserInputError
from rl_vlm.zoo.shapes.environment import shapes_item

SMALL = {
    "algorithm.iterations": 2, "rollout.prompts_per_iteration": 4, "rollout.group_size": 4, "evaluation.num_items": 4,
    "serving.num_replicas": 1, "rollout.num_env_runners": 1, "sight.gate": "off",
}  # fmt: skip
QUICKSTART = Path(__file__).resolve().parents[2] / "configs/quickstart.yaml"


def columns_of(folder: Path) -> dict[str, list[float]]:
    with (folder / "progress.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows] for name in ("reward/mean", "reward/part/first_digit")}


@pytest.fixture
def own_folder(tmp_path: Path) -> Path:
    """An image folder of 40 pictures whose columns have names of their own."""
    folder = tmp_path / "own"
    folder.mkdir()
    lines = []
    for index in range(40):
        item = shapes_item("count", "train", index)
        (folder / f"{index}.png").write_bytes(item.image.png)
        lines.append(json.dumps({"file_name": f"{index}.png", "ask": item.question, "gold": item.answer}) + "\n")
    (folder / "metadata.jsonl").write_text("".join(lines))
    return folder


@pytest.mark.timeout(600)
def test_train_takes_data_and_a_function_in_place_of_an_environment(
    own_folder: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    shift = 0.5

    def first_digit(completions: list[str], gold: list[str], **kwargs: Any) -> list[float]:
        return [shift + (text[:1] == truth) for text, truth in zip(completions, gold, strict=True)]

    run = rl_vlm.train(
        QUICKSTART,
        dataset=own_folder,
        reward=[first_digit, {"function": "exact", "weight": 2.0}],
        overrides={
            **SMALL,
            "model.path": str(tiny_folder),
            "env.kwargs": {"columns": {"question": "ask", "answer": "gold"}, "test_share": 0.2},
        },
        run_dir=tmp_path / "run",
    )
    assert run.folder == tmp_path / "run" and run.metrics["status"] == "done" and run.metrics["iterations"] == 2
    logged = columns_of(tmp_path / "run")
    assert min(logged["reward/part/first_digit"]) >= shift and min(logged["reward/mean"]) >= shift
    with pytest.raises(UserInputError, match="'first_digit' is not a reward function"):  # a folder holds its name alone
        rl_vlm.train(tmp_path / "run/config.yaml", run_dir=tmp_path / "run", resume=True)


@pytest.mark.timeout(600)
def test_the_command_takes_a_file_of_functions(own_folder: Path, tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def first_digit(completions, gold):\n    return [1.0 for _ in completions]\n")
    settings = [f"{key}={value}" for key, value in SMALL.items()]
    data = [
        f"env.data={own_folder}/metadata.jsonl",
        f"env.reward={tmp_path}/mine.py:first_digit",
        f"model.path={tiny_folder}",
    ]
    kwargs = "env.kwargs={columns: {image: file_name, question: ask, answer: gold}, test_share: 0.2}"
    recipe = str(QUICKSTART.with_name("qa_tiny.yaml"))
    assert command(["train", recipe, *data, kwargs, *settings, "--run-dir", str(tmp_path / "run")]) == 0
    assert columns_of(tmp_path / "run")["reward/part/first_digit"] == [1.0, 1.0]


def test_what_train_cannot_take_is_said_before_it_starts(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="not a list: write it to a file"):
        rl_vlm.train("quickstart", dataset=[{"question": "?"}])  # type: ignore[arg-type]
    with pytest.raises(UserInputError, match="nowhere"):
        rl_vlm.train({}, dataset=tmp_path / "nowhere.parquet", reward="exact")
    with pytest.raises(UserInputError, match="is not a reward function"):
        rl_vlm.train({"env": {"id": "Shapes-v0"}}, reward="exactly", run_dir=tmp_path / "run")
