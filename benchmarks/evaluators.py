"""Public evaluators against `rl-vlm serve`, item by item beside `rl-vlm eval`.

    rl-vlm train quickstart algorithm.iterations=40 --run-dir runs/short
    rl-vlm serve runs/short
    python benchmarks/evaluators.py runs/short inspect-ai=PYTHON lm-eval=PYTHON lmms-eval=PYTHON ms-vlmeval=PYTHON

PYTHON is an interpreter that has the evaluator installed. The items are drawings of Shapes-v0's test split, asked
greedily. Each evaluator gets them as a task of its own, in a temporary folder, and scores them by exact match. A line
per evaluator and model; exit code 1 when an item differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_vlm.zoo.shapes.environment import format_answer, shapes_item

ITEMS, MAX_TOKENS = 50, 16
Judged = dict[int, tuple[str, bool]]  # answer and correctness by item


@dataclass(frozen=True)
class Evaluation:
    """One evaluator that asks one model, in a folder of its own; `items` holds the items and their images."""

    python: str
    folder: Path
    items: Path
    model: str
    url: str

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text.replace("ITEMS", str(self.items)).replace("TOKENS", str(MAX_TOKENS)))

    def run(self, *command: str) -> None:
        """Run a module of the evaluator's environment."""
        known = {"RLVLM_BASE_URL": self.url, "RLVLM_API_KEY": "none", "OPENAI_API_KEY": "none"}  # of the first two
        known |= {"LMUData": str(self.items), "VLMEVAL_MIN_IMAGE_EDGE": "1", "HF_HOME": str(self.folder / "hf")}
        command = (self.python, "-m", *command)
        done = subprocess.run(command, cwd=self.folder, env=os.environ | known, check=False, capture_output=True)
        if done.returncode:
            said = (done.stdout + done.stderr)[-4000:].decode(errors="replace")
            sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{said}")

    def found(self, pattern: str) -> list[Any]:
        """The lines of the only file that the evaluator wrote by this name."""
        (path,) = self.folder.rglob(pattern)
        return [json.loads(line) for line in path.read_text().splitlines()]


def with_inspect(one: Evaluation) -> Judged:
    one.write("shapes.py", """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample, json_dataset
from inspect_ai.model import ChatMessageUser, ContentImage, ContentText
from inspect_ai.scorer import match

def sample(row):
    content = [ContentImage(image=row["image_path"]), ContentText(text=row["question"])]
    return Sample([ChatMessageUser(content=content)], target=row["answer"], id=row["index"])

@task
def shapes():
    return Task(json_dataset("ITEMS/items.jsonl", sample), scorer=match("exact", ignore_case=False))
""")  # fmt: skip
    command = ["eval", "shapes.py", "--model", f"openai-api/rlvlm/{one.model}", "--temperature", "0"]
    one.run("inspect_ai", *command, "--max-tokens", str(MAX_TOKENS), "--log-format", "json", "--display", "none")
    (path,) = one.folder.glob("logs/*.json")
    samples = json.loads(path.read_text())["samples"]
    return {row["id"]: (row["output"]["completion"], row["scores"]["match"]["value"] == "C") for row in samples}


def with_harness(one: Evaluation, more: str, *command: str) -> list[Any]:
    """lm-eval and lmms-eval read the same kind of task, which `more` ends. The lines of the samples file."""
    one.write("shapes.yaml", f"""
task: shapes
dataset_path: json
dataset_kwargs: {{data_files: {{test: ITEMS/items.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_target: answer
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
{more}""")  # fmt: skip
    one.write("functions.py", """
from PIL import Image

def images(doc):
    return [Image.open(doc["image_path"])]

def text(doc, lmms_eval_specific_kwargs=None):
    return doc["question"]

def messages(doc, lmms_eval_specific_kwargs=None):
    content = [{"type": "image", "url": images(doc)[0]}, {"type": "text", "text": text(doc)}]
    return [{"role": "user", "content": content}]
""")  # fmt: skip
    one.run(*command, "--tasks", "shapes", "--include_path", ".", "--log_samples", "--output_path", "out")
    return one.found("*samples_shapes*.jsonl")


def with_lm_eval(one: Evaluation) -> Judged:
    rows = with_harness(one, """
doc_to_text: question
doc_to_image: !function functions.images
generation_kwargs: {until: [], max_gen_toks: TOKENS, temperature: 0}
""", "lm_eval", "--model", "local-chat-completions", "--apply_chat_template", "--model_args",
        f"model={one.model},base_url={one.url}/chat/completions,num_concurrent=4")  # fmt: skip
    return {row["doc_id"]: (row["resps"][0][0], row["exact_match"] == 1) for row in rows}


def with_lmms_eval(one: Evaluation) -> Judged:
    rows = with_harness(one, """
doc_to_visual: !function functions.images
doc_to_text: !function functions.text
doc_to_messages: !function functions.messages
generation_kwargs: {max_new_tokens: TOKENS, temperature: 0}
""", "lmms_eval", "eval", "--model", "async_openai", "--model_args",
        f"model_version={one.model},base_url={one.url},api_key=none")  # fmt: skip
    return {row["doc_id"]: (row["filtered_resps"], row["exact_match"] == 1) for row in rows}


def with_vlmevalkit(one: Evaluation) -> Judged:
    # It has no score for questions of one's own: its exact match of OCRVQA is taken.
    one.write("shapes.py", """
from vlmeval.dataset.image_vqa import CustomVQADataset
from vlmeval.dataset.utils.vqa_eval import process_line
from vlmeval.run import main
from vlmeval.smp import load

def evaluate(self, eval_file, **_):
    rows = load(eval_file)
    rows["correct"] = [process_line(row, method="accuracy")["match"] == [1.0] for _, row in rows.iterrows()]
    rows.to_json("judged.jsonl", orient="records", lines=True)
    return {"Overall": rows["correct"].mean()}

CustomVQADataset.evaluate = evaluate
main()
""")  # fmt: skip
    command = ["--api-mode", "--debug", "--data", "items", "--model", one.model, "--base-url", one.url]
    one.run("shapes", *command, "--max-tokens", str(MAX_TOKENS), "--temperature", "0")
    return {row["index"]: (row["prediction"], row["correct"]) for row in one.found("judged.jsonl")}


EVALUATORS: dict[str, Callable[[Evaluation], Judged]] = {  # by the package's name
    "inspect-ai": with_inspect, "lm-eval": with_lm_eval, "lmms-eval": with_lmms_eval, "ms-vlmeval": with_vlmevalkit,
}  # fmt: skip


def write_items(folder: Path) -> None:
    """As lines of JSON, and as VLMEvalKit's table."""
    rows: list[dict[str, Any]] = []
    for index in range(ITEMS):
        item = shapes_item("count", "test", index)
        path, answer = folder / f"{index}.png", format_answer(item.answer)
        path.write_bytes(item.image.png)
        rows.append({"index": index, "image_path": str(path), "question": item.question, "answer": answer})
    (folder / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [list(rows[0]), *(row.values() for row in rows)]
    (folder / "items.tsv").write_text("".join("\t".join(map(str, line)) + "\n" for line in lines))


def with_rl_vlm(run: Path, out: Path) -> dict[str, Judged]:
    """By side: `policy` is the run's adapter, `against` its base model."""
    command = ["eval", run, "--against", "base", "--out", out, "--episodes", ITEMS, "--max-new-tokens", MAX_TOKENS]
    subprocess.run([sys.executable, "-m", "rl_vlm.cli", *map(str, command)], check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in out.with_suffix(".items.jsonl").read_text().splitlines()[1:]]
    judged: dict[str, Judged] = {"against": {}, "policy": {}}
    for row in rows:
        judged[row["side"]][row["index"]] = row["answers"][0], row["correct"]
    return judged


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run that is served")
    parser.add_argument("evaluators", nargs="+", metavar="NAME=PYTHON", help=f"of {', '.join(EVALUATORS)}")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--base", default="tiny", help="the base model's name there")
    args = parser.parse_args(arguments)
    chosen = dict(one.partition("=")[::2] for one in args.evaluators)
    if unknown := chosen.keys() - EVALUATORS.keys():
        parser.error(f"unknown: {', '.join(unknown)}")
    failed = 0
    print("evaluator | version | model | equal answers | equal correctness | right there | right in rl-vlm eval")
    with tempfile.TemporaryDirectory() as folder:
        items = Path(folder, "items")
        items.mkdir()
        write_items(items)
        ours = with_rl_vlm(args.run, items / "ours.json")
        for name, python in chosen.items():
            ask = f"from importlib.metadata import version; print(version({name!r}))"
            version = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.strip()
            for side, model in {"against": args.base, "policy": "policy"}.items():
                own = Path(folder, name, model)
                own.mkdir(parents=True)
                theirs = EVALUATORS[name](Evaluation(python, own, items, model, args.url))
                pairs = [(theirs[index], ours[side][index]) for index in range(ITEMS)]
                equal = [sum(one[k] == other[k] for one, other in pairs) for k in (0, 1)]
                right = [sum(pair[k][1] for pair in pairs) for k in (0, 1)]
                print(" | ".join(map(str, (name, version, model, *equal, *right))), flush=True)
                failed += min(equal) < ITEMS
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
