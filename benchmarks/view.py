"""The page of a run with 10,000 trajectories and 30,000 pictures: paint, filter, memory, a run that goes on, a report.

    python benchmarks/view.py [--quick] [--out FILE]

Needs Chromium. Limits: first useful paint 1 s, a filter 200 ms, server 500 MB, following 3 s, a report of 500 episodes
20 MB and 2 s. A paint is useful when the first picture of the gallery can be seen.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from PIL import Image
from playwright.sync_api import Page, sync_playwright
from report import Report, command_line

from rl_vlm.config import PolicyConfig, save_config
from rl_vlm.learning.plan import TokenRecord
from rl_vlm.models.loading import load_text_side, resolve_model
from rl_vlm.monitoring.recorder import RunRecorder
from rl_vlm.monitoring.trajectories import write_trajectories
from rl_vlm.types import EncodedImage, Message, StopReason, Trajectory, TrajectoryGroup, TrajectoryStatus, Turn

TURNS, SIZE = 3, 8  # turns of a trajectory, a picture each; trajectories of a group
WORDS = [
    "the",
    "angle",
    "of",
    "a",
    "triangle",
    "is",
    "40",
    "degrees",
    "so",
    "the",
    "answer",
    "counts",
    "red",
    "and",
    "blue",
    "shapes",
]
PAINTED = (
    """() => document.querySelector('main img')?.complete && document.querySelector('main img').naturalWidth > 0"""
)
# Milliseconds from a change of the address until the frame after the one that counts anew.
FILTER = """async (place) => {
  const count = () => document.querySelector('main').innerText.match(/[\\d,]+ of [\\d,]+ episodes/)[0];
  const before = count(), begun = performance.now();
  location.hash = place;
  while (count() === before) await new Promise(requestAnimationFrame);
  await new Promise(requestAnimationFrame);
  return performance.now() - begun;
}"""


class Writer:
    """Writes dumps of 64 invented trajectories."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        config = PolicyConfig.model_validate({"name": folder.name, "logging": {"tensorboard": False}})
        save_config(config, folder / "config.yaml")
        self.folder, self.recorder, self.rng = folder, RunRecorder(folder, config), np.random.default_rng(0)
        self.text = load_text_side(resolve_model("tiny"))

    def dump(self, iteration: int) -> None:
        groups = [
            TrajectoryGroup(
                f"{iteration}:{g}", g, [self.trajectory(f"{iteration}:{g}:{s}") for s in range(SIZE)], "abc"[g % 3]
            )
            for g in range(8)
        ]
        arrays = {t.trajectory_id: t.logprobs[t.loss_mask] for group in groups for t in group.trajectories}
        write_trajectories(
            self.folder / "trajectories", iteration, groups, TokenRecord(arrays, {}, arrays, arrays), self.text
        )
        self.recorder.log_iteration(iteration, {"reward/mean": float(self.rng.random())})

    def trajectory(self, name: str) -> Trajectory:
        ids, mask, turns, messages, pictures = [], [], [], [], []
        for k in range(TURNS):
            pictures.append(self.picture())
            asked, said = (" ".join(self.rng.choice(WORDS, count)) for count in (20, 60))
            spans = [
                self.text.codec.encode_text(asked),
                self.text.images.span(96, 96),
                self.text.codec.encode_text(said),
            ]
            start = sum(map(len, ids)) + len(spans[0]) + len(spans[1])
            turns.append(Turn(start, start + len(spans[2]), 0, StopReason.END_OF_TURN, float(self.rng.integers(0, 2))))
            messages += [Message.of("user", pictures[k], asked), Message.of("assistant", said)]
            ids += spans
            mask += [np.zeros(len(spans[0]) + len(spans[1]), bool), np.ones(len(spans[2]), bool)]
        sampled = np.concatenate(mask)
        logprobs = np.where(sampled, -self.rng.random(len(sampled)), 0).astype(np.float32)
        info = {"correct": bool(self.rng.integers(0, 2))}
        return Trajectory(
            name, np.concatenate(ids).astype(np.int32), sampled, logprobs, tuple(turns), TrajectoryStatus.COMPLETED,
            tuple(pictures), info, tuple(messages), "", ("replica",) * TURNS,
        ).check()  # fmt: skip

    def picture(self) -> EncodedImage:
        fields = self.rng.integers(0, 255, (6, 6, 3), dtype=np.uint8)
        return EncodedImage.from_pil(Image.fromarray(fields).resize((96, 96), Image.Resampling.NEAREST))


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    command = [sys.executable, "-m", "rl_vlm.cli", "view", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[1].rstrip("/"), psutil.Process(process.pid)
        process.terminate()


def painted_after(page: Page, address: str) -> float:
    """Seconds until the gallery shows its first picture."""
    page.goto("about:blank")
    started = time.perf_counter()
    page.goto(address, wait_until="commit")
    while not page.evaluate(PAINTED):
        page.wait_for_timeout(5)
    return time.perf_counter() - started


def measure(quick: bool) -> Report:
    """Run everything and return the report."""
    report, dumps, times = Report("rl-vlm view"), 16 if quick else 157, 3 if quick else 7
    work = Path(tempfile.mkdtemp(prefix="rl-vlm-view-"))
    writer = Writer(work / "run")
    for iteration in range(1, dumps + 1):
        writer.dump(iteration)
    count = dumps * 64
    figures: dict[str, tuple[list[float], str, float]] = {}
    with sync_playwright() as playwright:
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--disable-gpu", *sandbox])
        page = browser.new_page(viewport={"width": 1440, "height": 1000})
        with served(work / "run") as (address, process):
            gallery = f"{address}/#/episodes/run"
            figures["first useful paint"] = [painted_after(page, gallery) for _ in range(times)], "s", 1.0
            filters: list[float] = []
            for order in ["high", "low"] * times:
                for place in (f"?correct=yes&sort={order}", "?env=a", ""):
                    filters.append(page.evaluate(FILTER, f"#/episodes/run{place}") / 1000)
            figures["a filter"] = filters, "s", 0.2
            followed: list[float] = []
            for k in range(times):
                writer.dump(dumps + 1 + k)
                started = time.perf_counter()
                words = f"of {count + 64 * (k + 1):,} episodes"
                while words not in page.inner_text("main"):
                    page.wait_for_timeout(10)
                followed.append(time.perf_counter() - started)
            figures["a new dump is shown"] = followed, "s", 3.0
            figures["memory of the server"] = [process.memory_info().rss / 1e6], "MB", 500.0
        out = work / "report.html"
        subprocess.run([sys.executable, "-m", "rl_vlm.cli", "report", work / "run", "--out", out], check=True)
        figures["size of a report of 500 episodes"] = [out.stat().st_size / 1e6], "MB", 20.0
        opened = [painted_after(page, f"{out.as_uri()}#/episodes/run") for _ in range(times)]
        figures["a report of 500 episodes opens"] = opened, "s", 2.0
        browser.close()
    for label, (values, unit, limit) in figures.items():
        report.add(label, values, unit, limit=limit)
        report.ratios[f"limit / ours, {label}"] = limit / float(np.median(values))
    report.notes.append(f"{count:,} trajectories with {count * TURNS:,} pictures.")
    shutil.rmtree(work)
    return report


def main() -> None:
    """Command line."""
    args: Any = command_line(__doc__, "1,024 trajectories").parse_args()
    measure(args.quick).finish(args.out)


if __name__ == "__main__":
    main()
