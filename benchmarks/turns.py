"""Contenders that take turns, each in a process of its own. `Contender` asks in words, `serve` answers in JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


class Contender:
    """The process of one contender. `script` is its file in benchmarks/ of the checkout `tree`, whose code it runs, and
    `environment` changes its variables."""

    def __init__(
        self, label: str, script: str, *arguments: object, tree: Path = HERE.parent, **environment: str
    ) -> None:
        self.label = label
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the process
        variables = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(tree)}
        python = own if (own := tree / ".venv/bin/python").exists() else sys.executable
        self._process = subprocess.Popen(
            [str(python), str(tree / "benchmarks" / script), *map(str, arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, cwd=tree,
            env=variables | environment,
        )  # fmt: skip

    def wait_until_ready(self) -> None:
        """Wait until it has loaded what it needs."""
        self._answer()

    def ask(self, command: str) -> Any:
        """The answer to a command. Raises RuntimeError, with what it printed, if the process has ended."""
        assert self._process.stdin is not None
        print(command, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise RuntimeError(f"{self.label} ended: {self._errors.read()[-2000:]}")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(120)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._errors.close()


def serve(prepare: Callable[[], Callable[..., Any]]) -> None:
    """Prepare, then answer the words of each line of standard input until it ends."""
    # Libraries print to stdout as they like; answers go to the real one.
    answers, sys.stdout = sys.stdout, sys.stderr
    answer = prepare()
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(*line.split())), file=answers, flush=True)
