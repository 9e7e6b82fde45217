"""What the page shows of one run, read from the files of its folder: parquet, CSV and JSON, here or at a URL.

`viewer/src/api.ts` describes the answers, whose form has the version `SCHEMA`. A file that is half written or damaged
is left out.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from yaml import YAMLError

from rl_vlm.config.overrides import leaves
from rl_vlm.files import to_jsonable
from rl_vlm.runs.api import Run
from rl_vlm.safe_text import one_line
from rl_vlm.types import UserInputError
from rl_vlm.view.conversation import Answer, crops_of, messages_in_parts, turn_facts
from rl_vlm.view.findings import Finding, findings

SCHEMA = 1
_FOLDERS = {"train": "trajectories", "eval": "evaluations"}
_MESSAGES = 500  # the newest that are shown
_PICTURES = 4  # of a segment, evenly spaced
_SILENT_S = 600.0  # a run that writes nothing for so long has ended
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FILM = re.compile(r"step(\d+)_episode\d+_(-?[\d.]+(?:e[+-]?\d+)?)\.gif")
_EPISODE = re.compile(r"(train|eval)-(\d{1,9})-(\d{1,6})")
# Column of a list → that of the file.
_LISTED = {
    **{name: name for name in ("iteration", "env", "stage", "index", "variant", "view", "category", "reward",
                               "advantage", "correct", "status", "question", "answer")},
    "group": "group_id", "turns": "num_turns", "tools": "tool_calls", "tokens": "num_sampled",
    "version": "oldest_version", "newest": "newest_version",
}  # fmt: skip
_COLUMNS = ("id", "kind", *_LISTED, "sample", "replicas", "picture", "pictures")
# What reading a file that is half written, edited by hand or cut off by a full disk raises.
_DAMAGED = (
    OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, pa.ArrowException, YAMLError,
    UserInputError,
)  # fmt: skip
# The files that every answer is made of, and what they hold.
_FILES: dict[str, tuple[str, Callable[[], Any]]] = {
    "config": ("config.yaml", dict), "metrics": ("result.json", dict),
    "progress": ("progress.csv", pd.DataFrame), "evaluations": ("eval.jsonl", pd.DataFrame),
}  # fmt: skip


class NotThereError(UserInputError):
    """The run holds no such thing.

    Do: take an id from the list.
    """


class RunReader:
    """Reads one run again and again while it goes on; a file that has not changed is read once."""

    def __init__(self, run: Run, folder: str = "", sweep: str = "") -> None:
        self._run, self.folder, self._sweep = run, folder or str(run.folder), sweep
        self._tables: dict[str, tuple[str, Any]] = {}  # file → its stamp, and what was read of it

    # What has changed.

    def stamps(self) -> dict[str, str]:
        """The files that answers are made of, each with what changes when it does."""
        folders = ("", *_FOLDERS.values(), "labels", "videos")
        return {name: stamp for folder in folders for name, stamp in self._run.files(folder).items()}

    def stamp(self) -> str:
        return hashlib.sha256(repr(sorted(self.stamps().items())).encode()).hexdigest()[:16]

    def _once(self, name: str, stamp: str, read: Callable[[str], Any]) -> Any:
        """`read(name)`, or what it gave while the file was the same; None for a damaged file."""
        known = self._tables.get(name)
        if known is None or known[0] != stamp:
            found = None
            with suppress(*_DAMAGED):
                found = read(name)
            known = self._tables[name] = stamp, found
        return known[1]

    def _dumps(self, folder: str) -> dict[str, str]:
        """The parquet files of a folder with their stamps, oldest first."""
        found = self._run.files(folder)
        return {name: found[name] for name in sorted(found) if name.endswith(".parquet")}

    # The run.

    def _read(self) -> tuple[dict[str, Any], dict[str, Any], pd.DataFrame, pd.DataFrame]:
        """Configuration, result, progress and evaluations; a damaged one is empty, and the result says so."""
        found: dict[str, Any] = {}
        damage: dict[str, str] = {}
        for part, (name, nothing) in _FILES.items():
            try:
                found[part] = _checked(getattr(self._run, part), nothing)
                if part == "config" and not found[part]:
                    raise ValueError("it is empty")
            except _DAMAGED as error:
                found[part] = nothing()
                damage = {"status": "damaged", "error": f"{name} cannot be read: {one_line(error)}"}
        return found["config"], damage or found["metrics"], found["progress"], found["evaluations"]

    def config(self) -> dict[str, str]:
        settings = leaves(to_jsonable(self._read()[0]))
        return {key: json.dumps(value, ensure_ascii=False) for key, value in settings if key}

    def line(self) -> Answer:
        """The run in the list of runs."""
        files = self._read()
        try:
            return self._line(*files)
        except _DAMAGED as error:
            damage = f"a file holds something else than a run writes: {one_line(error)}"
            return self._line({}, {"status": "damaged", "error": damage}, pd.DataFrame(), pd.DataFrame())

    def _line(
        self, config: dict[str, Any], result: dict[str, Any], progress: pd.DataFrame, evaluations: pd.DataFrame
    ) -> Answer:
        kind = next((kind for kind in ("preference", "sft") if kind in config), "policy")
        without = ("sft", "conversations") if kind == "sft" else ("?", "?")
        algorithm, env = config.get("algorithm") or {"name": without[0]}, config.get("env") or {}
        accuracy = next((evaluations[key] for key in evaluations if key.startswith("accuracy/")), ())
        total = algorithm.get("iterations") or config.get(kind, {}).get(
            "total_steps" if kind == "preference" else "steps"
        )
        changed = max((float(stamp.split("-")[0]) for stamp in self.stamps().values()), default=0.0)
        return {
            "folder": str(self._run.folder),
            "name": str(config.get("name", "")),
            "sweep": self._sweep,
            "kind": kind,
            "algorithm": str(algorithm.get("name", "grpo")),
            "environment": env.get("id") or " + ".join(_parts(env.get("mixture"))) or without[1],
            "status": str(result.get("status", "running" if time.time() - changed < _SILENT_S else "no result")),
            "error": str(result.get("error", "")),
            "iterations": int(progress["iteration"].iloc[-1]) if len(progress) else 0,
            "total": total,
            "reward": _ends(progress.get("reward/mean", progress.get("sft/loss", ()))),
            "accuracy": _ends(accuracy),
            "seconds": result.get("train_seconds"),
            "changed": changed,
            "stamp": self.stamp(),
            "settings": {},
            "findings": [found._asdict() for found in self._findings(progress, evaluations)],
        }

    def _findings(self, progress: pd.DataFrame, evaluations: pd.DataFrame) -> list[Finding]:
        gaps: dict[str, float] = {}
        for name, stamp in [*self._dumps(_FOLDERS["train"]).items()][-1:]:
            gaps = self._once(f"{name}#gaps", stamp, self._gaps) or {}
        pairs: list[Answer] = []
        for name, stamp in [*self._dumps("labels").items()][-1:]:
            pairs = self._once(name, stamp, self._pairs) or []
        return findings(progress, evaluations, gaps, pairs, self._losses())

    def _gaps(self, key: str) -> dict[str, float]:
        """By replica, nats per token to the learner: of episodes that it alone answered, with the newest version."""
        gaps: dict[str, list[float]] = {}
        columns = ["replica_ids", "loss_mask", "logprobs", "learner_logprobs", "oldest_version", "newest_version"]
        rows = self._run.parquet(key.split("#")[0]).read(columns).to_pylist()
        newest = max((row["newest_version"] for row in rows), default=0)
        for row in rows:
            replicas, engine, learner = {*row["replica_ids"]}, row["logprobs"], row["learner_logprobs"]
            if learner is not None and len(replicas) == 1 and row["oldest_version"] == newest:
                gap = np.abs(np.subtract(learner, engine))[np.array(row["loss_mask"])].mean()
                gaps.setdefault(replicas.pop(), []).append(float(gap))
        return {replica: math.fsum(found) / len(found) for replica, found in gaps.items()}

    def run(self, line: Answer) -> Answer:
        files, (_, result, progress, evaluations) = self.stamps(), self._read()
        counts = {
            kind: sum(self._rows(name, stamp) for name, stamp in self._dumps(folder).items())
            for kind, folder in {**_FOLDERS, "pairs": "labels"}.items()
        }
        return {
            "line": line,
            "config": self.config(),
            "result": result,
            "progress": _columns(progress),
            "evaluations": _columns(evaluations),
            "messages": [{"iteration": one.get("iteration"), "text": str(one.get("text", ""))}
                         for one in self._lines("messages.jsonl")[-_MESSAGES:]],
            "losses": self._losses(),
            "has": {
                "episodes": counts["train"],
                "evaluated": counts["eval"],
                "pairs": counts["pairs"],
                "films": sum(name.startswith("videos/") for name in files),
                "adapter": bool(self._run.files("adapter")),
            },
        }  # fmt: skip

    def _rows(self, name: str, stamp: str) -> int:
        return self._once(f"{name}#rows", stamp, lambda _: self._run.parquet(name).metadata.num_rows) or 0

    def _lines(self, name: str) -> list[dict[str, Any]]:
        """The objects in a file's lines; none of a damaged file."""
        with suppress(*_DAMAGED):
            return [line for line in self._run.lines(name) if isinstance(line, dict)]
        return []

    def _losses(self) -> list[Answer]:
        """Why groups were lost, by iteration."""
        name = "failures.jsonl"
        return self._once(name, self._run.files("").get(name, ""), self._counted_losses) or []

    def _counted_losses(self, name: str) -> list[Answer]:
        counted = Counter((int(one.get("iteration") or 0), str(one.get("reason"))) for one in self._lines(name))
        return [
            {"iteration": iteration, "reason": reason, "count": count}
            for (iteration, reason), count in [*counted.items()][-_MESSAGES:]
        ]

    # Episodes.

    def episodes(self) -> dict[str, list[Any]]:
        """The list of all kept episodes, as columns."""
        listed: dict[str, list[Any]] = {column: [] for column in _COLUMNS}
        for kind, folder in _FOLDERS.items():
            for name, stamp in self._dumps(folder).items():
                for column, values in (self._once(name, stamp, partial(self._list, kind)) or {}).items():
                    listed[column] += values
        return listed

    def _list(self, kind: str, name: str) -> dict[str, list[Any]]:
        table = self._run.parquet(name).read([*_LISTED.values(), "replica_ids", "images"])
        listed: dict[str, list[Any]] = {column: table[stored].to_pylist() for column, stored in _LISTED.items()}
        images, count, iteration = table["images"].to_pylist(), table.num_rows, _number(name)
        return listed | {
            "id": [f"{kind}-{iteration}-{row}" for row in range(count)],
            "kind": [kind] * count,
            "sample": ["greedy" if kind == "eval" else "sampled"] * count,
            "replicas": [", ".join(dict.fromkeys(names)) for names in table["replica_ids"].to_pylist()],
            # An episode ends with an answer, so its last picture is the one behind that answer.
            "picture": [names[-1] if names else "" for names in images],
            "pictures": list(map(len, images)),
        }

    def episode(self, episode: str) -> Answer:
        """One episode with its tokens. Raises NotThereError."""
        kind, iteration, place = self._place(episode)
        try:
            file = self._run.parquet(f"{_FOLDERS[kind]}/iteration-{iteration:06d}.parquet")
        except FileNotFoundError:
            raise NotThereError(f"There is no episode {episode} in this run.") from None
        for number in range(file.num_row_groups):
            rows = file.metadata.row_group(number).num_rows
            if place < rows:
                (row,) = file.read_row_group(number).slice(place, 1).to_pylist()
                return {"id": episode, **self._conversation(row)}
            place -= rows
        raise NotThereError(f"There is no episode {episode} in this run.")

    def _place(self, episode: str) -> tuple[str, int, int]:
        found = _EPISODE.fullmatch(episode)
        if found is None:
            raise NotThereError(f"{episode[:40]!r} names no episode: an id is such as train-10-3.")
        return found[1], int(found[2]), int(found[3])

    def _conversation(self, row: Mapping[str, Any]) -> Answer:
        info = json.loads(row["info"])
        turns = row["turns"] or []
        messages = messages_in_parts(json.loads(row["messages"]), len(turns), self._size, crops_of(info))
        sampled = row["loss_mask"]
        replicas = row["replica_ids"] or [""]
        return {
            "messages": messages,
            "turns": [turn_facts(turn, replicas[min(k, len(replicas) - 1)]) for k, turn in enumerate(turns)],
            "info": info,
            "error": row["error"],
            "tokens": row.get("tokens") or [str(token) for token in row["token_ids"]],
            "sampled": sampled,
            "engine": _sampled(row["logprobs"], sampled),
            "learner": _sampled(row.get("learner_logprobs"), sampled),
            "advantages": _sampled(row.get("advantages"), sampled),
            "values": _sampled(row.get("values"), sampled),
            "entropies": _sampled(row.get("entropies"), sampled),
            "spans": row.get("image_spans") or [],
            "segments": row.get("segments") or [],
        }

    def _size(self, sha256: str) -> tuple[int, int]:
        try:
            return self._run.image(sha256).size
        except (UserInputError, OSError):
            return 0, 0

    def search(self, text: str) -> list[str]:
        """The ids of episodes whose text contains this one, whatever the case."""
        found = []
        for kind, folder in _FOLDERS.items():
            for name, stamp in self._dumps(folder).items():
                texts = self._once(
                    f"{name}#text", stamp, lambda name: self._run.parquet(name.split("#")[0]).read(["text"])["text"]
                )
                if texts is not None:
                    hits = np.flatnonzero(
                        pc.match_substring(texts, text, ignore_case=True).to_numpy(zero_copy_only=False)
                    )
                    found += [f"{kind}-{_number(name)}-{place}" for place in hits]
        return found

    # Preferences.

    def pairs(self) -> dict[str, list[Any]]:
        """All pairs that were labelled, as columns."""
        columns = (
            "id", "session", "step", "label", "answers", "probabilities", "truth", "learned", "text", "error", "first", "second",  # noqa: E501
        )  # fmt: skip
        listed: dict[str, list[Any]] = {column: [] for column in columns}
        for name, stamp in self._dumps("labels").items():
            for row in self._once(name, stamp, self._pairs) or ():
                for column in columns:
                    listed[column].append(row[column])
        return listed

    def _pairs(self, name: str) -> list[Answer]:
        file = self._run.parquet(name)
        if "first" not in file.schema_arrow.names:  # scores of single pictures
            return []
        return [
            {
                "id": f"pair-{row['session']}-{place}",
                "session": row["session"],
                "step": row["step"],
                "label": row["value"],
                "answers": row["answers"] or [],
                "probabilities": row["probabilities"],
                "truth": [_sum(row[side]["true_rewards"]) for side in ("first", "second")],
                "learned": row.get("learned") or [None, None],
                "text": row["text"],
                "error": row["error"],
                **{side: _spread(row[side]["frames"] or []) for side in ("first", "second")},
            }
            for place, row in enumerate(file.read().to_pylist())
        ]

    def films(self) -> list[Answer]:
        """The GIF files of evaluations."""
        found = ((name.split("/")[-1], _FILM.fullmatch(name.split("/")[-1])) for name in self._run.files("videos"))
        films = [{"name": name, "iteration": int(film[1]), "reward": float(film[2])} for name, film in found if film]
        return sorted(films, key=lambda film: (film["iteration"], film["name"]))

    def file(self, kind: str, name: str) -> bytes:
        """The bytes of a picture (`images`, by SHA-256) or a film. Raises NotThereError."""
        if kind == "images" and _SHA256.fullmatch(name):
            content = next(
                filter(
                    None, (self._run.read(f"{place}/{name}.png") for place in ("trajectories/images", "labels/images"))
                ),
                b"",
            )
        elif kind == "films" and _FILM.fullmatch(name):
            content = self._run.read(f"videos/{name}")
        else:
            content = b""
        if not content:
            raise NotThereError("The run keeps no such file.")
        return content


def _checked(content: Any, kind: Any) -> Any:
    """The content of a file with its metrics as numbers. Raises ValueError or TypeError for other content."""
    if not isinstance(content, kind):
        raise TypeError(f"it holds a {type(content).__name__}")
    if isinstance(content, pd.DataFrame):
        for name in content:
            if name == "iteration" or "/" in str(name):
                content[name] = pd.to_numeric(content[name])
    return content


def _parts(mixture: Any) -> list[str]:
    """The names of a mixture's environments."""
    return [
        str(part.get("name") or part.get("id")) if isinstance(part, Mapping) else str(part) for part in mixture or ()
    ]


def _ends(values: Any) -> list[float | None]:
    known = [float(value) for value in values if math.isfinite(value)]
    return [known[0], known[-1]] if known else [None, None]


def _columns(table: pd.DataFrame) -> dict[str, list[float | None]]:
    """The columns of numbers; what is none is null."""
    numbers = table.select_dtypes("number")
    return {
        str(name): [value if math.isfinite(value) else None for value in numbers[name].tolist()] for name in numbers
    }


def _number(name: str) -> int:
    return int(re.sub(r"\D", "", name.split("/")[-1]) or 0)


def _sampled(values: Sequence[float] | None, sampled: Sequence[bool]) -> list[float | None] | None:
    """Nine significant digits, which float32 has, of each sampled token; None where it was not measured."""
    if values is None:
        return None
    return [float(f"{value:.9g}") if own else None for value, own in zip(values, sampled, strict=True)]


def _sum(rewards: Sequence[float] | None) -> float | None:
    total = math.fsum(rewards or ())
    return total if rewards and math.isfinite(total) else None


def _spread(frames: Sequence[str]) -> list[str]:
    count = min(_PICTURES, len(frames))
    return [frames[round((k + 1) * len(frames) / count) - 1] for k in range(count)]
