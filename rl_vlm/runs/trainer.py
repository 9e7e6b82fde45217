"""`rl_vlm.Trainer` and `rl_vlm.serve`: the training loop and the server, run by a program of your own."""

from __future__ import annotations

import os
import re
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from rl_vlm.config import PolicyConfig
from rl_vlm.runs.api import Run, configured
from rl_vlm.runs.policy import PolicyRun
from rl_vlm.runs.train import opened_run
from rl_vlm.types import RLVLMError, TrajectoryGroup, UserInputError

_STOP_S = 60.0  # running requests finish first


@dataclass(frozen=True, slots=True)
class Step:
    """What an iteration did. `advantages`: float64 [G] for each group of G episodes, the mean over sampled tokens."""

    iteration: int
    metrics: Mapping[str, float]
    groups: list[TrajectoryGroup]
    advantages: list[np.ndarray]


class Trainer:
    """A run whose loop is yours. Everything is recorded as in `rl_vlm.train`, which takes the same arguments.

        with rl_vlm.Trainer("quickstart") as trainer:
            for step in trainer:
                print(step.iteration, step.metrics["reward/mean"])

    Leaving the block saves what was trained, also after `break`. Raises UserInputError for a preference run, and what
    `rl_vlm.train` raises.
    """

    def __init__(self, config: Any, *, dataset: Any = None, reward: Any = None, overrides: Any = None, **options: Any):
        self.config = configured(config, dataset, reward, overrides)
        if not isinstance(self.config, PolicyConfig):
            raise UserInputError("Trainer trains a policy on an environment: use rl_vlm.train for a preference run.")
        self._options = options

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._run: PolicyRun = stack.enter_context(opened_run(self.config, **self._options))
            stack.enter_context(self._run.session())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        with self._stack:  # in which an error of the block, or of saving, ends the run
            if error is not None:
                raise error
            self._run.finish()

    def __iter__(self) -> Iterator[Step]:
        algorithm = self._run.algorithm
        for iteration in self._run.iterations():
            yield Step(iteration, algorithm.last_metrics, algorithm.last_groups, algorithm.last_advantages)

    @property
    def run(self) -> Run:
        """The run's folder so far."""
        return Run(self._run.folder)

    def evaluate(self) -> dict[str, Any]:
        """Evaluate now, as `evaluation` of the configuration says, and record it (docs/results.md)."""
        return self._run.evaluate()

    def sample(self, count: int = 1, *, greedy: bool = True) -> list[TrajectoryGroup]:
        """Episodes of the first held-out items by the policy as it is, with their messages; nothing is learned."""
        return self._run.algorithm.sample_held_out(count, greedy=greedy)  # type: ignore[no-any-return]

    def save(self) -> None:
        """Write a checkpoint into the run folder, from which `resume=True` goes on."""
        self._run.checkpoint()


@contextmanager
def serve(target: str | Path, *overrides: str, timeout_s: float = 600.0) -> Iterator[str]:
    """`rl-vlm serve` in a process of its own; inside, the address of its OpenAI-compatible API, such as
    `http://127.0.0.1:41234/v1`.

        with rl_vlm.serve("runs/quickstart") as url:
            client = openai.OpenAI(base_url=url, api_key="none")

    target: `tiny`, a folder, a hub name, a configuration or a run folder. overrides: `key=value`. Raises RLVLMError if
    it does not answer within `timeout_s`, with what it said.
    """
    command = [sys.executable, "-m", "rl_vlm.cli", "serve", str(target), *overrides, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    deadline, said = time.monotonic() + timeout_s, ""
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not (found := re.search(r"Serving on (http://\S+)\s", said)):
                # What is there, past any buffer of ours: lines in it would be waited for.
                ready = selector.select(max(deadline - time.monotonic(), 0))
                new = os.read(process.stdout.fileno(), 2**16).decode(errors="replace") if ready else ""
                said += new
                if not new:
                    raise RLVLMError(f"rl-vlm serve {target} did not start: {said.strip() or 'it said nothing.'}")
        threading.Thread(target=process.stdout.read, daemon=True).start()  # or its pipe would fill up
        yield f"{found[1]}/v1"
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
