"""Lets a person play an environment in the terminal, with its pictures."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

from rich.console import Console

from rl_vlm.cli.conversation import print_line, print_messages
from rl_vlm.envs.errors import check_reset, check_step
from rl_vlm.envs.registry import make
from rl_vlm.types import Split

_SHOWN = 400  # characters of the info


def play_episode(
    env_id: str,
    kwargs: dict[str, Any],
    *,
    split: Split,
    index: int | None,
    seed: int | None,
    console: Console | None = None,
) -> float:
    """Show what the environment says and ask for answers until the episode ends; return the sum of rewards."""
    console = console or Console(highlight=False)
    total, ended = 0.0, ""
    with closing(make(env_id, **kwargs)) as env:
        options: dict[str, Any] = {"split": split} | ({} if index is None else {"index": index})
        observation, info = check_reset(env.reset(seed=seed, options=options))
        print_line(console, _shorten(info), "dim")
        print_messages(console, observation.messages)
        while not ended:
            try:
                answer = input("> ")
            except (EOFError, RuntimeError):  # standard input has ended, or is closed
                answer = ""
            if not answer:
                break
            observation, reward, terminated, truncated, info = check_step(env.step(answer))
            total += reward
            print_line(console, f"reward {reward:g}  {_shorten(info)}", "dim")
            print_messages(console, observation.messages)
            ended = "The end" if terminated else "Cut off" if truncated else ""
    if ended:
        print_line(console, f"{ended}: {total:g} in all.", "bold")
    return total


def _shorten(info: dict[str, Any]) -> str:
    text = json.dumps(info, default=str)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
