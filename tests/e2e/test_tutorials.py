"""The tutorials that need no GPU and no cluster: every command that they show ends well, in order, in an empty folder."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from runs import ROOT, CommandProcess, environment

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(1800)]

PAGES = ("tutorial_sweep", "tutorial_preferences", "tutorial_image_tool")
BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def shell(commands: str, folder: Path) -> None:
    """As a reader with the package's environment active."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    python = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=folder,
        env=environment(PATH=path, PYTHONPATH=python),
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, f"{commands}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def stop(servers: list[CommandProcess]) -> None:
    while servers:
        servers.pop().__exit__()


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_tutorial_work_in_order(page: str, tmp_path: Path) -> None:
    servers: list[CommandProcess] = []
    try:
        for language, name, text in BLOCK.findall((ROOT / f"docs/{page}.md").read_text()):
            if name:
                (tmp_path / name).write_text(text)
            elif language == "sh" and text.startswith("rl-vlm serve"):
                servers.append(CommandProcess(*shlex.split(text)[1:]))
                servers[-1].wait_until(lambda: "lets running requests finish" in servers[-1].output(), "the server")
            elif language == "sh":
                if "http://" not in text:  # the page has told the reader to end the server
                    stop(servers)
                shell(text, tmp_path)
    finally:
        stop(servers)
