"""Recompute what a geometry run says of itself from its dumped trajectories, without this package.

    python tests/e2e/recompute.py RUN_FOLDER MODEL_FOLDER

Reads `trajectories/*.parquet` and `progress.csv`; knows the environment's rules (reward, bonus, cost) only from the saved
configuration. Prints a JSON line with what was checked, or raises AssertionError naming the first thing that is wrong.
"""

from __future__ import annotations

import csv
import json
import re
import statistics
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml
from tokenizers import Tokenizer

CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
BOX = re.compile(r"\\boxed\{([^{}]*)\}")
TOOLS = {"calc_score", "calc_geo3k_reward"}


def value(text: str) -> Fraction | str:
    """A plain number exactly, anything else as text without blanks."""
    text = text.strip().removeprefix("$").removesuffix("$").replace(" ", "")
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return text


def well_formed(turn: str) -> bool:
    """Whether the turn holds a call that can be carried out."""
    found = CALL.findall(turn)
    if not found:
        return False
    try:
        call = json.loads(found[-1], strict=False)
        arguments = call["arguments"]
        arguments = json.loads(arguments, strict=False) if isinstance(arguments, str) else arguments
        return call["name"] in TOOLS and str(arguments["answer"]).strip() != ""
    except (ValueError, KeyError, TypeError):
        return False


def expected_reward(row: dict[str, Any], rules: dict[str, Any]) -> float:
    """1 for the right last box, paid only when the episode ended by itself or by its turns; bonus and costs per call."""
    said = [turn["parts"][0] for turn in json.loads(row["messages"]) if turn["role"] == "assistant"]
    info = json.loads(row["info"])
    cut = row["turns"][-1]["stop_reason"] == "length"
    graded = said[:-1] if cut else said  # a turn without its end is not given to the environment
    boxes = [box for turn in graded for box in BOX.findall(turn)[-1:]]
    right = bool(boxes) and not cut and value(boxes[-1]) == value(info.get("truth", "\0"))
    calls = sum("<tool_call>" in turn for turn in graded)
    bonus = rules.get("format_bonus", 0.0) * any(well_formed(turn) for turn in graded)
    return float(right) + bonus - rules.get("tool_cost", 0.0) * calls


def expected_mask(ids: list[int], tokenizer: Tokenizer) -> list[bool]:
    """True from after each `<|im_start|>assistant\\n` to its `<|im_end|>`, inclusive."""
    start, end = tokenizer.token_to_id("<|im_start|>"), tokenizer.token_to_id("<|im_end|>")
    header = [start, *tokenizer.encode("assistant\n", add_special_tokens=False).ids]
    mask, speaking = [False] * len(ids), False
    for place, token in enumerate(ids):
        mask[place] = speaking
        if speaking and token == end:
            speaking = False
        elif not speaking and ids[max(place - len(header) + 1, 0) : place + 1] == header:
            speaking = True
    return mask


def check_rows(rows: list[dict[str, Any]], rules: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Rewards and masks of every trajectory, advantages of every group."""
    for row in rows:
        name = f"iteration {row['iteration']}, {row['trajectory_id']}"
        total = sum(turn["reward"] for turn in row["turns"])
        assert abs(total - row["reward"]) < 1e-9, f"{name}: turns pay {total}, the trajectory {row['reward']}"
        assert abs(expected_reward(row, rules) - row["reward"]) < 1e-9, (
            f"{name}: reward {row['reward']}: {row['messages']}"
        )
        assert expected_mask(row["token_ids"], tokenizer) == row["loss_mask"], f"{name}: the loss mask differs"
        spans = [place for turn in row["turns"] for place in range(turn["start"], turn["stop"])]
        assert spans == [place for place, sampled in enumerate(row["loss_mask"]) if sampled], f"{name}: spans"
        assert all((lp < 0) == m or (m and lp == 0) for lp, m in zip(row["logprobs"], row["loss_mask"], strict=True)), (
            name
        )
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["group_id"], []).append(row)
    for name, group in groups.items():
        rewards = [row["reward"] for row in group]
        for row in group:
            wanted = 0.0
            if len(set(rewards)) > 1:
                wanted = (row["reward"] - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-6)
            assert abs(row["advantage"] - wanted) < 1e-6, f"{name}: advantage {row['advantage']}, expected {wanted}"


def check_counts(rows: list[dict[str, Any]], progress: dict[str, str]) -> None:
    """What progress.csv says of an iteration of which every trajectory was dumped."""
    turns = [len(row["turns"]) for row in rows]
    infos = [json.loads(row["info"]) for row in rows]
    for key, wanted in {
        "reward/mean": statistics.mean(row["reward"] for row in rows),
        "rollout/turns": statistics.mean(turns),
        "rollout/tokens": sum(sum(row["loss_mask"]) for row in rows),
        "rollout/reached_turn_2": statistics.mean(count >= 2 for count in turns),
        "rollout/truncated": statistics.mean(row["status"] == "truncated" for row in rows),
        "rollout/tool_calls": statistics.mean(info["tool_calls"] for info in infos if "tool_calls" in info),
    }.items():
        assert abs(float(progress[key]) - wanted) < 1e-6, f"iteration {progress['iteration']}: {key}"


def main() -> None:
    """See the module's docstring."""
    run, model = Path(sys.argv[1]), Path(sys.argv[2])
    config = yaml.safe_load((run / "config.yaml").read_text())
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    progress = {int(row["iteration"]): row for row in csv.DictReader((run / "progress.csv").open())}
    size = config["rollout"]["prompts_per_iteration"] * config["rollout"]["group_size"]
    seen = {"iterations": 0, "trajectories": 0, "second_turns": 0, "third_turns": 0, "tool_calls": 0, "full_counts": 0}
    for path in sorted((run / "trajectories").glob("*.parquet")):
        rows = pq.read_table(path).to_pylist()
        check_rows(rows, config["env"]["kwargs"], tokenizer)
        if len(rows) == size:
            check_counts(rows, progress[rows[0]["iteration"]])
            seen["full_counts"] += 1
        assert any(row["advantage"] for row in rows), f"{path.name}: no group has an advantage"
        seen["iterations"] += 1
        seen["trajectories"] += len(rows)
        seen["second_turns"] += sum(len(row["turns"]) >= 2 for row in rows)
        seen["third_turns"] += sum(len(row["turns"]) >= 3 for row in rows)
        seen["tool_calls"] += sum(
            "<tool_call>" in message["parts"][0]
            for row in rows
            for message in json.loads(row["messages"])
            if message["role"] == "assistant"
        )
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
