"""Tokens per second of answers that keep to a form, beside free ones: 32 samples at once, 32 new tokens each.

    python benchmarks/structured.py [--quick] [--engine vllm] [--out FILE]

Two random Qwen3-VLs: the tiny one (490 tokens), and one of 6 M parameters beside Qwen's published vocabulary (151,936).
Free answers and those of a form take turns; a ratio is the median over rounds. Temperature 1, one torch thread.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from models import SIX_MILLION, random_model
from report import Report, command_line

from rl_vlm.config import load_config
from rl_vlm.models.images import TextSide
from rl_vlm.models.loading import load_text_side, quiet_libraries
from rl_vlm.serving.replica import build_engine
from rl_vlm.types import GenerationRequest, Grammar, Message, SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from real_shapes import FAMILIES, build

ROWS, NEW_TOKENS = 32, 32
SCHEMA = {
    "type": "array",
    "minItems": 60,
    "items": {
        "type": "object",
        "properties": {
            "label": {"type": "string", "maxLength": 30},
            "kind": {"enum": ["cat", "dog", "bird", "no animal"]},
            "box": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 4, "maxItems": 4},
            "sure": {"type": "boolean"},
        },
        "required": ["label", "kind", "box", "sure"],
        "additionalProperties": False,
    },
}
FORMS: dict[str, dict[str, Any]] = {  # all are longer than what is sampled
    "JSON schema": {"grammar": Grammar("json_schema", json.dumps(SCHEMA))},
    "regex": {"grammar": Grammar("regex", r"([A-Za-z ]{1,30}: -?[0-9]{1,9}(\.[0-9]{2})?; ){80}")},
    "choice": {"choices": tuple(f"The {word} is" + " the" * 22 for word in ("cat", "dog", "bird", "last", "first"))},
}


def published(folder: Path) -> Path:
    """A Qwen3-VL with Qwen's own tokenizer."""
    family, text = FAMILIES["qwen3_vl_published"], {k: v for k, v in SIX_MILLION.items() if k != "vision"}
    vision = {**family.vision, "out_hidden_size": text["hidden_size"]}
    settings = {"tie_word_embeddings": True}
    return build("qwen3_vl_published", folder, text={**family.text, **text}, vision=vision, settings=settings)


def measure(label: str, folder: Path, engine_name: str, rounds: int, report: Report) -> None:
    """Put one model's figures into the report."""
    options = (f"model.path={folder}", f"serving.engine={engine_name}", "serving.max_context=256")
    run, text = load_config(None, list(options)), load_text_side(folder)
    engine = build_engine(folder, run)

    def rate(number: int, **form: Any) -> float:
        started = time.perf_counter()
        (answer,) = events.run(engine.generate([_request(text, number, form or {"ignore_eos": True})]))
        return sum(len(sample.token_ids) for sample in answer.samples) / (time.perf_counter() - started)

    with asyncio.Runner() as events:
        forms: dict[str, dict[str, Any]] = {"free": {}, **FORMS}
        rates = [{kind: rate(k, **form) for kind, form in forms.items()} for k in range(rounds + 1)][1:]
        for kind in forms:
            report.add(f"{label}: {kind}", [one[kind] for one in rates], "tokens/s")
            if kind != "free":
                ratio = statistics.median(one[kind] / one["free"] for one in rates)
                report.ratios[f"{label}: {kind} / free (goal .9)"] = ratio
        events.run(engine.close())


def _request(text: TextSide, number: int, form: dict[str, Any]) -> GenerationRequest:
    prompt = text.codec.encode_prompt([Message.of("user", "What is in the picture?")])
    seeds = tuple(range(ROWS * number, ROWS * (number + 1)))
    return GenerationRequest("r", prompt.token_ids, SamplingParams(NEW_TOKENS, n=ROWS, seeds=seeds, **form))


def main() -> None:
    """Command line."""
    parser = command_line(__doc__, "two rounds")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    args = parser.parse_args()
    quiet_libraries()
    report = Report(f"Answers of a form, engine {args.engine}")
    with tempfile.TemporaryDirectory(prefix="rl-vlm-bench-") as scratch:
        models = {"490": random_model(Path(scratch) / "tiny"), "151,936": published(Path(scratch) / "published")}
        for label, folder in models.items():
            measure(label, folder, args.engine, 2 if args.quick else 7, report)
    report.finish(args.out)


if __name__ == "__main__":
    main()
