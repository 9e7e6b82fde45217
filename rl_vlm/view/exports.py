"""Kept episodes in the forms of other viewers: Inspect's `.eval`, Trackio's traces, tables of Weights & Biases."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from PIL import Image

from rl_vlm.types import UserInputError
from rl_vlm.view.reader import RunReader
from rl_vlm.view.report import choose_episodes

Answer = dict[str, Any]


def kept_episodes(reader: RunReader, count: int) -> Iterator[tuple[Answer, Answer]]:
    """At most `count` episodes: what a list shows of each, and the whole."""
    listed = reader.episodes()
    for place in choose_episodes(listed, count):
        yield {name: column[place] for name, column in listed.items()}, reader.episode(listed["id"][place])


def _optional(package: str, extra: str) -> Any:
    try:
        return import_module(package)
    except ImportError as error:
        raise UserInputError(f"{package} is not installed: run `pip install 'rl-vlm[{extra}]'`.") from error


def write_inspect(reader: RunReader, out: Path, count: int) -> int:
    """Write a log that `inspect view` opens, with pictures, tool calls and scores. Returns how many samples it has."""
    log, models = _optional("inspect_ai.log", "inspect"), _optional("inspect_ai.model", "inspect")
    tools, scorers = _optional("inspect_ai.tool", "inspect"), _optional("inspect_ai.scorer", "inspect")

    def message(told: Answer, number: int) -> Any:
        content: list[Any] = []
        calls: list[Any] = []
        for part in told["parts"]:
            if "picture" in part:
                content.append(models.ContentImage(image=_data_uri(reader, part["picture"]["sha"])))
            elif "thought" in part:
                content.append(models.ContentReasoning(reasoning=part["thought"]))
            elif "call" in part:
                call, name = part["call"], f"call-{number}-{len(calls)}"
                calls.append(tools.ToolCall(id=name, function=call["name"], arguments=call["arguments"]))
            else:
                content.append(models.ContentText(text=part["text"]))
        kinds = {"system": models.ChatMessageSystem, "user": models.ChatMessageUser, "tool": models.ChatMessageTool}
        if told["role"] == "assistant":
            return models.ChatMessageAssistant(content=content, tool_calls=calls or None)
        return kinds[told["role"]](content=content)

    samples = []
    for facts, told in kept_episodes(reader, count):
        messages = [message(one, number) for number, one in enumerate(told["messages"])]
        begun = next((k for k, one in enumerate(told["messages"]) if one["turn"] is not None), len(messages))
        scores = {"reward": scorers.Score(value=facts["reward"], answer=facts["answer"])}
        if facts["correct"] is not None:
            scores["correct"] = scorers.Score(value="C" if facts["correct"] else "I", answer=facts["answer"])
        samples.append(
            log.EvalSample(
                id=facts["id"], epoch=1, input=messages[:begun], target=str(told["info"].get("truth", "")),
                messages=messages, output=models.ModelOutput.from_content("policy", facts["answer"]), scores=scores,
                metadata={**facts, "info": told["info"], "turns": told["turns"]},
            )
        )  # fmt: skip
    line = reader.line()
    mean = math.fsum(sample.scores["reward"].value for sample in samples) / max(len(samples), 1)
    metrics = {"mean": log.EvalMetric(name="mean", value=mean)}
    written = log.EvalLog(
        status="success",
        eval=log.EvalSpec(
            created=datetime.fromtimestamp(line["changed"], UTC).isoformat(), task=line["environment"],
            model=line["name"], dataset=log.EvalDataset(name=line["environment"], samples=len(samples)),
            config=log.EvalConfig(),
        ),
        results=log.EvalResults(
            total_samples=len(samples), completed_samples=len(samples),
            scores=[log.EvalScore(name="reward", scorer="reward", metrics=metrics)],
        ),
        samples=samples,
    )  # fmt: skip
    log.write_eval_log(written, str(out), format="eval")
    return len(samples)


def send_trackio(reader: RunReader, project: str, count: int) -> int:
    """Log metrics by iteration, and episodes as traces with their pictures. Returns how many traces."""
    trackio = _optional("trackio", "trackio")
    run = trackio.init(project=project, name=reader.line()["name"], config=reader.config(), embed=False)
    for row in reader.rows():
        trackio.log({name: value for name, value in row.items() if name != "iteration"}, step=int(row["iteration"]))
    sent = 0
    for facts, told in kept_episodes(reader, count):
        messages = [
            {
                "role": message["role"],
                "content": [
                    {"type": "image", "image": trackio.Image(_picture(reader, part["picture"]["sha"]))}
                    if "picture" in part
                    else {"type": "text", "text": _text_of(part)}
                    for part in message["parts"]
                ],
            }
            for message in told["messages"]
        ]
        metadata = {
            name: facts[name] for name in ("id", "kind", "iteration", "group", "env", "reward", "correct", "status")
        }
        trackio.log({facts["kind"]: trackio.Trace(messages, metadata=metadata)}, step=facts["iteration"])
        sent += 1
    run.finish()
    return sent


def send_wandb(reader: RunReader, project: str, count: int) -> int:
    """Log a table of episodes, a column per picture. Returns how many rows."""
    wandb, facts_shown = _optional("wandb", "wandb"), ["id", "kind", "iteration", "env", "reward", "correct", "status"]
    rows = []
    for facts, told in kept_episodes(reader, count):
        parts = [part for message in told["messages"] for part in message["parts"] if "picture" in part]
        pictures = [wandb.Image(_picture(reader, part["picture"]["sha"])) for part in parts]
        said = [f"[{one['role']}] {' '.join(map(_text_of, one['parts']))}" for one in told["messages"]]
        rows.append(([facts[name] for name in facts_shown], "\n".join(said), pictures))
    most = max((len(pictures) for *_, pictures in rows), default=0)
    columns = [*facts_shown, "conversation", *(f"picture {number + 1}" for number in range(most))]
    data = [[*facts, said, *pictures, *[None] * (most - len(pictures))] for facts, said, pictures in rows]
    with wandb.init(project=project, name=reader.line()["name"], job_type="episodes") as run:
        run.log({"episodes": wandb.Table(columns=columns, data=data)})
    return len(rows)


def _text_of(part: Answer) -> str:
    return "(picture)" if "picture" in part else part["call"]["raw"] if "call" in part else next(iter(part.values()))


def _picture(reader: RunReader, sha256: str) -> Image.Image:
    return Image.open(io.BytesIO(reader.file("images", sha256)), formats=("PNG",))


def _data_uri(reader: RunReader, sha256: str) -> str:
    return f"data:image/png;base64,{base64.b64encode(reader.file('images', sha256)).decode()}"
