"""Does a model follow environments that it does not know? Twenty small ones, as twenty people would write them.

    python benchmarks/strangers.py [--model PATH_OR_NAME] [--only NAME ...] [--starts START ...] [--seconds S]
                                   [--shuffled] [--quick] [--folder DIR] [--out FILE]
    python benchmarks/strangers.py --oracle [--only NAME ...]

The environments are tests/fixtures/strangers/*.py. Each states its form of answers in words: a tag, JSON, a tool call,
a sentence ... For each, one after the other and each step a command of its own:

- `rl-vlm sft` on up to 100 conversations of the right form whose answers belong to other pictures. They teach the form
  and say nothing of the task.
- `rl-vlm eval` on 100 held-out items, before and after that: the share of well-formed greedy answers, their accuracy,
  and the share of well-formed answers among those sampled as in training, of which RL lives.
- `rl-vlm train` with the quickstart's settings for five minutes (`--seconds`), from the adapter of the fine-tuning and
  directly (`--starts` chooses one). With `--shuffled` it sees the pictures of other items: a control that must not
  learn.

Both train the vision tower, too, and RL has the learning rate of docs/own_environments.md.

The table has a row per environment and start. Its figures are those of the mean reward in the last five iterations.
`well_formed`, `accuracy` (greedy) and `sampled_formed` are before RL; `first` is the mean reward of the first
iteration, `curve` that of ten iterations on the way and of the last. After RL, for greedy answers to held-out items,
`after` is the accuracy and `share` the part of the oracle's reward; `blind` is the part that is possible without
looking. A step that has finished in `--folder` is not run again, so an interrupted measurement can go on.

`--oracle` trains nothing. It plays 400 held-out items with the right answers and with constant ones, and compares that
with what each environment states; the exit code is 1 if one of them states something else.
"""

from __future__ import annotations

import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import oracle
from report import Report, command_line

from rl_vlm.envs.base import EpisodeEnv
from rl_vlm.envs.registry import make
from rl_vlm.types import Message

ROOT = Path(__file__).resolve().parents[1]
STRANGERS = ROOT / "tests" / "fixtures" / "strangers"
SHUFFLED, SECONDS = (ROOT / "benchmarks" / name for name in ("shuffled_pictures.py", "training_seconds.py"))
NAMES = sorted(path.stem for path in STRANGERS.glob("*.py"))
CONVERSATIONS = 100
STARTS = {"after SFT": "policy", "directly": "against"}  # where training starts: the side of `rl-vlm eval`
SAMPLES = 4  # of each held-out item
MOST_ITERATIONS = 1000  # the seconds end a run earlier, unless the machine is very fast
ORACLE_ITEMS = 400
_KINDS = ("greedy", "sampled")  # as `rl-vlm eval` names them
_TIMEOUT_S = 3600.0
# The longest answers, a tool call in a tokenizer of few words, do not fit the quickstart's 16 tokens.
LIMITS = ("rollout.max_new_tokens_per_turn=64", "serving.max_context=2048")
FINE_TUNING = ("sft.batch_size=16", "sft.epochs=20", "sft.max_length=2048", "sft.eval_every=0", "sft.warmup_steps=5")
TOWER = "model.lora.target_modules=vision"
RATE = "learner.lr=3e-4"
FORMED, RAISED, SOLVED = 0.95, 0.2, 0.9  # of the greedy answers; of the mean reward


def env_id(name: str) -> Path:
    """`env.id` of a stranger."""
    return STRANGERS / f"{name}.py"


def conversations(name: str, folder: Path, count: int = CONVERSATIONS) -> Path:
    """Write conversations about train items as JSONL with images, and return the file.

    Every answer is the right one of another item, so it has the right form and says nothing about the picture. An
    environment with fewer items gives one conversation each.
    """
    shown, other = make(str(env_id(name))), make(str(env_id(name)))
    assert isinstance(shown, EpisodeEnv) and isinstance(other, EpisodeEnv)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    path = folder / "train.jsonl"
    size = shown.num_items("train") or 2 * count
    with path.open("w") as file:
        for index in range(min(count, size)):
            messages = list(_conversation(shown, other, index, (index + size // 2) % size))
            images = [image for message in messages for image in message.images]
            names = [f"images/{index:03d}-{number}.png" for number in range(len(images))]
            for image, name_of_image in zip(images, names, strict=True):
                (folder / name_of_image).write_bytes(image.png)
            rows = [{"role": message.role, "content": _content(message)} for message in messages]
            file.write(json.dumps({"messages": rows, "images": names}) + "\n")
    return path


def _conversation(shown: EpisodeEnv, other: EpisodeEnv, index: int, other_index: int) -> Iterator[Message]:
    """The episode of a train item, answered as another item is answered right."""
    observation, _ = shown.reset(options={"index": index, "split": "train"})
    other.reset(options={"index": other_index, "split": "train"})
    ended = False
    while not ended:
        yield from observation.messages
        text = other.right()  # type: ignore[attr-defined]  # what the strangers have beyond an EpisodeEnv
        yield Message.of("assistant", text)
        observation, _, terminated, truncated, _ = shown.step(text)
        ended = terminated or truncated
        if not ended:
            other.step(text)


def _content(message: Message) -> list[dict[str, str]]:
    return [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in message.parts]


def command(folder: Path, *arguments: object, seconds: float = 0.0) -> None:
    """Run `rl-vlm ...`, unless its results are there: `folder` is a run folder, or a file. `seconds` are those of
    `training_seconds.py`. Raises RuntimeError."""
    if folder.suffix == ".json":
        done, where = folder.is_file(), ("--out", folder, "--overwrite")
    else:
        result = folder / "result.json"
        done = result.is_file() and json.loads(result.read_text())["status"] == "done"
        where = ("--run-dir", folder, *(("--overwrite",) if folder.exists() else ()))
    if done:
        return
    line = [sys.executable, "-m", "rl_vlm.cli", *map(str, (*arguments, *where))]
    ended = subprocess.run(
        line, cwd=ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TRAINING_SECONDS": str(seconds)},
    )  # fmt: skip
    if ended.returncode:
        raise RuntimeError(f"{' '.join(line[2:])} ended with code {ended.returncode}:\n{ended.stderr[-2000:]}")


@dataclass(frozen=True, slots=True)
class Start:
    """Answers of a policy to held-out items before RL: greedy ones, and samples."""

    well_formed: float
    accuracy: float
    sampled_formed: float


def start_of(items: Path, side: str, asked: int) -> Start:
    """Of a file of finished items; those that were lost count as ill-formed and wrong."""
    rows = [json.loads(line) for line in items.read_text().splitlines()]
    greedy, sampled = ([row for row in rows if row.get("side") == side and row["kind"] == kind] for kind in _KINDS)
    return Start(
        sum(map(_well_formed, greedy)) / asked,
        sum(bool(row["correct"]) for row in greedy) / asked,
        sum(map(_well_formed, sampled)) / (asked * SAMPLES),
    )


def _well_formed(row: dict[str, Any]) -> bool:
    """An answer that was cut off never reached the environment, which therefore has no verdict, or an older one."""
    return row["status"] == "completed" and bool(row["info"].get("well_formed", False))


def rewards(run: Path) -> list[float]:
    """The mean reward of each iteration."""
    with (run / "progress.csv").open() as file:
        rows = sorted(csv.DictReader(file), key=lambda row: int(row["iteration"]))
    return [float(row["reward/mean"]) for row in rows]


def reward_of_greedy(run: Path) -> float:
    """The mean reward of the last evaluation."""
    *_, last = (run / "eval.jsonl").read_text().splitlines()
    return float(json.loads(last)["reward/default"])


def measure(
    model: str, name: str, folder: Path, *, starts: Sequence[str], quick: bool, seconds: float, shuffled: bool
) -> dict[str, dict[str, Any]]:
    """Fine-tune, evaluate and train; one row for each start of training."""
    tuned, items, worth = folder / "sft", 50 if quick else 100, oracle.stated(env_id(name))
    shared = (f"model.path={model}", TOWER, *LIMITS, f"evaluation.num_items={items}")
    own = (f"env.id={env_id(name)}", "env.kwargs={}")
    data = conversations(name, folder / "data")
    command(tuned, "sft", "sft_tiny", f"model.path={model}", TOWER, f"sft.data={data}", *FINE_TUNING)
    sides = ("--run-dir", tuned, "--against", "base")
    command(folder / "eval.json", "eval", "quickstart", *sides, *shared, *own, f"evaluation.samples={SAMPLES}")
    played = (f"env.id={SHUFFLED}", f"env.kwargs={{env: {env_id(name)}}}") if shuffled else own
    length = (f"algorithm.iterations={MOST_ITERATIONS}", f"logging.callbacks=[{SECONDS}:TrainingSeconds]")
    rows = {}
    for start in starts:
        label = f"shuffled, {start}" if shuffled else start
        more = (f"model.adapter={tuned}",) if start == "after SFT" else ()
        run = folder / label.replace(", ", "-").replace(" ", "-").lower()
        settings = (*shared, *played, *more, *length, "evaluation.every=0", RATE)
        command(run, "train", "quickstart", *settings, seconds=seconds)
        curve, before = rewards(run), start_of(folder / "eval.items.jsonl", STARTS[start], items)
        rows[label] = {
            "values": curve[-5:],
            **asdict(before),
            "first": curve[0],
            "iterations": len(curve),
            "after": json.loads((run / "result.json").read_text())["accuracy_after"],
            "share": reward_of_greedy(run) / worth.oracle,
            "blind": worth.blind / worth.oracle,
            "curve": " ".join(f"{r:.2f}".lstrip("0") for r in (*curve[:: max(len(curve) // 10, 1)], curve[-1])),
        }
    return rows


def learned(row: dict[str, Any]) -> bool:
    """Whether the mean reward, of which 1 is possible, rose by 0.2 or to more than 0.9."""
    return row["median"] > row["first"] + RAISED or row["median"] > SOLVED


def summary(rows: Sequence[dict[str, Any]], start: str) -> str:
    """One sentence about all environments whose training started in one way."""
    formed, share = sum(row["well_formed"] >= FORMED for row in rows), statistics.mean(row["share"] for row in rows)
    raised = sum(map(learned, rows))
    return (
        f"{start[0].upper()}{start[1:]}: {formed} of {len(rows)} environments are at least {FORMED:.0%} well-formed "
        f"before RL, which raises the mean reward by more than {RAISED}, or above {SOLVED}, in {raised} and "
        f"ends at a mean share of {share:.2f} of the oracle's reward."
    )


def check_oracles(names: Sequence[str]) -> bool:
    """Print what the oracle and the best constant answer get, and whether all environments state that."""
    fine = True
    for name in names:
        said, found = oracle.stated(env_id(name)), oracle.measured(env_id(name), ORACLE_ITEMS)
        held = oracle.holds(said, found, ORACLE_ITEMS)
        fine = fine and held
        print(
            f"{'ok  ' if held else 'FAIL'} {name:15} oracle {found.oracle:.2f} (states {said.oracle:.2f}), "
            f"blind best {found.blind:.3f} (states {said.blind:.3f})",
            flush=True,
        )
    return fine


def main() -> None:
    """Command line."""
    parser = command_line(__doc__, "50 held-out items")
    parser.add_argument("--model", default="tiny", help="model.path (default tiny)")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--folder", type=Path, help="where data and run folders go; default: a temporary folder")
    parser.add_argument(
        "--starts", nargs="+", choices=STARTS, default=list(STARTS), metavar="START", help=", ".join(STARTS)
    )
    parser.add_argument("--seconds", type=float, default=300.0, help="of each training (default 300)")
    parser.add_argument("--shuffled", action="store_true", help="train with the pictures of other items")
    parser.add_argument("--oracle", action="store_true", help="only check what the environments state of their rewards")
    args = parser.parse_args()
    if args.oracle:
        sys.exit(not check_oracles(args.only))
    folder = (args.folder or Path(tempfile.mkdtemp(prefix="strangers-"))).absolute()
    model = str(Path(args.model).absolute()) if Path(args.model).is_dir() else args.model
    report = Report(f"Environments of strangers: mean reward of {args.model} at the end of training")
    for name in args.only:
        measured = measure(
            model, name, folder / name,
            starts=args.starts, quick=args.quick, seconds=args.seconds, shuffled=args.shuffled,
        )  # fmt: skip
        for label, row in measured.items():
            report.add(f"{name}, {label}", row.pop("values"), unit="", **row)
            print(f"{name}, {label}: {row}", flush=True)
    for start in args.starts:
        report.notes.append(summary([row for row in report.rows if row["label"].endswith(start)], start))
    report.finish(args.out)


if __name__ == "__main__":
    main()
