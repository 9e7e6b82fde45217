"""Where metrics go: `progress.csv`, TensorBoard's event file, and Weights & Biases."""

from __future__ import annotations

import contextlib
import csv
import io
import logging
import os
import secrets
import socket
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from rl_vlm.config import CommonConfig, SFTConfig
from rl_vlm.files import AppendedFile, append_whole, csv_lines, cut_lines, to_jsonable, whole_lines, write_atomic
from rl_vlm.types import EncodedImage, Trajectory

logger = logging.getLogger(__name__)

Metrics = Mapping[str, float]


class ProgressCsv:
    """A row of metrics per iteration; a new metric widens the file. After a full disk the rows go with the next."""

    def __init__(self, path: Path, keep_until: int) -> None:
        self._path = path
        self._pending: list[tuple[int, Metrics]] = []
        cut_lines(path, lambda line: int(line.split(b",", 1)[0]), keep_until, head=1)
        self._columns: list[str] = next(csv.reader([(whole_lines(path) or [b"iteration"])[0].decode()]))

    def add(self, iteration: int, metrics: Metrics) -> None:
        self._pending.append((iteration, {name: float(value) for name, value in metrics.items()}))
        self.flush()

    def flush(self) -> None:
        wider = list(dict.fromkeys([*self._columns, *(name for _, metrics in self._pending for name in metrics)]))
        new = len(wider) - len(self._columns)
        rows = [[iteration, *(metrics.get(name, "") for name in wider[1:])] for iteration, metrics in self._pending]
        if new:
            # Cells hold no line ends, so a row is widened by adding empty cells to its line.
            old = [line + b"," * new + b"\n" for line in whole_lines(self._path)[1:]]
            write_atomic(self._path, b"".join([csv_lines([wider]), *old, csv_lines(rows)]))
        elif rows:
            append_whole(self._path, csv_lines(rows))
        self._columns = wider
        self._pending.clear()

    def column(self, name: str) -> list[float]:
        written = []
        for row in csv.DictReader(line.decode(errors="replace") for line in whole_lines(self._path)):
            with contextlib.suppress(ValueError):  # an empty cell, or one that a crash of the machine has damaged
                written.append(float(row.get(name) or ""))
        return written + [metrics[name] for _, metrics in self._pending if name in metrics]


class TensorBoardFile(AppendedFile):
    """A TensorBoard event file of whole records. After a full disk torch's SummaryWriter never writes again."""

    def __init__(self, folder: Path, purge_from: int | None = None) -> None:
        """Start a file in `folder`. Entries of older files from iteration `purge_from` on are hidden."""
        # TensorBoard reads the files of a folder in the order of their names.
        unique = f"{time.time():.6f}.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(2)}"
        super().__init__(folder / f"events.out.tfevents.{unique}")
        self._keep(file_version="brain.Event:2")
        if purge_from is not None:
            self._keep(step=purge_from, session_log={"status": "START"})

    def add_metrics(self, iteration: int, metrics: Metrics) -> None:
        values = [{"tag": name, "simple_value": float(value)} for name, value in metrics.items()]
        self._keep(step=iteration, summary={"value": values})
        self.add()

    def add_episode(self, iteration: int, episode: Trajectory) -> None:
        """The conversation as text, and its pictures."""
        from torch.utils.tensorboard.summary import text

        said = "\n\n".join(f"[{message.role}] {message.text}" for message in episode.messages)
        fenced = "\n".join(f"    {line}" for line in f"{said}\n\nreward {episode.reward:g}".splitlines())
        self._keep(step=iteration, summary=text("episode", to_jsonable(fenced)))
        pictures = [
            {"tag": f"episode/picture_{number}", "image": _tensorboard_image(image)}
            for number, image in enumerate(episode.images, start=1)
        ]
        self._keep(step=iteration, summary={"value": pictures})
        self.add()

    def _keep(self, **event: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # half a second, which a dry run does not need
        from tensorboard.summary.writer.record_writer import RecordWriter

        buffer = io.BytesIO()
        RecordWriter(buffer).write(Event(wall_time=time.time(), **event).SerializeToString())
        self.pending.append(buffer.getvalue())


def _tensorboard_image(image: EncodedImage) -> dict[str, Any]:
    return {"height": image.height, "width": image.width, "colorspace": 3, "encoded_image_string": image.png}


def start_wandb(folder: Path, run: CommonConfig | SFTConfig, resume: bool) -> Any:
    """A run on Weights & Biases where WANDB_API_KEY is set and it can be had."""
    if not os.environ.get("WANDB_API_KEY"):
        return None
    try:
        wandb = import_module("wandb")
        identity = folder / "wandb_id.txt"
        if not (resume and identity.is_file()):
            write_atomic(identity, secrets.token_hex(8))
        started = wandb.init(
            project=run.logging.wandb_project,
            name=run.name,
            id=identity.read_text().strip(),
            resume="allow",
            dir=str(folder),
            config=run.model_dump(mode="json"),
            settings=wandb.Settings(init_timeout=30),
        )
        started.define_metric("*", step_metric="iteration")
        return started
    except ImportError:
        logger.warning("WANDB_API_KEY is set and wandb is not installed: run `pip install 'rl-vlm[wandb]'`.")
    except Exception as error:  # of many kinds, which must not end the run
        problem = f"{type(error).__name__}: {error}"
        logger.warning("Weights & Biases is off for this run (%s). Without a network set WANDB_MODE=offline.", problem)
    return None
