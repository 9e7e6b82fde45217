"""Training runs over environments of other frameworks, and over one that another process serves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from runs import QUICKSTART, ROOT, environment, rl_vlm

FIXTURES = ROOT / "tests" / "fixtures" / "envs"
SMALL = (
    "algorithm.iterations=1",
    "rollout.prompts_per_iteration=2",
    "rollout.group_size=2",
    "rollout.max_new_tokens_per_turn=8",
    "serving.num_replicas=1",
    "rollout.num_env_runners=1",
    "serving.max_context=1024",
    "evaluation.num_items=2",
    "algorithm.minibatches=1",
)


@contextmanager
def served(env_id: str) -> Iterator[str]:
    """The address of `rl-vlm envs serve`, in a process of its own."""
    command = [sys.executable, "-m", "rl_vlm.cli", "envs", "serve", env_id, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(), cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().rpartition("env.id=")[2].strip()
        finally:
            process.terminate()


@pytest.mark.acceptance
@pytest.mark.parametrize(
    ("env_id", "kwargs"),
    [
        (str(FIXTURES / "vlm_gym" / "nlvr2.py"), "{}"),
        (str(FIXTURES / "vagen_env.py"), "{max_turns: 2}"),
        ("verifiers:verifiers-colours", "{kind: multi, max_turns: 2}"),
        ("Control-v0", "{env: MiniGrid-Empty-Random-5x5-v0, tile_size: 8, max_turns: 2}"),
        ("served", "{}"),
    ],
)
def test_a_run_trains_on_it(tmp_path: Path, env_id: str, kwargs: str) -> None:
    """One iteration and an evaluation."""
    path = os.pathsep.join(filter(None, (str(FIXTURES), os.environ.get("PYTHONPATH", ""))))
    with served("GridWalk-v0") if env_id == "served" else nullcontext(env_id) as named:
        arguments = ("--run-dir", tmp_path / "run", *SMALL, f"env.id={named}", f"env.kwargs={kwargs}")
        done = rl_vlm("train", QUICKSTART, *arguments, timeout=500, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr[-3000:]
    result = (tmp_path / "run" / "result.json").read_text()
    assert '"status": "done"' in result and re.search(r'"trajectories": [1-9]', result), result
